"""A task watchdog on a real event loop whose clock is set by hand, so that tests take no time."""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.workers.watchdog import TaskWatchdog
from tests.unit.workers.clock import Clock

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
