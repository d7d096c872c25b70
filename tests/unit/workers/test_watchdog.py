"""Deadlines of workers; for delays that are not theirs see `test_watchdog_delays.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from asyncloader.workers.watchdog import START_SECONDS, TaskWatchdog


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is set by `at` and `jump`."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def at(self, seconds: float) -> None:
        """Let the time reach `seconds` after the beginning; everything due until then happens when it is due."""
        while self.timers and self.timers[0] <= seconds:
            self.jump(self.timers[0])
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """Set the time at once, as if the loop had been held up: everything that became due happens only now."""
        self.now = 1000.0 + seconds
        self.call_soon(self.stop)
        self.run_forever()

    @property
    def timers(self) -> list[float]:
        """The times of the pending timers, in seconds after the beginning."""
        return sorted(handle.when() - 1000.0 for handle in self._scheduled if not handle.cancelled())  # type: ignore[attr-defined]


SECONDS = 5.0


class Timeouts(list[tuple[int, float]]):
    """Records the worker and the seconds of every reported timeout."""

    def __call__(self, worker: int, seconds: float) -> None:
        self.append((worker, seconds))


def nothing_sent(worker: int) -> None:
    """The worker has sent nothing that was not read."""


def watching(
    clock: Clock,
    on_timeout: Callable[[int, float], None],
    workers: int = 1,
    *,
    concurrent: bool = False,
    catch_up: Callable[[int], None] = nothing_sent,
) -> TaskWatchdog:
    """Return a watchdog over workers that have started up."""
    watchdog = TaskWatchdog(clock, SECONDS, workers, concurrent=concurrent, catch_up=catch_up, on_timeout=on_timeout)
    for worker in range(workers):
        watchdog.started(worker)
    return watchdog


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A loop whose clock is set by hand."""
    loop = Clock()
    yield loop
    loop.close()


@pytest.fixture
def on_timeout() -> Timeouts:
    """An empty list of timeouts."""
    return Timeouts()


def test_a_task_that_takes_too_long_times_out(clock: Clock, on_timeout: Timeouts) -> None:
    """A timeout is reported at the deadline, once, with the seconds that the task took."""
    watchdog = watching(clock, on_timeout)
    clock.at(10)
    watchdog.assigned(0, 0)
    clock.at(14.9)
    assert on_timeout == []
    clock.at(15)
    assert on_timeout == [(0, 5.0)]
    clock.at(100)
    assert len(on_timeout) == 1
    assert clock.timers == []


def test_an_answer_in_time_removes_the_deadline(clock: Clock, on_timeout: Timeouts) -> None:
    """Answered tasks have no deadline, and without tasks there is no timer."""
    watchdog = watching(clock, on_timeout)
    watchdog.assigned(0, 0)
    clock.at(4)
    watchdog.answered(0, 0)
    clock.at(5)
    assert clock.timers == []
    clock.at(50)
    assert on_timeout == []


def test_a_blocking_workers_next_task_begins_with_its_answer(clock: Clock, on_timeout: Timeouts) -> None:
    """A blocking worker's second task waits for the first: the time in the queue does not count."""
    watchdog = watching(clock, on_timeout)
    for seq in range(3):
        watchdog.assigned(0, seq)
    for seq, answered in enumerate((4, 8)):
        clock.at(answered)
        watchdog.answered(0, seq)
    clock.at(12.9)
    assert on_timeout == []
    clock.at(13)
    assert on_timeout == [(0, 5.0)]


def test_a_concurrent_workers_tasks_begin_when_they_are_given(clock: Clock, on_timeout: Timeouts) -> None:
    """A concurrent worker works on all of its tasks at a time: another answer extends no deadline."""
    watchdog = watching(clock, on_timeout, concurrent=True)
    watchdog.assigned(0, 0)
    clock.at(1)
    watchdog.assigned(0, 1)
    clock.at(4)
    watchdog.answered(0, 0)
    clock.at(5.9)
    assert on_timeout == []
    clock.at(6)
    assert on_timeout == [(0, 5.0)]


def test_each_worker_has_its_own_deadline(clock: Clock, on_timeout: Timeouts) -> None:
    """A timeout of one worker does not affect others; the timer continues for them."""
    watchdog = watching(clock, on_timeout, workers=3)
    for worker in range(3):
        clock.at(worker)
        watchdog.assigned(worker, worker)
    clock.at(4)
    watchdog.answered(1, 1)
    clock.at(5)
    assert on_timeout == [(0, 5.0)]
    clock.at(6.9)
    assert len(on_timeout) == 1
    clock.at(7)
    assert on_timeout == [(0, 5.0), (2, 5.0)]


