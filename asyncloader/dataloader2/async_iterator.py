"""Reads a DataLoader2 with ``async for``: in a thread, so that the event loop is not blocked.

Data path: graph -> reading service -> DataLoader2 -> [async_iterator: thread] -> the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.threads import JobThreads

T_co = TypeVar("T_co", covariant=True)

_OVER = object()


class LoaderAsyncIterator(AsyncIterator[T_co]):
    """Reads a `DataLoader2` in one thread, except items that have arrived already. A cancelled call loses nothing: the
    next call gets its item, which counts as delivered only then.
    """

    def __init__(self, loader: Any) -> None:
        self._reader = _Reader(loader)
        self._thread = JobThreads(1, "asyncloader-dataloader2")
        self._reading: asyncio.Future[Any] | None = None
        self._waiting = False

    def limit(self, num_batches: int | None) -> None:
        """Limit the items like `DataLoader2Iterator.limit`. Not while a call waits for an item."""
        self._reader.limit = num_batches
        if self._reader.iterator is not None:
            self._reader.iterator.limit(num_batches)

    def resume(self) -> None:
        """Go on after a pause like `DataLoader2Iterator.resume`."""
        if self._reader.iterator is not None:
            self._reader.iterator.resume()

    async def __anext__(self) -> T_co:
        if self._waiting:
            raise RuntimeError("another call waits for the next item already: await one after the other")
        self._waiting = True
        try:
            return await self._next()
        finally:
            self._waiting = False

    async def _next(self) -> T_co:
        iterator = self._reader.iterator
        if self._reading is None and iterator is not None and iterator._ready():
            ready: T_co = next(iterator)
            iterator._count()
            return ready
        # A future of another event loop, in which a call was cancelled, may never be done. Its read is not repeated.
        if self._reading is None or self._reading.get_loop() is not asyncio.get_running_loop():
            self._reading = self._thread.call(_Reader.read, self._reader)
        # Cancelling this wait does not cancel the read, and `_reading` is kept: the next call gets its item, even if
        # the item had arrived when the wait was cancelled.
        await asyncio.wait([self._reading])
        reading, self._reading = self._reading, None
        item, error = reading.result()
        self._reader.outcome = None
        del reading  # its error will refer to this frame
        if error is not None:
            try:
                # ``async for`` would end, or its task look cancelled.
                if isinstance(error, (StopIteration, StopAsyncIteration, asyncio.CancelledError)):
                    raise not_the_end(error, "the graph's code") from error
                raise error
            finally:
                del error
        if item is _OVER:
            raise StopAsyncIteration
        assert self._reader.iterator is not None
        self._reader.iterator._count()
        delivered: T_co = item
        return delivered


class _Reader:
    """Reads in the thread. It does not refer to the async iterator: the frames of an error that it raises would keep
    that, and with it the thread, until the collector runs.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.iterator: Any = None
        self.limit: int | None = None  # set before the epoch began
        self.outcome: tuple[Any, BaseException | None] | None = None  # of a read, until it is taken

    def read(self) -> tuple[Any, BaseException | None]:
        """Return what was read and not taken, or read the next item."""
        if self.outcome is None:
            self.outcome = self._read()
        return self.outcome

    def _read(self) -> tuple[Any, BaseException | None]:
        """Return the next item, or `_OVER` at the end; and None, or the error. The first call begins the epoch."""
        # The error is returned: asyncio logs an error that a future has and no code retrieves, and the waiting call may
        # have been cancelled, or the loop be closed.
        try:
            if self.iterator is None:
                self.iterator = iter(self._loader)
                self.iterator._counts = False  # an item that was read may be delivered later, or never
                if self.limit is not None:
                    self.iterator.limit(self.limit)
            try:
                return next(self.iterator), None
            except StopIteration:
                return _OVER, None
        except BaseException as error:
            # Without this frame, which refers to `outcome`, and in no variable of it.
            return None, error.with_traceback(getattr(error.__traceback__, "tb_next", None))
