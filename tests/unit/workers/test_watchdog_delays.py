"""Delays that no worker is to blame for: our own, those of other workers, and those of the consumer."""

from __future__ import annotations

import pytest

from tests.unit.workers.clock import Clock
from tests.unit.workers.watching import Timeouts, watching

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