# ------------------------------------------------------------------------------------------------- start-up


def test_start_up_has_a_minute(clock: Clock, on_timeout: Timeouts) -> None:
    """While the user's start-up code runs the deadline is a minute, counted from the process's start, not a task's."""
    watchdog = TaskWatchdog(clock, SECONDS, 1, concurrent=False, catch_up=nothing_sent, on_timeout=on_timeout)
    clock.at(10)
    watchdog.starts(0)
    clock.at(40)
    watchdog.assigned(0, 0)
    clock.at(10 + START_SECONDS - 0.1)
    assert on_timeout == []
    clock.at(10 + START_SECONDS)
    assert on_timeout == [(0, START_SECONDS)]


def test_the_first_task_begins_with_the_end_of_start_up(clock: Clock, on_timeout: Timeouts) -> None:
    """A task that waited for the start-up code has its full time after it."""
    watchdog = TaskWatchdog(clock, SECONDS, 1, concurrent=False, catch_up=nothing_sent, on_timeout=on_timeout)
    watchdog.starts(0)
    watchdog.assigned(0, 0)
    clock.at(30)
    watchdog.started(0)
    clock.at(34.9)
    assert on_timeout == []
    clock.at(35)
    assert on_timeout == [(0, 5.0)]


def test_a_replacement_starts_anew(clock: Clock, on_timeout: Timeouts) -> None:
    """The tasks of the worker that died are forgotten, and its replacement has a minute to start."""
    watchdog = watching(clock, on_timeout)
    watchdog.assigned(0, 0)
    watchdog.forget(0)
    clock.at(20)
    assert on_timeout == []
    watchdog.starts(0)
    watchdog.assigned(0, 0)
    clock.at(79.9)
    assert on_timeout == []
    clock.at(80)
    assert on_timeout == [(0, START_SECONDS)]


def test_another_workers_start_up_delays_no_timeout(clock: Clock, on_timeout: Timeouts) -> None:
    """A deadline before the deadline for which the timer is set counts."""
    watchdog = watching(clock, on_timeout, workers=2)
    watchdog.starts(1)
    watchdog.assigned(1, 0)
    assert clock.timers == [START_SECONDS]
    clock.at(1)
    watchdog.assigned(0, 1)
    clock.at(6)
    assert on_timeout == [(0, 5.0)]
    clock.at(START_SECONDS)
    assert on_timeout == [(0, 5.0), (1, START_SECONDS)]


# ---------------------------------------------------------------------------------------------------- ends


def test_close_drops_all_deadlines(clock: Clock, on_timeout: Timeouts) -> None:
    """After `close` there is no timer and no timeout; closing twice is fine."""
    watchdog = watching(clock, on_timeout, workers=2)
    watchdog.assigned(0, 0)
    watchdog.close()
    watchdog.close()
    assert clock.timers == []
    clock.at(100)
    assert on_timeout == []


def test_closing_while_it_tells(clock: Clock) -> None:
    """The `on_timeout` callback may close the watchdog: the timer is not set again."""
    told: list[int] = []

    def close(worker: int, _: float) -> None:
        told.append(worker)
        watchdog.close()

    watchdog = watching(clock, close, workers=2)
    for worker in range(2):
        watchdog.assigned(worker, worker)
    clock.at(100)
    assert told == [0]
    assert clock.timers == []


# -------------------------------------------------------------------------------- delays that no worker is to blame for


# ------------------------------------------------------------------------------------------- our own delay


def test_unread_frames_are_read_before_a_timeout(clock: Clock, on_timeout: Timeouts) -> None:
    """Frames of a worker are read before its deadline is checked, and only then."""
    asked: list[int] = []

    def catch_up(worker: int) -> None:
        asked.append(worker)
        watchdog.answered(worker, worker)

    watchdog = watching(clock, on_timeout, workers=2, catch_up=catch_up)
    watchdog.assigned(0, 0)
    clock.at(4)
    watchdog.assigned(1, 1)
    clock.at(5)
    assert asked == [0]
    clock.at(50)
    assert asked == [0, 1]
    assert on_timeout == []


