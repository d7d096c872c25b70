"""Copies the chunks of a stream into the cache, in a thread, while the consumer works on them.

Data path: cached -> [cache_tee: Tee] -> cache_store -> disk.

At most `_BATCH` bytes wait besides those being written, so a disk that is slower than the network slows the stream. A
disk error drops the copy; the stream continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from asyncloader.shielding import shielded
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cache_store import CacheFill

# Bytes per call in a thread: chunks from a network are often only some KiB.
_BATCH = 1 << 20


class Tee:
    """Copies one object into the cache. The caller must call `drop` in the end; it does nothing after `keep`.

    Args:
        fill: the file; None for no copy.
        pool: the threads that write.
        on_error: called in the loop with the disk's error, at most once.
    """

    def __init__(self, fill: CacheFill | None, pool: BlockingPool, on_error: Callable[[OSError], None]) -> None:
        self._fill = fill
        self._pool = pool
        self._on_disk_error = on_error
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._writing: asyncio.Future[None] | None = None

    @property
    def open(self) -> bool:
        """Whether a copy is being written that can still be kept."""
        return self._fill is not None

    async def add(self, chunk: bytes) -> None:
        """Add the next bytes. TransportClosed: the pool was closed."""
        if self._fill is None:
            return
        self._waiting.append(chunk)
        self._bytes += len(chunk)
        if self._bytes >= _BATCH:
            await self._flush()

    async def keep(self) -> None:
        """Write the remaining bytes, and make the file part of the cache."""
        await self._finish_write()
        if (fill := self._fill) is not None:
            try:
                await self._pool.run(partial(fill.commit, b"".join(self._waiting)))
            except OSError as error:
                self._fail(error)
            self._fill = None

    async def drop(self) -> None:
        """Delete the file, unless it was kept."""
        if (fill := self._fill) is not None:
            self._fill = None
            writing, self._writing = self._writing, None
            # Before the wait for the write: a cancelled caller may not get any further.
            await self._pool.finish(fill.abort)
            if writing is not None:
                await asyncio.wait([writing])
                if not writing.cancelled():
                    writing.exception()  # retrieved, so that asyncio does not log it; the copy is deleted anyway

    async def _flush(self) -> None:
        # One write at a time: the file's bytes and its checksum must be in order.
        await self._finish_write()
        if self._fill is None or not self._waiting:
            return
        data = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        self._writing = asyncio.wrap_future(self._pool.submit(partial(self._fill.write, data)))

    async def _finish_write(self) -> None:
        """Wait for the write in progress. If the caller is cancelled, the write continues and `drop` waits for it."""
        if self._writing is None:
            return
        try:
            await shielded(self._writing)
        except OSError as error:
            self._writing = None
            self._fail(error)
            await self.drop()
        else:
            self._writing = None

    def _fail(self, error: OSError) -> None:
        self._waiting.clear()
        self._bytes = 0
        self._on_disk_error(error)
