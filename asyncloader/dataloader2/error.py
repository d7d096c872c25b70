"""The exception that pauses an iterator, and the error for a process that has ended, as graphs word it.

Data path: none.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.errors import WorkerDied

__all__ = ["PauseIteration", "worker_died"]


class PauseIteration(StopIteration):
    """Reading is paused; `DataLoader2Iterator.resume` lets it go on."""


def worker_died(text: str) -> WorkerDied:
    """The error with this text, for a process whose number or exit code is not known here."""
    made: Callable[[str], WorkerDied] = WorkerDied  # type: ignore[assignment]  # each error can be made from a text
    return made(text)
