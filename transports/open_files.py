"""Keeps files of the local cache, or of a disk, open for a reader that needs parts of them again and again.

Data path: cache_store: file -> [open_files] -> cached_object, in a thread -> dataset.
Data path: file -> [open_files] -> local, in a thread -> dataset.
Data path: host_files: decoded chunk -> [open_files] -> kept_chunks -> dataset.

To open a file of the cache, and to compare its name, version and checksum, takes as long as to copy some hundred KiB of
it. A file never changes once it has its name, so a file that was compared once stays right.

Files are read, and not mapped. A read costs a system call, which is about a microsecond, but it lets other threads run
while the disk works; and of a file that another program has cut, or of a bad sector, it is an error, where a mapping
would kill the process.

A file that was evicted takes room on the disk until it is closed. So a file that is read is looked for once a second,
which also keeps its time of last use, and `drop_unused` drops the others.

Nothing is locked, so that a fork cannot inherit a locked lock: every change is one operation on a dictionary. A file
that is dropped is closed when the last reader has let go of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Self, TypeVar

if sys.platform != "win32":
    import resource

MOST_FILES = 256
"""Files that are open at a time; at most a quarter of the descriptors that the process may have."""

USE_AGE_NS = 60_000_000_000
"""A file's time of last use is updated when it is older than this, or in the future."""

_R = TypeVar("_R")

_LOOKED_FOR_S = 1.0

# Ranges up to this length are read by one system call, and the parts of a sample cut from the bytes. Of a longer range
# each part is read by itself, which saves a copy.
_READ_AT_ONCE = 1 << 16

# Bytes between two ranges that are read to save a system call, which takes about as long as to copy 16 KiB.
_GAP = 1 << 13


class EntryLost(Exception):
    """A file was opened, but cannot be read: the disk failed, or it was cut. The store still has the object."""


