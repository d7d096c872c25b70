"""`LocalTransport`: reads and writes files of a local or mounted disk, ``file://`` and plain paths.

Data path: dataset -> [local: threads] -> rooted_files -> file system.

Whole reads and ranges take one call in a thread, which opens, reads and closes; streams take one call per chunk.
"""

# Names are plain strings: creating a Path per read would cost more than opening the file.

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from aiofiles.threadpool import wrap
from typing_extensions import Buffer

from asyncloader.base.shielding import wait_until_done
from asyncloader.transports.base import ObjectInfo, PinnedReader, Transport, changed_error, overrides
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.checks import (
    check_chunk_size,
    check_path,
    check_prefix,
    check_range,
    check_size,
    check_start,
)
from asyncloader.transports.errors import ObjectNotFound, RangeOutOfBounds, TransportError
from asyncloader.transports.open_files import OpenFile, OpenFiles, use_ranges
from asyncloader.transports.ranges import ReadPlan
from asyncloader.transports.rooted_files import RootedFiles, os_errors

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedReader

_R = TypeVar("_R")

# A second change within this time may not alter the modification time: file systems' clocks tick every 4 ms to 2 s.
_SETTLED_NS = 3_000_000_000


class LocalTransport(Transport):
    """The regular files below a directory.

    Links are followed as long as they stay below the root. `list` follows them, too, but skips a link to a directory
    that contains it. If a file is replaced while it is read, either its old or its new bytes are returned; if it is
    modified in place, the result is whatever the system returns.

    Args:
        root: the directory. Relative paths are relative to the current working directory.
        threads: maximum number of files read at the same time, at least 1. Default: the number of CPUs plus 4, 32 at
            most; a network disk may need more.
    """

    range_gap: ClassVar[int] = 16 << 10  # reading these bytes from the page cache takes as long as a system call

    def __init__(self, root: str | os.PathLike[str], *, threads: int | None = None) -> None:
        self.root = os.path.abspath(os.fspath(root))  # noqa: PTH100 - Path.resolve would follow links, which is I/O
        self.threads = min(32, (os.cpu_count() or 1) + 4) if threads is None else threads
        self._files = RootedFiles(self.root)
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
        """Read a whole file, like `Transport.read`."""
        return await self._use(path, partial(self._read, path, max_bytes))

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range, like `Transport.read_range`."""
        (answer,) = await self.read_ranges(path, [(start, length)])
        return answer

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read all ranges, opening the file once, like `Transport.read_ranges`."""
        plan = self._plan(ranges)
        return await self._use(path, partial(self._read_blocks, path, plan))

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read a file in chunks of exactly `chunk_size`, but for the last chunk, like `Transport.stream`."""
        async with aclosing(self.stream_with_status(path, start, chunk_size)) as chunks:
            async for chunk, _ in chunks:
                if chunk:
                    yield chunk

    async def stream_with_status(
        self, path: str, start: int, chunk_size: int
    ) -> AsyncGenerator[tuple[bytes, tuple[os.stat_result, os.stat_result]], None]:
        """Read a file like `stream`, and return each chunk with the file's status before and after it. An empty chunk
        ends the stream, so that the status after the last byte is returned, too.
        """
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        async with self._open_file(path, start) as file:
            read = partial(_read_described, file, chunk_size)
            chunk = b"."
            while chunk:
                with os_errors(path, self.root):
                    chunk, around = await self._pool.run(read)
                yield chunk, around

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the paths of the regular files, with one call in a thread, like `Transport.list`."""
        check_prefix(prefix)
        for path in await self._pool.run(partial(self._files.paths, prefix)):
            yield path
            self._pool.check_open()

    async def size(self, path: str) -> int:
        """Return a file's size in bytes, like `Transport.size`."""
        return await self._use(path, lambda _, size: size)

    async def info(self, path: str) -> ObjectInfo:
        """Return a file's size, and as its version its modification time, size and inode, like `Transport.info`.

        In the first 3 seconds after a change the version is None, because another change might not alter the time.
        """
        return await self._use(path, lambda descriptor, _: _describe(os.fstat(descriptor)))

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole file and its version, like `Transport.read_with_info`."""
        return await self._use(path, partial(self._read_described, path, max_bytes))

    def pinned(self, path: str) -> PinnedReader:
        """Return a reader that compares the file's identity, size and time at each read, like `Transport.pinned`."""
        return super().pinned(path) if overrides(self, LocalTransport) else PinnedFile(self, path)

    async def read_ranges_of(
        self, path: str, ranges: Iterable[tuple[int, int]], first: os.stat_result | None
    ) -> tuple[Sequence[bytes], os.stat_result]:
        """Read ranges of a file, and return its status. `first`: the status that it must have; None: any.

        Raises:
            ReadFailed: the file was replaced or modified.
            The other errors of `read_ranges`.
        """
        plan = self._plan(ranges)

        def use(descriptor: int, size: int) -> tuple[Sequence[bytes], os.stat_result]:
            before = os.fstat(descriptor)
            if first is not None and _differs(first, before):
                raise changed_error(path)
            data = self._read_blocks(path, plan, descriptor, size)
            # Also after the read: the file may have been modified in place during it.
            if _differs(before, os.fstat(descriptor)):
                raise changed_error(path)
            return data, before

        return await self._use(path, use)

    def open_here(self, path: str) -> int:
        """Open a file, and return its descriptor, which the caller closes. Blocks: call it in a thread.

        Raises:
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed: see `errors`.
        """
        return self._files.open(path)[0]

    def open(self, path: str) -> AbstractAsyncContextManager[AsyncBufferedReader]:
        """Open a file for reading, like aiofiles, in this transport's threads and below its root.

            async with transport.open("shards/000.tar") as file:
                header = await file.read(512)
                await file.seek(0)

        The file belongs to the running loop and is closed at the end of the block, also on cancellation.

        Raises:
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """
        return self._open_wrapped(path)

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        """Write a file, making its directories, like `Transport.write`.

        The bytes go to ``.NAME.partial`` beside it, which is renamed when the disk has them. A killed writer leaves
        that file, and the next writer of `path` uses it again.
        """
        from asyncloader.transports.file_writing import write_file  # locks files as POSIX systems do

        stopped = threading.Event()
        writing = self._pool.submit(partial(write_file, self._files, path, pieces, stopped))
        try:
            return await asyncio.wrap_future(writing)
        except asyncio.CancelledError:
            # The thread reads the caller's pieces, and must not rename the file after the caller has ended.
            stopped.set()
            if not writing.cancel():
                await wait_until_done([asyncio.wrap_future(writing)])
            raise

    async def delete(self, path: str) -> None:
        """Delete a file, like `Transport.delete`."""
        from asyncloader.transports.file_writing import delete_file  # as in `write`

        await self._pool.run(partial(delete_file, self._files, path))

    async def aclose(self) -> None:
        """Wait for reads in progress and join the threads, like `Transport.aclose`."""
        await self._pool.aclose()

    @asynccontextmanager
    async def _open_wrapped(self, path: str) -> AsyncGenerator[AsyncBufferedReader, None]:
        async with self._open_file(path) as file:
            wrapped = wrap(file, loop=asyncio.get_running_loop(), executor=self._pool)
            yield cast("AsyncBufferedReader", wrapped)

    @asynccontextmanager
    async def _open_file(self, path: str, start: int = 0) -> AsyncGenerator[BufferedReader, None]:
        check_path(path)
        # Buffered on purpose: its lock makes the close below wait for a read that a cancelled caller left running.
        file = await self._pool.acquire(partial(self._open_buffered, path, start), BufferedReader.close)
        try:
            yield file
        finally:
            await self._pool.finish(file.close)

    async def _use(self, path: str, use: Callable[[int, int], _R]) -> _R:
        """In a thread, open a file, call `use` with its descriptor and its size, and close it."""
        return await self._pool.run(partial(self._with_file, path, use))

    # --- runs in the threads

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
        descriptor, size = self._files.open(path)
        try:
            with os_errors(path, self.root):
                return use(descriptor, size)
        finally:
            os.close(descriptor)

    def _read(self, path: str, max_bytes: int | None, descriptor: int, size: int) -> bytes:
        check_size(path, size, max_bytes)
        # One byte more than the size: if only `size` bytes are returned, the read has reached the end of the file.
        data = os.pread(descriptor, size + 1, 0)
        if len(data) == size:
            return data
        # The file is changing, or is larger than one system call returns (2 GiB on Linux).
        parts, total = [data], len(data)
        while data := os.pread(descriptor, max(size - total, 0) + 4096, total):
            total += len(data)
            check_size(path, total, max_bytes)
            parts.append(data)
        return b"".join(parts)

    def _read_described(self, path: str, max_bytes: int | None, descriptor: int, size: int) -> tuple[bytes, ObjectInfo]:
        before = _describe(os.fstat(descriptor))
        data = self._read(path, max_bytes, descriptor, size)
        same = before.size == len(data) and before == _describe(os.fstat(descriptor))
        return data, ObjectInfo(len(data), before.etag if same else None)

    def _read_blocks(self, path: str, plan: ReadPlan, descriptor: int, size: int) -> Sequence[bytes]:
        for block in plan.blocks:
            check_range(path, size, block.start, block.length)
        return plan.cut([_read_block(descriptor, path, block.start, block.length) for block in plan.blocks])


