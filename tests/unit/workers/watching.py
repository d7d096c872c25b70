"""A watch over workers, on a real event loop whose clock is set by hand: no time goes by."""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.workers.watchdog import Watch
from tests.unit.workers.clock import Clock

__all__ = ["SECONDS", "Late", "nothing_sent", "watching"]

SECONDS = 5.0


class Late(list[tuple[int, float]]):
    """Who was too late, and after how many seconds."""

    def __call__(self, worker: int, seconds: float) -> None:
        self.append((worker, seconds))


def nothing_sent(worker: int) -> None:
    """It has sent nothing that was not read."""


def watching(
    clock: Clock,
    late: Callable[[int, float], None],
    workers: int = 1,
    *,
    concurrent: bool = False,
    catch_up: Callable[[int], None] = nothing_sent,
) -> Watch:
    """A watch over workers whose start-up is behind them."""
    watch = Watch(clock, SECONDS, workers, concurrent=concurrent, catch_up=catch_up, late=late)
    for worker in range(workers):
        watch.started(worker)
    return watch
