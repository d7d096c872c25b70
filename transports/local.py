"""Files of a local or mounted disk, ``file://`` and plain paths. Data path: dataset -> [file] -> sample.

Whole reads and ranges are one trip to a thread that opens, reads and closes: two to three times the rate of
a trip for each of the three, for small files in the page cache. Streams and open files are aiofiles', a trip
for each chunk.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from aiofiles.threadpool import wrap

from asyncloader.transports.base import ObjectInfo, Transport
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.checks import (
    check_chunk_size,
    check_path,
    check_prefix,
    check_range,
    check_size,
    check_start,
)
from asyncloader.transports.confine import Entry, Root, os_errors
from asyncloader.transports.errors import RangeOutOfBounds
from asyncloader.transports.ranges import ReadPlan

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedReader

__all__ = ["LocalTransport"]

_R = TypeVar("_R")

# A file that is written again so soon may keep its time: clocks of file systems tick every 4 ms to 2 s.
_SETTLED_NS = 3_000_000_000


class LocalTransport(Transport):
    """The regular files below a directory.

    Links are followed as long as they stay below the root; `list` follows them too, and passes over a link to
    a directory that it is inside of. A file that is replaced while it is read gives its old or its new bytes;
    one that is written to in place gives what the system gives.

    Args:
        root: the directory. Relative paths are taken from the working directory of now.
        threads: files that are read at the same time at most, at least 1. Default: the number of CPUs
            plus 4, 32 at most, which is enough for files in the page cache; a network disk may want more.
    """

    range_gap: ClassVar[int] = 16 << 10  # what a system call costs, in bytes of the page cache

    def __init__(self, root: str | os.PathLike[str], *, threads: int | None = None) -> None:
        self.root = os.path.abspath(os.fspath(root))  # noqa: PTH100 - Path.resolve would follow links, which is I/O
        self.threads = min(32, (os.cpu_count() or 1) + 4) if threads is None else threads
        self._files = Root(self.root)
        self._pool = BlockingPool("local", self.threads)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport for ``file:///absolute/directory`` (percent-escapes allowed) or a plain path."""
        if "://" not in url:
            return cls(url, **options)
        parts = urlsplit(url)
        if parts.scheme.lower() != "file" or parts.netloc not in {"", "localhost"} or not parts.path:
            raise ValueError(f"{url!r} is not a local file URL; write file:///absolute/directory, or a plain path")
        if parts.query or parts.fragment:
            raise ValueError(f"{url!r} holds a bare '?' or '#'; escape it as %3F or %23, or give a plain path")
        return cls(unquote(parts.path, errors="surrogateescape"), **options)

    def __repr__(self) -> str:
        state = "closed" if self._pool.closed else "open"
        return f"<LocalTransport {self.root!r} threads={self.threads} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return partial(type(self), threads=self.threads), (self.root,)

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole file in one trip to a thread. As `Transport.read`."""
        return await self._pool.run(partial(self._with_file, path, partial(self._read, path, max_bytes)))

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range in one trip to a thread. As `Transport.read_range`."""
        (answer,) = await self.read_ranges(path, [(start, length)])
        return answer

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read all ranges in one trip to a thread, the file opened once. As `Transport.read_ranges`."""
        return await self._pool.run(partial(self._read_planned, path, self._plan(ranges)))

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read a file in chunks of exactly `chunk_size`, the last one shorter. As `Transport.stream`."""
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        async with self._open(path, start) as file:
            while True:
                with os_errors(path, self.root):
                    chunk = await file.read(chunk_size)
                if not chunk:
                    return
                yield chunk

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Give the regular files' paths, one trip to a thread for each directory. As `Transport.list`."""
        check_prefix(prefix)
        pending = [Entry(prefix.rpartition("/")[0], True, frozenset())]
        while pending:
            entry = pending.pop()
            if not entry.is_directory:
                yield entry.path
                continue
            inside = await self._pool.run(partial(self._files.entries, entry.path, entry.ancestors))
            pending.extend(each for each in reversed(inside) if each.path.startswith(prefix))

    async def size(self, path: str) -> int:
        """Give a file's size in bytes. As `Transport.size`."""
        return await self._pool.run(partial(self._with_file, path, lambda _, size: size))

    async def info(self, path: str) -> ObjectInfo:
        """Give a file's size, and its time of modification, size and inode as its version. As `Transport.info`.

        There is no version in the first 3 seconds after a change, in which another one could leave no trace.
        """
        return await self._pool.run(partial(self._with_file, path, lambda descriptor, _: _describe(descriptor)))

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole file in one trip to a thread, its version too. As `Transport.read_with_info`."""
        return await self._pool.run(partial(self._with_file, path, partial(self._read_described, path, max_bytes)))

    def open(self, path: str) -> AbstractAsyncContextManager[AsyncBufferedReader]:
        """Open a file for reading, as aiofiles does, in this transport's threads and below its root.

            async with transport.open("shards/000.tar") as file:
                header = await file.read(512)
                await file.seek(0)

        The file belongs to the running loop and is closed at the end of the block, also when that is
        cancelled.

        Raises:
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """
        return self._open(path)

    async def aclose(self) -> None:
        """Wait for the reads in progress and join the threads. As `Transport.aclose`."""
        await self._pool.aclose()

    @asynccontextmanager
    async def _open(self, path: str, start: int = 0) -> AsyncGenerator[AsyncBufferedReader, None]:
        check_path(path)
        # Buffered on purpose: its lock makes the close below wait for a read that a cancelled caller left
        # behind.
        file = await self._pool.acquire(partial(self._open_buffered, path, start), BufferedReader.close)
        try:
            wrapped = wrap(file, loop=asyncio.get_running_loop(), executor=self._pool)
            yield cast("AsyncBufferedReader", wrapped)
        finally:
            await self._pool.finish(file.close)

    # Below: what runs in the threads.

    def _open_buffered(self, path: str, start: int) -> BufferedReader:
        descriptor, size = self._files.open(path)
        try:
            check_start(path, size, start)
            with os_errors(path, self.root):
                if start:
                    os.lseek(descriptor, start, os.SEEK_SET)
                return open(descriptor, "rb")  # noqa: PTH123 - a descriptor has no path
        except BaseException:
            os.close(descriptor)
            raise

    def _with_file(self, path: str, use: Callable[[int, int], _R]) -> _R:
        """Open, give descriptor and size to `use`, close."""
        descriptor, size = self._files.open(path)
        try:
            with os_errors(path, self.root):
                return use(descriptor, size)
        finally:
            os.close(descriptor)

    def _read(self, path: str, max_bytes: int | None, descriptor: int, size: int) -> bytes:
        check_size(path, size, max_bytes)
        # One byte more than the size: a read that comes back with the size has met the end of the file.
        data = os.read(descriptor, size + 1)
        if len(data) == size:
            return data
        # The file is changing, or is larger than one system call gives (2 GiB on Linux).
        parts, total = [data], len(data)
        while data := os.read(descriptor, max(size - total, 0) + 4096):
            total += len(data)
            check_size(path, total, max_bytes)
            parts.append(data)
        return b"".join(parts)

    def _read_described(self, path: str, max_bytes: int | None, descriptor: int, size: int) -> tuple[bytes, ObjectInfo]:
        before = _describe(descriptor)
        data = self._read(path, max_bytes, descriptor, size)
        same = before.size == len(data) and before == _describe(descriptor)
        return data, ObjectInfo(len(data), before.etag if same else None)

    def _read_planned(self, path: str, plan: ReadPlan) -> Sequence[bytes]:
        def use(descriptor: int, size: int) -> Sequence[bytes]:
            for block in plan.blocks:
                check_range(path, size, block.start, block.length)
            return plan.cut([_pread(descriptor, path, block.start, block.length) for block in plan.blocks])

        return self._with_file(path, use)


def _describe(descriptor: int) -> ObjectInfo:
    status = os.fstat(descriptor)
    settled = time.time_ns() - status.st_mtime_ns > _SETTLED_NS
    return ObjectInfo(status.st_size, f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}" if settled else None)


def _pread(descriptor: int, path: str, start: int, length: int) -> bytes:
    """Read exactly `length` bytes at `start`."""
    data = os.pread(descriptor, length, start)
    if len(data) == length:
        return data
    parts, total = (
        [data],
        len(data),
    )  # longer than one system call gives, or cut short since its size was taken
    while total < length:
        data = os.pread(descriptor, length - total, start + total)
        if not data:
            raise RangeOutOfBounds(
                f"{path!r} was cut to {start + total:,} bytes while it was read",
                path=path,
                size=start + total,
            )
        parts.append(data)
        total += len(data)
    return b"".join(parts)
