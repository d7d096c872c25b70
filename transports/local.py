"""`LocalTransport`: reads files from a local or mounted disk, ``file://`` and plain paths.

Data path: dataset -> [local: threads, RootedFiles] -> file system.

Whole reads and ranges take one call in a thread, which opens, reads and closes: two to three times the rate of three
separate calls, for small files in the page cache. Streams and open files use aiofiles, with one call per chunk.

`RootedFiles` opens files and makes sure that no path leads out of the root. Names are checked before the open, symbolic
links after it: the kernel is asked which file was actually opened, so replacing a link between a check and an open
achieves nothing.
"""

# Names are plain strings: creating a Path per read would cost more than opening the file.
# ruff: noqa: PTH112, PTH115, PTH116, PTH118

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, cast
from urllib.parse import unquote, urlsplit

from aiofiles.threadpool import wrap

from asyncloader.transports.base import ObjectInfo, PinnedReader, Transport, changed
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.checks import (
    check_chunk_size,
    check_path,
    check_prefix,
    check_range,
    check_size,
    check_start,
)
from asyncloader.transports.errors import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    RangeOutOfBounds,
    ReadFailed,
    TransportError,
)
from asyncloader.transports.ranges import ReadPlan

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedReader

__all__ = [
    "Entry",
    "LocalTransport",
    "RootedFiles",
    "os_errors",
]

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
            most, which is enough for files in the page cache; a network disk may need more.
    """

    range_gap: ClassVar[int] = 16 << 10  # as many bytes of the page cache cost as much as a system call

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
        """Read a whole file in one call in a thread. As `Transport.read`."""
        return await self._pool.run(partial(self._with_file, path, partial(self._read, path, max_bytes)))

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range in one call in a thread. As `Transport.read_range`."""
        (answer,) = await self.read_ranges(path, [(start, length)])
        return answer

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read all ranges in one call in a thread, opening the file once. As `Transport.read_ranges`."""
        return await self._pool.run(partial(self._read_planned, path, self._plan(ranges)))

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read a file in chunks of exactly `chunk_size`, the last one shorter. As `Transport.stream`."""
        async with aclosing(self.stream_of(path, start, chunk_size, lambda _: None)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream_of(
        self, path: str, start: int, chunk_size: int, opened: Callable[[os.stat_result], object]
    ) -> AsyncGenerator[bytes, None]:
        """Read a file as `stream`; `opened` is called with its description before anything is read, and may raise."""
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        async with self._open(path, start, opened) as file:
            while True:
                with os_errors(path, self.root):
                    chunk = await file.read(chunk_size)
                if not chunk:
                    return
                yield chunk

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the paths of the regular files, with one call in a thread per directory. As `Transport.list`."""
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
        """Return a file's size in bytes. As `Transport.size`."""
        return await self._pool.run(partial(self._with_file, path, lambda _, size: size))

    async def info(self, path: str) -> ObjectInfo:
        """Return a file's size, and as its version its modification time, size and inode. As `Transport.info`.

        In the first 3 seconds after a change there is no version, because another change might not alter the time.
        """
        return await self._pool.run(partial(self._with_file, path, lambda descriptor, _: _describe(descriptor)))

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole file and its version in one call in a thread. As `Transport.read_with_info`."""
        return await self._pool.run(partial(self._with_file, path, partial(self._read_described, path, max_bytes)))

    def pinned(self, path: str) -> PinnedReader:
        """Return a reader that compares the file's identity, size and time with each read. As `Transport.pinned`."""
        return _PinnedFile(self, path)

    async def read_ranges_of(
        self, path: str, ranges: Iterable[tuple[int, int]], first: os.stat_result | None
    ) -> tuple[Sequence[bytes], os.stat_result]:
        """Read ranges of the file that `first` describes, None: of any, and return its description.

        Raises:
            ReadFailed: the file is another one, or was modified.
            The other errors of `read_ranges`.
        """
        plan = self._plan(ranges)

        def use(descriptor: int, size: int) -> tuple[Sequence[bytes], os.stat_result]:
            before = os.fstat(descriptor)
            if first is not None and _identity(first) != _identity(before):
                raise changed(path)
            data = self._read_blocks(path, plan, descriptor, size)
            if _identity(before) != _identity(os.fstat(descriptor)):
                raise changed(path)
            return data, before

        return await self._pool.run(partial(self._with_file, path, use))

    def open(self, path: str) -> AbstractAsyncContextManager[AsyncBufferedReader]:
        """Open a file for reading, like aiofiles, in this transport's threads and below its root.

            async with transport.open("shards/000.tar") as file:
                header = await file.read(512)
                await file.seek(0)

        The file belongs to the running loop and is closed at the end of the block, also on cancellation.

        Raises:
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """
        return self._open(path)

    async def aclose(self) -> None:
        """Wait for reads in progress and join the threads. As `Transport.aclose`."""
        await self._pool.aclose()

    @asynccontextmanager
    async def _open(
        self, path: str, start: int = 0, opened: Callable[[os.stat_result], object] = lambda _: None
    ) -> AsyncGenerator[AsyncBufferedReader, None]:
        check_path(path)
        # Buffered on purpose: its lock makes the close below wait for a read that a cancelled caller left running.
        file = await self._pool.acquire(partial(self._open_buffered, path, start, opened), BufferedReader.close)
        try:
            wrapped = wrap(file, loop=asyncio.get_running_loop(), executor=self._pool)
            yield cast("AsyncBufferedReader", wrapped)
        finally:
            await self._pool.finish(file.close)

    # --- runs in the threads

    def _open_buffered(self, path: str, start: int, opened: Callable[[os.stat_result], object]) -> BufferedReader:
        descriptor, size = self._files.open(path)
        try:
            opened(os.fstat(descriptor))
            check_start(path, size, start)
            with os_errors(path, self.root):
                if start:
                    os.lseek(descriptor, start, os.SEEK_SET)
                return open(descriptor, "rb")  # noqa: PTH123 - a descriptor has no path
        except BaseException:
            os.close(descriptor)
            raise

    def _with_file(self, path: str, use: Callable[[int, int], _R]) -> _R:
        """Open a file, call `use` with its descriptor and size, and close it."""
        descriptor, size = self._files.open(path)
        try:
            with os_errors(path, self.root):
                return use(descriptor, size)
        finally:
            os.close(descriptor)

    def _read(self, path: str, max_bytes: int | None, descriptor: int, size: int) -> bytes:
        check_size(path, size, max_bytes)
        # One byte more than the size: if only `size` bytes are returned, the end of the file was reached.
        data = os.read(descriptor, size + 1)
        if len(data) == size:
            return data
        # The file is changing, or is larger than one system call returns (2 GiB on Linux).
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
        return self._with_file(path, partial(self._read_blocks, path, plan))

    def _read_blocks(self, path: str, plan: ReadPlan, descriptor: int, size: int) -> Sequence[bytes]:
        for block in plan.blocks:
            check_range(path, size, block.start, block.length)
        return plan.cut([_pread(descriptor, path, block.start, block.length) for block in plan.blocks])


class _PinnedFile(PinnedReader):
    """Parts of one file. The arguments are those of `PinnedReader`."""

    def __init__(self, transport: LocalTransport, path: str) -> None:
        super().__init__(transport, path)
        self._files = transport
        self._status: os.stat_result | None = None

    async def _info(self) -> ObjectInfo:
        _, status = await self._read(())
        return ObjectInfo(status.st_size, None)

    async def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        data, _ = await self._read(ranges)
        return data

    async def _read(self, ranges: Iterable[tuple[int, int]]) -> tuple[Sequence[bytes], os.stat_result]:
        data, status = await self._files.read_ranges_of(self.path, ranges, self._status)
        self._compare(status)  # there may have been another first read meanwhile
        return data, status

    async def _stream(self, start: int, chunk_size: int) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._files.stream_of(self.path, start, chunk_size, self._compare)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _compare(self, status: os.stat_result) -> None:
        self._status = first = self._status or status
        if _identity(first) != _identity(status):
            raise changed(self.path)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes when a file is replaced or modified; the latter as far as the file system's clock shows."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _describe(descriptor: int) -> ObjectInfo:
    status = os.fstat(descriptor)
    settled = time.time_ns() - status.st_mtime_ns > _SETTLED_NS
    return ObjectInfo(status.st_size, f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}" if settled else None)


def _pread(descriptor: int, path: str, start: int, length: int) -> bytes:
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


# Opening a FIFO must not wait for a writer, and a terminal must not become our controlling terminal.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class Entry(NamedTuple):
    """One name in a directory: `path` below the root, and the identities of the directories that contain it."""

    path: str
    is_directory: bool
    ancestors: frozenset[tuple[int, int]]


class RootedFiles:
    """The files below one directory. Holds no descriptor, only names.

    Args:
        directory: absolute path. It may be, or become, a link, which is followed wherever it leads.
        descriptors: directory in which the system shows the open files of a process. If it is not available, names are
            resolved a second time and compared with the open file.
    """

    def __init__(self, directory: str, descriptors: str = "/proc/self/fd") -> None:
        self.directory = directory
        self._descriptors = descriptors
        self._real: str | None = None

    def open(self, path: str) -> tuple[int, int]:
        """Open a regular file for reading.

        Returns:
            Its descriptor, which the caller closes, and its size in bytes.

        Raises:
            InvalidPath: the path is not canonical, or a link in it leads out of the root.
            ObjectNotFound: there is no such file, or it is not a regular one.
            AccessDenied, ReadFailed: the system refuses or fails.
        """
        check_path(path)
        with os_errors(path, self.directory):
            descriptor = os.open(os.path.join(self.directory, path), _FLAGS)
            try:
                status = os.fstat(descriptor)
                self._refuse_outside(descriptor, path)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFound(f"{os.path.join(self.directory, path)!r} is not a regular file", path=path)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor, status.st_size

    def entries(self, directory: str, ancestors: frozenset[tuple[int, int]]) -> list[Entry]:
        """Return a directory's regular files and directories, including links to such.

        They are sorted so that descending into each directory at its position gives all paths in ascending order. A
        directory that contains itself by a link gives nothing, and neither does one that was deleted.

        Args:
            directory: path below the root; empty for the root itself.
            ancestors: of the `Entry` that named it.

        Raises:
            InvalidPath: the directory, or a link in it, leads out of the root.
            ObjectNotFound: the root itself is missing.
            AccessDenied, ReadFailed: the system refuses or fails.
        """
        with os_errors(directory, self.directory):
            try:
                descriptor = os.open(os.path.join(self.directory, directory), _FLAGS | os.O_DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                if os.path.isdir(self.directory):
                    return []
                raise
            try:
                self._refuse_outside(descriptor, directory)
                status = os.fstat(descriptor)
                identity = (status.st_dev, status.st_ino)
                if identity in ancestors:
                    return []
                return self._scan(descriptor, directory, ancestors | {identity})
            finally:
                os.close(descriptor)

    def _scan(self, descriptor: int, directory: str, ancestors: frozenset[tuple[int, int]]) -> list[Entry]:
        found: list[Entry] = []
        with os.scandir(descriptor) as names:
            for name in names:
                path = f"{directory}/{name.name}" if directory else name.name
                is_directory = name.is_dir()
                if not is_directory and not name.is_file():
                    continue  # a FIFO, a socket, a device, or a link that leads nowhere
                if name.is_symlink() and not is_directory:  # directories are checked when they are opened
                    self._refuse_true_path(os.path.realpath(os.path.join(self.directory, path)), path)
                found.append(Entry(path, is_directory, ancestors))
        # "a/" sorts where its files do: after "a.png", before "a0.png".
        found.sort(key=lambda entry: entry.path + "/" if entry.is_directory else entry.path)
        return found

    def _refuse_outside(self, descriptor: int, path: str) -> None:
        self._refuse_true_path(self._true_path(descriptor, path), path)

    def _true_path(self, descriptor: int, path: str) -> str:
        """Return the path of the open file, with all links resolved."""
        try:
            return os.readlink(f"{self._descriptors}/{descriptor}")
        except OSError:
            true = os.path.realpath(os.path.join(self.directory, path))
            if not os.path.samestat(os.stat(true), os.fstat(descriptor)):
                raise ReadFailed(f"{path!r} was replaced while it was opened; read it again", path=path) from None
            return true

    def _refuse_true_path(self, true: str, path: str) -> None:
        if self._real is not None and _below(true, self._real):
            return
        self._real = os.path.realpath(self.directory)  # the root may be a link, which may have changed
        if not _below(true, self._real):
            raise InvalidPath(
                f"{path!r} leads out of the root {self.directory!r} by a link, which is refused; "
                "open a transport at a directory that holds both the link and what it points to",
                path=path,
            )


def _below(true: str, root: str) -> bool:
    return true == root or true.startswith(root.rstrip("/") + "/")


@contextmanager
def os_errors(path: str, root: str) -> Generator[None, None, None]:
    """Translate the system's errors about `path` below `root` into `TransportError`s."""
    where = repr(os.path.join(root, path))
    try:
        yield
    except TransportError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"{where} does not exist" if os.path.isdir(root) else f"the root {root!r} is not a directory"
        raise ObjectNotFound(what, path=path) from error
    except PermissionError as error:
        raise AccessDenied(f"no permission to read {where}", path=path) from error
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
            raise InvalidPath(f"{where}: {error.strerror}", path=path) from error
        if error.errno == errno.ENXIO:
            raise ObjectNotFound(f"{where} is not a regular file", path=path) from error
        failed = ReadFailed(f"reading {where} failed: {error.strerror}", path=path)
        failed.errno = error.errno
        raise failed from error
