"""A cancellation that nobody asked for: code that cancels itself, or lets what it awaits be cancelled, has failed.

Data path: around what is awaited of the user's: datasets, their contexts, async samplers.

asyncio takes such a task for one that was told to end, and says no more. Then nobody would answer for its batch.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

__all__ = ["Unasked"]


class Unasked:
    """Around code that runs in a task: a CancelledError that nobody asked the task for comes out as an error.

    Args:
        whose: whose code it is, for the error's text: "the dataset's".

    Raises:
        RuntimeError: in the place of that CancelledError, from it.
    """

    __slots__ = ("_whose",)

    def __init__(self, whose: str) -> None:
        self._whose = whose

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, asyncio.CancelledError):
            return
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise RuntimeError(f"{self._whose} code cancelled itself, or let what it awaited be cancelled") from error