class OpenFile:
    """An open file. Its slices are bytes, which are read when they are asked for, in any thread.

    Args:
        descriptor: the file, which is closed when this object is garbage.
        path: its name.
    """

    __slots__ = ("_descriptor", "looked", "path", "status", "used")

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self.path = path
        self.status = os.fstat(descriptor)
        self.looked = self.used = time.monotonic()

    def __getitem__(self, part: slice) -> bytes:
        """Read from ``part.start`` to ``part.stop``. There is no step, and neither is left out. Raises the error of
        `read`.
        """
        return self.read(part.start, part.stop - part.start)

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from byte `start` on.

        Raises:
            EntryLost: the disk failed, or the file was cut.
        """
        try:
            data = os.pread(self._descriptor, length, start)
            while len(data) < length:  # one system call returns at most 2 GiB
                more = os.pread(self._descriptor, length - len(data), start + len(data))
                if not more:
                    raise EntryLost(f"{self.path} was cut while it was open")
                data += more
        except OSError as error:
            raise EntryLost(f"reading {self.path} failed: {error}") from error
        return data

    def current_status(self) -> os.stat_result:
        """Return the status of the file as it is now; `status` is that of when it was opened."""
        return os.fstat(self._descriptor)

    def is_there(self) -> bool:
        """Return whether the name is still that of the file, and the file whole; keep its time of last use."""
        try:
            status = os.lstat(self.path)
        except OSError:
            return False
        if not os.path.samestat(status, self.status) or status.st_size != self.status.st_size:
            return False
        if not 0 <= time.time_ns() - status.st_mtime_ns < USE_AGE_NS:
            with suppress(OSError):  # the directory is read-only
                os.utime(self.path, follow_symlinks=False)
        return True

    def close(self) -> None:
        """Close the file at once. No other thread may use it: its descriptor may be another file's next."""
        descriptor = self.detach()
        if descriptor >= 0:
            os.close(descriptor)

    def detach(self) -> int:
        """Return the descriptor, which is the caller's to close; this object is closed."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def __del__(self) -> None:
        # Without our own functions, which may be gone at exit. The attribute is missing if `__init__` failed.
        descriptor = getattr(self, "_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)


class OpenFiles:
    """Files of a cache directory, or of a disk. Several threads may use it. Pickles as an empty one; a deep copy is the
    same object, because descriptors are the process's.
    """

    def __init__(self) -> None:
        self._files: dict[Hashable, OpenFile] = {}
        self._most = _most()

    def __len__(self) -> int:
        return len(self._files)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def find(self, name: Hashable) -> OpenFile | None:
        """Return a file; None if it is not open, or was evicted. Behind its bytes lies its footer."""
        file = self._files.get(name)
        if file is None:
            return None
        file.used = now = time.monotonic()
        if now - file.looked >= _LOOKED_FOR_S:
            if not file.is_there():
                self.drop(name)
                return None
            file.looked = now
        return file

    def open(self, name: Hashable, opener: Callable[[], OpenFile | None]) -> OpenFile | None:
        """Keep the file that `opener` opens, and return it; None if it opens none. Errors as `opener`."""
        file = opener()
        if file is not None:
            self.keep(name, file)
        return file

    def keep(self, name: Hashable, file: OpenFile) -> None:
        """Keep a file that is open."""
        if len(self._files) >= self._most:
            kept = sorted(self._files.copy().items(), key=lambda each: each[1].used)
            for oldest, _ in kept[: len(kept) // 4 + 1]:
                self._files.pop(oldest, None)
        self._files[name] = file

    def drop(self, name: Hashable) -> None:
        """Keep a file no longer: it is lost, or was evicted."""
        self._files.pop(name, None)

    def drop_unused(self, seconds: float) -> bool:
        """Drop the files that were not read for this time. Return whether any are left."""
        since = time.monotonic() - seconds
        for name, file in self._files.copy().items():
            if file.used <= since:
                self._files.pop(name, None)
        return bool(self._files)


def _most() -> int:
    if sys.platform == "win32":
        return MOST_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(1, min(MOST_FILES, soft // 4))


def use_ranges(
    ranges: Sequence[tuple[int, int]],
    use: Callable[[bytes | OpenFile, int, int, int], _R],
    find: Callable[[int, int], tuple[bytes | OpenFile | None, int, int]],
) -> list[_R | None]:
    """Call a function with the bytes of each range that open files have. Each is used right after it was read, so that
    the memory of a range serves for the next.

    Args:
        ranges: ``(start, length)`` pairs; quicker if they ascend.
        use: called with bytes, the positions in them at which the range begins and ends, and its start. The bytes of a
            long range are a file, whose slices raise EntryLost where it cannot be read. Does not return None.
        find: returns what has the object's bytes between two positions, and from where to where it has them; None: no
            file has them. May raise EntryLost.

    Returns:
        For each range what `use` returned, or None: no file has it, or EntryLost was raised.

    Raises:
        The errors of `use`, except EntryLost.
    """
    count = len(ranges)
    results: list[_R | None] = [None] * count
    # The bytes that were read last, those of the object from `low` to `high`; none yet.
    data, low, high = b"", 0, -1
    file: OpenFile | bytes | None = None  # has those from `begin` to `end`
    begin, end = 0, -1
    for number, (start, length) in enumerate(ranges, 1):
        stop = start + length
        try:
            if start < low or stop > high:
                if start < begin or stop > end:
                    file, begin, end = find(start, stop)
                if file is None:
                    continue
                if length > _READ_AT_ONCE or isinstance(file, bytes):
                    results[number - 1] = use(file, start - begin, stop - begin, start)
                    continue
                low, high = start, stop
                if number < count and start <= ranges[number][0] <= stop + _GAP:
                    high = _end_of_read(ranges, number, stop, min(end, start + _READ_AT_ONCE))
                data = file.read(low - begin, high - low)
            results[number - 1] = use(data, start - low, stop - low, start)
        except EntryLost:  # the store's own way of reading finds out why
            high = -1
    return results


def _end_of_read(ranges: Sequence[tuple[int, int]], number: int, stop: int, limit: int) -> int:
    """Return where to end the read of a range that ends at `stop`, so that it has the following ranges, from this
    number on, if they are near by.
    """
    for at in range(number, len(ranges)):
        start, length = ranges[at]
        if start > stop + _GAP or start + length > limit:
            break
        stop = max(stop, start + length)
    return stop
