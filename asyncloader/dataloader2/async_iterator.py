"""Reads a DataLoader2 with ``async for``: in a thread, so that the event loop goes on.

Data path: graph -> reading service -> DataLoader2 -> [async_iterator: thread] -> the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from asyncloader.workers.fetch.threads import JobThreads

T_co = TypeVar("T_co", covariant=True)

_OVER = object()


class LoaderAsyncIterator(AsyncIterator[T_co]):
    """Reads a `DataLoader2` in one thread, but for items that are here already. A cancelled call loses nothing: the
    next one gets its item, which counts as delivered only then.
    """

    def __init__(self, loader: Any) -> None:
        self._reader = _Reader(loader)
        self._thread = JobThreads(1, "asyncloader-dataloader2")
        self._reading: asyncio.Future[Any] | None = None
        self._waiting = False

    def limit(self, num_batches: int | None) -> None:
        """See `DataLoader2Iterator.limit`. Not while an item is waited for."""
        self._reader.limit = num_batches
        if self._reader.iterator is not None:
            self._reader.iterator.limit(num_batches)

    def resume(self) -> None:
        """See `DataLoader2Iterator.resume`."""
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
        if self._reading is None:
            if iterator is not None and iterator._ready():
                ready: T_co = next(iterator)
                return ready
            self._reading = self._thread.call(_Reader.read, self._reader)
            self._reading.add_done_callback(_retrieved)
        await asyncio.wait([self._reading])  # if it is cancelled, even when the item is there, the next call gets that
        reading, self._reading = self._reading, None
        try:
            item = reading.result()
        finally:
            del reading  # its error refers to this frame
        if item is _OVER:
            raise StopAsyncIteration
        assert self._reader.iterator is not None
        self._reader.iterator._count()
        found: T_co = item
        return found


class _Reader:
    """What the thread reads with. It does not refer to the iterator: the frames of an error that it raises must not
    keep that, and with it the thread, until the collector comes.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.iterator: Any = None
        self.limit: int | None = None  # given before the epoch began

    def read(self) -> Any:
        """Return the next item, or `_OVER`. The first call begins the epoch."""
        if self.iterator is None:
            self.iterator = iter(self._loader)
            if self.limit is not None:
                self.iterator.limit(self.limit)
        try:
            return self.iterator._read()
        except StopIteration:
            return _OVER


def _retrieved(reading: asyncio.Future[Any]) -> None:
    """Have asyncio not complain of an error that nobody waits for any more."""
    reading.exception()
