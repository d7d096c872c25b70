"""Files of a local or mounted disk, ``file://`` and plain paths. Data path: dataset -> [file] -> sample.

Whole reads and ranges are one trip to a thread that opens, reads and closes: two to three times the rate of
a trip for each of the three, for small files in the page cache. Streams and open files are aiofiles', a trip
for each chunk.

A directory that no path leads out of. Data path: thread -> [open below the root] -> bytes.

Everything here blocks and is called in a thread. Names are checked before the open, links after it: the
kernel is asked which file was really opened, so a link that is swapped between a check and an open gains
nothing.
"""

# Names are strings, as the kernel takes and gives them: a Path for each read would cost more than its open.
# ruff: noqa: PTH112, PTH115, PTH116, PTH118

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from io import BufferedReader
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, cast
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


# A FIFO must not make the open wait for a writer, nor a terminal become ours.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class Entry(NamedTuple):
    """One name in a directory: `path` below the root, and the identities of the directories above it."""

    path: str
    is_directory: bool
    ancestors: frozenset[tuple[int, int]]


class RootedFiles:
    """The files below one directory. Holds no descriptor and no state but names.

    Args:
        directory: absolute path. It may be, or become, a link; it is followed wherever it leads.
        descriptors: where the system shows what a descriptor has open. Where it shows nothing, names are
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
            AccessDenied, ReadFailed: the system says so.
        """
        check_path(path)
        with os_errors(path, self.directory):
            descriptor = os.open(os.path.join(self.directory, path), _FLAGS)
            try:
                status = os.fstat(descriptor)
                self._refuse_outside(descriptor, path)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFound(f"{path!r} is not a regular file in {self.directory!r}", path=path)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor, status.st_size

    def entries(self, directory: str, ancestors: frozenset[tuple[int, int]]) -> list[Entry]:
        """Give a directory's regular files and directories, and the links to such.

        Sorted so that walking into each directory where it stands gives all paths in ascending order. A
        directory that is its own ancestor, by a link, gives nothing, and so does one that is gone.

        Args:
            directory: path below the root; empty for the root itself.
            ancestors: of the `Entry` that named it.

        Raises:
            InvalidPath: the directory, or a link in it, leads out of the root.
            ObjectNotFound: the root itself is missing.
            AccessDenied, ReadFailed: the system says so.
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
        """Give the path of the open file, free of links."""
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
        self._real = os.path.realpath(self.directory)  # the root may be a link that was pointed elsewhere
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
    """Translate the system's errors about `path` below `root` into the family of `TransportError`."""
    try:
        yield
    except TransportError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        what = (
            f"{path!r} does not exist in {root!r}" if os.path.isdir(root) else f"the root {root!r} is not a directory"
        )
        raise ObjectNotFound(what, path=path) from error
    except PermissionError as error:
        raise AccessDenied(f"no permission to read {path!r} in {root!r}", path=path) from error
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
            raise InvalidPath(f"{path!r} in {root!r}: {error.strerror}", path=path) from error
        if error.errno == errno.ENXIO:
            raise ObjectNotFound(f"{path!r} is not a regular file in {root!r}", path=path) from error
        failed = ReadFailed(f"reading {path!r} in {root!r} failed: {error.strerror}", path=path)
        failed.errno = error.errno
        raise failed from error
