"""Keeps files of the local cache mapped between reads, for a reader that needs parts of them again and again.

Data path: cache_store: file -> [mapped_files] -> cached_object, in a thread -> dataset.

To open a file of the cache, and to compare its name, version and checksum, takes as long as to copy some hundred KiB of
it. A file never changes once it has its name, so a mapping that was compared once stays right.

A file that was evicted takes room on the disk until its last mapping ends. So a file that is read is looked for once a
second, which also keeps its time of last use, and `drop_unused` ends the mappings of the others.

Nothing is locked, so that a fork cannot inherit a locked lock: every change is one operation on a dictionary. A mapping
that is dropped ends when the last reader has let go of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from typing import Self

from asyncloader.transports.cache_store import USE_AGE_NS, CacheEntry

if sys.platform != "win32":
    import resource

MOST_FILES = 256
"""Files that are mapped at a time: each has a descriptor, and all together at most a quarter of the process's."""

_LOOKED_FOR_S = 1.0


class _MappedFile:
    __slots__ = ("bytes", "looked", "path", "status", "used")

    def __init__(self, entry: CacheEntry, now: float) -> None:
        self.bytes = mmap(entry.descriptor, 0, access=ACCESS_READ)
        self.path = entry.path
        self.status = os.fstat(entry.descriptor)
        self.looked = self.used = now


class MappedFiles:
    """Files of a cache directory. Several threads may use it. Pickles as an empty one; a deep copy is the same object,
    because descriptors are the process's.
    """

    def __init__(self) -> None:
        self._files: dict[Hashable, _MappedFile] = {}
        self._most = _most()

    def __len__(self) -> int:
        return len(self._files)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def find(self, name: Hashable) -> mmap | None:
        """Return the bytes of a file, followed by its footer; None if it is not mapped, or was evicted."""
        file = self._files.get(name)
        if file is None:
            return None
        file.used = now = time.monotonic()
        if now - file.looked >= _LOOKED_FOR_S:
            if not _is_there(file):
                self._files.pop(name, None)
                return None
            file.looked = now
        return file.bytes

    def open(self, name: Hashable, opener: Callable[[], CacheEntry | None]) -> mmap | None:
        """Map the file that `opener` opens, and return its bytes, followed by its footer; None if it opens none.

        Raises:
            OSError: the file cannot be opened or mapped.
        """
        entry = opener()
        if entry is None:
            return None
        try:
            file = _MappedFile(entry, time.monotonic())
        finally:
            entry.close()
        if len(self._files) >= self._most:
            kept = sorted(self._files.copy().items(), key=lambda each: each[1].used)
            for oldest, _ in kept[: len(kept) // 4 + 1]:
                self._files.pop(oldest, None)
        self._files[name] = file
        return file.bytes

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


def _is_there(file: _MappedFile) -> bool:
    """Return whether the name is still that of the file, and the file whole; keep its time of last use."""
    try:
        status = os.lstat(file.path)
    except OSError:
        return False
    # The size, too: a read behind the end of a file that another program has cut would kill the process.
    if not os.path.samestat(status, file.status) or status.st_size != file.status.st_size:
        return False
    if not 0 <= time.time_ns() - status.st_mtime_ns < USE_AGE_NS:
        with suppress(OSError):  # the directory is read-only
            os.utime(file.path, follow_symlinks=False)
    return True
