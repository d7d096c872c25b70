"""Keeps the files of decoded chunks open between reads. Used in one event loop.

Data path: host_files -> [kept_chunks: open_files] -> shard_reader.

To open a file and compare its footer takes as long as to read a sample or two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from asyncloader.remote.random_access.host_files import Content, FileName, HostFiles
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cache_store import CacheEntry, EntryLost
from asyncloader.transports.open_files import OpenFile, OpenFiles

_R = TypeVar("_R")


class DecodedChunk(NamedTuple):
    """The bytes of a decoded chunk.

    Attributes:
        read: returns a part of them. Its arguments are a position and a length.
        size: the number of bytes.
        file: of which they are; None: they are not kept.
    """

    read: Callable[[int, int], bytes]
    size: int
    file: ChunkFile | None


class ChunkFile(OpenFile):
    """The open file of a decoded chunk.

    Attributes:
        size: of the chunk. Behind it lies the file's footer.
        parsed: what its reader has found out about the chunk, for the next read; None at first.
    """

    __slots__ = ("parsed", "size")

    def __init__(self, entry: CacheEntry) -> None:
        self.size = entry.size
        self.parsed: Any = None
        super().__init__(entry.detach(), entry.path)


class KeptChunks:
    """The decoded chunks of one dataset.

    Args:
        files: makes and opens them.
        open_files: keeps them open.
        pool: the threads.
        slots: how many of them are made at a time.
    """

    def __init__(self, files: HostFiles, open_files: OpenFiles, pool: BlockingPool, slots: asyncio.Semaphore) -> None:
        self._files = files
        self._kept = open_files
        self._pool = pool
        self._slots = slots

    async def use(self, name: FileName, make: Callable[[], Awaitable[bytes]], use: Callable[[DecodedChunk], _R]) -> _R:
        """Return the result of `use`, which is called in a thread. Arguments and errors are those of
        `HostFiles.use`.
        """
        file = self._kept.find(name)
        if isinstance(file, ChunkFile):
            try:
                return await self._pool.run(partial(use, DecodedChunk(file.read, file.size, file)))
            except EntryLost:
                self._kept.drop(name)
        return await self._files.use(name, make, partial(self._use, name, use), self._pool, self._slots)

    def _use(self, name: FileName, use: Callable[[DecodedChunk], _R], content: Content) -> _R:
        result = use(DecodedChunk(content.read, content.size, None))
        if isinstance(content, CacheEntry):
            self._kept.keep(name, ChunkFile(content))
        return result