class PinnedFile(PinnedReader):
    """Parts of one file. The arguments are those of `PinnedReader`."""

    def __init__(self, transport: LocalTransport, path: str) -> None:
        super().__init__(transport, path)
        self._files = transport
        self._status: os.stat_result | None = None

    def is_of_version(self, status: os.stat_result) -> bool:
        """Return whether this is the status of the version that is read here, as far as it shows. The first that is
        asked for determines it.
        """
        self._status = first = self._status or status
        return not _differs(first, status)

    @property
    def version(self) -> str:
        """The version that is read here, also of a file that is too new for an ETag; empty before the first read."""
        return "" if self._status is None else _version(self._status)

    @property
    def size(self) -> int | None:
        """Bytes of the file, like `PinnedReader.size`."""
        return None if self._status is None else self._status.st_size

    def may_be(self, etag: str | None) -> bool:
        """Compare without the inode number, which may change: see `_differs`."""
        first = self._status
        return etag is None or first is None or etag.rpartition("-")[0] == _version(first)

    @property
    def local(self) -> bool:
        """Whether `use_local` may find something: the version that is read is known."""
        return self._status is not None

    def use_local(
        self,
        ranges: Sequence[tuple[int, int]],
        use: Callable[[bytes | OpenFile, int, int, int], _R],
        files: OpenFiles,
    ) -> list[_R | None]:
        """Call a function with the bytes of each range, without the event loop: blocks, and is called in a thread.

        Arguments and results are those of `CachedObject.use_local`. An open file is asked for its status after each
        call, which says whether it was modified, or replaced: then it has lost its name. A link in its name, or a
        folder, may change without a trace in the file: so it is opened anew once a second.
        """
        file = self._kept_file(files)
        if file is None:
            return [None] * len(ranges)
        size = file.status.st_size

        def find(_: int, stop: int) -> tuple[OpenFile | None, int, int]:
            return (file, 0, size) if stop <= size else (None, 0, -1)

        try:
            results = use_ranges(ranges, use, find)
        except Exception:
            if self._is_same(file):
                raise
        else:
            # After the reads: the file may have been modified in place during them.
            if self._is_same(file):
                return results
        files.drop((self._files.root, self.path))
        return [None] * len(ranges)

    def check_here(self, files: OpenFiles) -> None:
        """Raise ReadFailed if the file is of another version, or gone. Blocks: call it in a thread."""
        file = self._kept_file(files)
        if file is None or not self._is_same(file):
            files.drop((self._files.root, self.path))
            raise changed_error(self.path)

    def _kept_file(self, files: OpenFiles) -> OpenFile | None:
        """Return the file, kept open; None if it cannot be opened, or is of another version."""
        name = (self._files.root, self.path)
        file = files.find(name)
        if file is None:
            try:
                file = _KeptFile(self._files.open_here(self.path), self.path)
            except TransportError:  # a read has the error
                return None
            files.keep(name, file)
        return file if self.is_of_version(file.status) else None

    def _is_same(self, file: OpenFile) -> bool:
        now = file.current_status()
        return now.st_nlink == file.status.st_nlink and self.is_of_version(now)

    async def _info(self) -> ObjectInfo:
        _, status = await self._read(())
        return _describe(status)

    async def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        data, _ = await self._read(ranges)
        return data

    async def _read(self, ranges: Iterable[tuple[int, int]]) -> tuple[Sequence[bytes], os.stat_result]:
        data, status = await self._files.read_ranges_of(self.path, ranges, self._status)
        # Compared here as well: a concurrent first read may have set `_status` while this read was in a thread.
        self._compare(status)
        return data, status

    async def _stream(self, start: int, stop: int | None, chunk_size: int) -> AsyncGenerator[bytes, None]:  # noqa: ARG002 - a file is read as it is asked for
        async with aclosing(self._files.stream_with_status(self.path, start, chunk_size)) as chunks:
            async for chunk, around in chunks:
                for status in around:
                    self._compare(status)
                if chunk:
                    yield chunk

    async def _is_unchanged(self) -> bool:
        # By the file's status, which also a file has that is too new for a version. Raises if it differs.
        try:
            await self.info()
        except ObjectNotFound:
            return False
        return True

    def _compare(self, status: os.stat_result) -> None:
        if not self.is_of_version(status):
            raise changed_error(self.path)