def test_catching_up_may_find_its_end(clock: Clock, on_timeout: Timeouts) -> None:
    """If `catch_up` forgets the worker or closes the watchdog, no timeout is reported."""

    def catch_up(worker: int) -> None:
        if worker == 0:
            watchdog.forget(0)
        else:
            watchdog.close()

    watchdog = watching(clock, on_timeout, workers=3, catch_up=catch_up)
    for worker in range(3):
        watchdog.assigned(worker, worker)
    clock.at(100)
    assert on_timeout == []
    assert clock.timers == []


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_loop_that_was_held_up_restarts_all_deadlines(clock: Clock, on_timeout: Timeouts, concurrent: bool) -> None:
    """After a long call in the loop's thread, or a suspended job, every worker has one new period."""
    watchdog = watching(clock, on_timeout, workers=2, concurrent=concurrent)
    watchdog.assigned(0, 0)
    watchdog.assigned(1, 1)
    clock.jump(30)
    assert on_timeout == []
    watchdog.answered(1, 1)
    clock.at(34.9)
    assert on_timeout == []
    clock.at(35)
    assert on_timeout == [(0, 5.0)]


def test_a_short_delay_of_the_loop_extends_no_deadline(clock: Clock, on_timeout: Timeouts) -> None:
    """The loop counts as held up only if the timer is late by more than a second."""
    watchdog = watching(clock, on_timeout)
    watchdog.assigned(0, 0)
    clock.jump(4)
    clock.jump(5.75)
    assert on_timeout == [(0, 5.75)]


# ------------------------------------------------------------------------------------- leases of others


def test_waiting_for_a_lease_does_not_count(clock: Clock, on_timeout: Timeouts) -> None:
    """The wait for an assignment does not count; the task has its full time after it."""
    watchdog = watching(clock, on_timeout)
    watchdog.assigned(0, 0)
    clock.at(4)
    watchdog.asked(0)
    clock.at(100)
    assert on_timeout == []
    watchdog.assignment_sent(0)
    clock.at(104.9)
    assert on_timeout == []
    clock.at(105)
    assert on_timeout == [(0, 5.0)]


def test_an_answered_lease_delays_no_other_timeout(clock: Clock, on_timeout: Timeouts) -> None:
    """An answer at once takes no longer than a message; and one worker's wait does not extend another's deadline."""
    watchdog = watching(clock, on_timeout, workers=3)
    for worker in range(3):
        watchdog.assigned(worker, worker)
    watchdog.asked(0)
    watchdog.assignment_sent(0)
    watchdog.asked(2)
    clock.at(5)
    assert on_timeout == [(0, 5.0), (1, 5.0)]
    clock.at(7)
    watchdog.assignment_sent(2)
    clock.at(12)
    assert on_timeout == [(0, 5.0), (1, 5.0), (2, 5.0)]


def test_a_replacement_waits_for_no_lease(clock: Clock, on_timeout: Timeouts) -> None:
    """The request of its predecessor does not count for it."""
    watchdog = watching(clock, on_timeout)
    watchdog.assigned(0, 0)
    watchdog.asked(0)
    watchdog.forget(0)
    watchdog.starts(0)
    watchdog.started(0)
    watchdog.assigned(0, 0)
    clock.at(5)
    assert on_timeout == [(0, 5.0)]


# -------------------------------------------------------------- real event loops, whose timers have a finite resolution


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("seconds", [0.0001, 0.0004, 0.0011, 0.003])
def test_short_deadlines_come_on_real_loops(make: Callable[[], asyncio.AbstractEventLoop], seconds: float) -> None:
    """uvloop counts in milliseconds, with another kind of handle for less than one: every deadline is met."""
    loop = make()
    found: list[int] = []

    def on_timeout(worker: int, taken: float) -> None:
        found.append(worker)
        if len(found) == 2:
            loop.stop()

    watchdog = TaskWatchdog(loop, seconds, 2, concurrent=False, catch_up=lambda worker: None, on_timeout=on_timeout)

    def begin() -> None:
        for worker in (1, 0):
            watchdog.starts(worker)
            watchdog.started(worker)
            watchdog.assigned(worker, worker)

    loop.call_soon(begin)
    try:
        loop.run_forever()
    finally:
        watchdog.close()
        loop.close()
    assert sorted(found) == [0, 1]
