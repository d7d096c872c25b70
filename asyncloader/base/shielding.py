"""Waits for work that goes on if the waiting task is cancelled.

Data path: none; wherever several tasks wait for one piece of work, or a clean-up must not be cut short.

Not `asyncio.shield`: from Python 3.14 on, once a waiter was cancelled, it has the event loop log the work's error as
"exception in shielded future", even if another waiter, or the next call, gets that error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

T = TypeVar("T")


def shielded(work: Awaitable[T]) -> asyncio.Future[T]:
    """A future with the outcome of `work`, whose cancellation leaves `work` alone."""
    inner = asyncio.ensure_future(work)
    if inner.done():
        return inner
    outer: asyncio.Future[T] = inner.get_loop().create_future()

    def pass_on(ended: asyncio.Future[T]) -> None:
        if outer.done():
            return
        if ended.cancelled():
            outer.cancel()
        elif (error := ended.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(ended.result())

    inner.add_done_callback(pass_on)
    outer.add_done_callback(lambda _: inner.remove_done_callback(pass_on))
    return outer


def retrieve_error(work: asyncio.Future[Any]) -> None:
    """Mark the error of `work` as retrieved, so that asyncio does not log it: who needs the outcome gets it, too."""
    if not work.cancelled():
        work.exception()


async def wait_until_done(work: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all of `work` is done, also if the waiting task is cancelled: the cancellation is raised after it."""
    interrupted: asyncio.CancelledError | None = None
    while left := [each for each in work if not each.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
