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
        self._loader = loader
        self._iterator: Any = None
        self._thread = JobThreads(1, "asyncloader-dataloader2")
        self._reading: asyncio.Future[Any] | None = None
        self._waiting = False
        self._limit: int | None = None  # given before the epoch began

    def limit(self, num_batches: int | None) -> None:
        """See `DataLoader2Iterator.limit`. Not while an item is waited for."""
        self._limit = num_batches
        if self._iterator is not None:
            self._iterator.limit(num_batches)

    def resume(self) -> None:
        """See `DataLoader2Iterator.resume`."""
        if self._iterator is not None:
            self._iterator.resume()

    async def __anext__(self) -> T_co:
        if self._waiting:
            raise RuntimeError("another call waits for the next item already: await one after the other")
        self._waiting = True
        try:
            return await self._next()
        finally:
            self._waiting = False

    async def _next(self) -> T_co:
        if self._reading is None:
            if self._iterator is not None and self._iterator._ready():
                ready: T_co = next(self._iterator)
                return ready
            self._reading = self._thread.call(self._read, self._loader)
            self._reading.add_done_callback(_retrieved)
        await asyncio.wait([self._reading])  # if it is cancelled, even when the item is there, the next call gets that
        reading, self._reading = self._reading, None
        item = reading.result()
        if item is _OVER:
            raise StopAsyncIteration
        assert self._iterator is not None
        self._iterator._count()
        found: T_co = item
        return found

    def _read(self, loader: Any) -> Any:
        if self._iterator is None:
            self._iterator = iter(loader)
            if self._limit is not None:
                self._iterator.limit(self._limit)
        try:
            return self._iterator._read()
        except StopIteration:
            return _OVER


def _retrieved(reading: asyncio.Future[Any]) -> None:
    """Have asyncio not complain of an error that nobody waits for any more."""
    reading.exception()
