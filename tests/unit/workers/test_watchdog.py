"""Deadlines of workers; for delays that are not theirs see `test_watchdog_delays.py`."""

from __future__ import annotations

from asyncloader.workers.watchdog import START_SECONDS, TaskWatchdog
from tests.unit.workers.clock import Clock
from tests.unit.workers.watching import SECONDS, Timeouts, nothing_sent, watching


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
