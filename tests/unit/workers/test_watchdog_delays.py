"""Delays that no worker is to blame for: our own, those of other workers, and those of the consumer."""

from __future__ import annotations

import pytest

from asyncloader.workers.watchdog import START_SECONDS, Watch
from tests.unit.workers.clock import Clock
from tests.unit.workers.watching import SECONDS, Late, nothing_sent, watching

# ------------------------------------------------------------------------------------------- our own delay


def test_what_was_sent_and_not_read_is_read_first(clock: Clock, late: Late) -> None:
    """A worker is judged by what it has sent, and nobody is asked to catch up before there is something to judge."""
    asked: list[int] = []

    def catch_up(worker: int) -> None:
        asked.append(worker)
        watch.answered(worker, worker)

    watch = watching(clock, late, workers=2, catch_up=catch_up)
    watch.assigned(0, 0)
    clock.at(4)
    watch.assigned(1, 1)
    clock.at(5)
    assert asked == [0]
    clock.at(50)
    assert asked == [0, 1]
    assert late == []


def test_the_next_task_of_one_that_caught_up_has_its_whole_time(clock: Clock, late: Late) -> None:
    """An answer that is read so late counts from then on; what it did not answer is late later."""
    unread = [0]

    def catch_up(worker: int) -> None:
        if unread:
            watch.answered(worker, unread.pop())

    watch = watching(clock, late, catch_up=catch_up)
    watch.assigned(0, 0)
    watch.assigned(0, 1)
    clock.at(9.9)
    assert late == []
    clock.at(10)
    assert late == [(0, 5.0)]


def test_catching_up_may_give_tasks(clock: Clock, late: Late) -> None:
    """What comes of an answer is another task, of whomever: it is watched from then on."""

    def catch_up(worker: int) -> None:
        if worker == 0:
            watch.answered(0, 0)
            watch.assigned(1, 1)

    watch = watching(clock, late, workers=2, catch_up=catch_up)
    watch.assigned(0, 0)
    clock.at(9.9)
    assert late == []
    clock.at(10)
    assert late == [(1, 5.0)]


def test_catching_up_may_find_its_end(clock: Clock, late: Late) -> None:
    """A worker that turns out to be gone, or a watch that is closed over it, tells of nobody."""

    def catch_up(worker: int) -> None:
        if worker == 0:
            watch.forget(0)
        else:
            watch.close()

    watch = watching(clock, late, workers=3, catch_up=catch_up)
    for worker in range(3):
        watch.assigned(worker, worker)
    clock.at(100)
    assert late == []
    assert clock.timers == []


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_loop_that_was_held_up_blames_nobody(clock: Clock, late: Late, concurrent: bool) -> None:
    """After a long call in its thread, or a suspended job, everybody has a new period; and no more than that."""
    watch = watching(clock, late, workers=2, concurrent=concurrent)
    watch.assigned(0, 0)
    watch.assigned(1, 1)
    clock.jump(30)
    assert late == []
    watch.answered(1, 1)
    clock.at(34.9)
    assert late == []
    clock.at(35)
    assert late == [(0, 5.0)]


def test_a_start_up_that_was_held_up_has_another_minute(clock: Clock, late: Late) -> None:
    """What was suspended with the job could not start either."""
    watch = Watch(clock, SECONDS, 1, concurrent=False, catch_up=nothing_sent, late=late)
    watch.starts(0)
    watch.assigned(0, 0)
    clock.jump(1000)
    clock.at(1000 + START_SECONDS - 0.1)
    assert late == []
    clock.at(1000 + START_SECONDS)
    assert late == [(0, START_SECONDS)]


def test_being_held_up_for_less_than_a_period_excuses_nobody(clock: Clock, late: Late) -> None:
    """Only a timer that is late by more than a second says something about the loop."""
    watch = watching(clock, late)
    watch.assigned(0, 0)
    clock.jump(4)
    clock.jump(5.75)
    assert late == [(0, 5.75)]


# ------------------------------------------------------------------------------------- leases of others


def test_waiting_for_a_lease_does_not_count(clock: Clock, late: Late) -> None:
    """The answer may take as long as other workers or the consumer do; the task has its whole time after it."""
    watch = watching(clock, late)
    watch.assigned(0, 0)
    clock.at(4)
    watch.asked(0)
    clock.at(100)
    assert late == []
    watch.assignment_sent(0)
    clock.at(104.9)
    assert late == []
    clock.at(105)
    assert late == [(0, 5.0)]


def test_an_answered_lease_hides_nobody(clock: Clock, late: Late) -> None:
    """An answer at once takes the time of a message; and one worker's waiting is not another's."""
    watch = watching(clock, late, workers=3)
    for worker in range(3):
        watch.assigned(worker, worker)
    watch.asked(0)
    watch.assignment_sent(0)
    watch.asked(2)
    clock.at(5)
    assert late == [(0, 5.0), (1, 5.0)]
    clock.at(7)
    watch.assignment_sent(2)
    clock.at(12)
    assert late == [(0, 5.0), (1, 5.0), (2, 5.0)]


def test_a_replacement_waits_for_no_lease(clock: Clock, late: Late) -> None:
    """What its predecessor had asked for is not what it is at."""
    watch = watching(clock, late)
    watch.assigned(0, 0)
    watch.asked(0)
    watch.forget(0)
    watch.starts(0)
    watch.started(0)
    watch.assigned(0, 0)
    clock.at(5)
    assert late == [(0, 5.0)]