class _KeptFile(OpenFile):
    """A file that is opened anew once a second."""

    __slots__ = ()

    def is_there(self) -> bool:
        """Return False."""
        return False


def _read_described(file: BufferedReader, nbytes: int) -> tuple[bytes, tuple[os.stat_result, os.stat_result]]:
    before = os.fstat(file.fileno())
    # `read` allocates all that it may return, so not far more than the file has; some of /proc state no size.
    chunk = file.read(min(nbytes, max(before.st_size, 1 << 16)))
    return chunk, (before, os.fstat(file.fileno()))


def _differs(first: os.stat_result, now: os.stat_result) -> bool:
    """Return whether a file was replaced or modified; the latter as far as the file system's clock shows."""
    if (first.st_size, first.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
        return True
    # File systems in user space (sshfs, gcsfuse) give a file another inode number when the kernel has dropped it from
    # its cache. A file that replaced it, with the same size and time of modification, has another time of status
    # change.
    same_file = (first.st_dev, first.st_ino) == (now.st_dev, now.st_ino)
    return not same_file and first.st_ctime_ns != now.st_ctime_ns


def _describe(status: os.stat_result) -> ObjectInfo:
    settled = time.time_ns() - status.st_mtime_ns > _SETTLED_NS
    return ObjectInfo(status.st_size, f"{_version(status)}-{status.st_ino}" if settled else None)


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}"


def _read_block(descriptor: int, path: str, start: int, length: int) -> bytes:
    """Read exactly `length` bytes at `start`."""
    data = os.pread(descriptor, length, start)
    if len(data) == length:
        return data
    # More than one system call returns, or the file was truncated after its size was read.
    parts, total = [data], len(data)
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
