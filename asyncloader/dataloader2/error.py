"""The exception that pauses an iterator, and the error for a process of a graph that has ended.

Data path: none.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.errors import WorkerDied

__all__ = ["PauseIteration", "worker_died"]


class PauseIteration(StopIteration):
    """Reading is paused; `DataLoader2Iterator.resume` lets it go on."""


def worker_died(text: str) -> WorkerDied:
    """Make the error from a text alone, where the number or the exit code of the process is not known."""
    made: Callable[[str], WorkerDied] = WorkerDied  # type: ignore[assignment]  # each error can be made from a text
    return made(text)
