"""Deadlines of persistent workers, which may finish an abandoned epoch's tasks before the new epoch's start-up."""

from __future__ import annotations

from asyncloader.workers.watchdog import START_SECONDS, TaskWatchdog
from tests.unit.workers.clock import Clock


def test_tasks_of_the_epoch_before_are_not_the_start_up() -> None:
    """A worker's start-up is counted from when it could begin: each of those tasks restarts its time."""
    clock, on_timeout = Clock(), list[int]()
    watchdog = TaskWatchdog(
        clock, 5.0, 1, concurrent=False, catch_up=lambda _: None, on_timeout=lambda worker, _: on_timeout.append(worker)
    )
    watchdog.starts(0)
    watchdog.assigned(0, 0)
    for task in range(1, 4):
        clock.at(task * (START_SECONDS - 1))
        watchdog.cleared(0)
    begun = 3 * (START_SECONDS - 1)
    clock.at(begun + START_SECONDS - 1)
    assert on_timeout == []
    clock.at(begun + START_SECONDS + 1)
    assert on_timeout == [0]
    clock.close()
