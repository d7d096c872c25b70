"""An open file of the local cache, and how it is read without harm: a disk that fails raises an error.

Data path: cache_store: opens a file -> [cache_entry] -> bytes.

All functions block and are called in threads.
"""

# Names are strings, as in `cache_store`.
# ruff: noqa: PTH108

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress

from asyncloader.transports.cache_layout import CacheFooter
from asyncloader.transports.file_lock import same_file


class EntryLost(Exception):
    """A file of the cache was opened, but cannot be read. It has been deleted; the store still has the object."""


class CacheEntry:
    """An open object in the cache. Several threads may use it; one thread closes it.

    Attributes:
        etag, size, created: as in its `CacheFooter`.
        path: the file.
        descriptor: the open file; -1 when it is closed.
    """

    def __init__(self, descriptor: int, path: str, footer: CacheFooter) -> None:
        self.etag = footer.etag
        self.size = footer.size
        self.created = footer.created
        self.path = path
        self.descriptor = descriptor
        # Held during a read: the system may give a closed descriptor's number to another file at once, and the read
        # would return that file's bytes.
        self._lock = threading.Lock()

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes starting at `start`.

        Raises:
            EntryLost: the disk failed, or the file was truncated.
        """
        with self._lock:
            if self.descriptor < 0:
                raise EntryLost(f"{self.path} was closed before the read began")
            try:
                return self._read(start, length)
            except OSError as error:
                self._remove()
                raise EntryLost(f"reading {self.path} failed: {error}") from error

    def detach(self) -> int:
        """Return the descriptor, which is the caller's to close; this entry is closed."""
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """Close the file, after a read in progress."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1

    def _remove(self) -> None:
        with suppress(OSError):
            # By now the name may belong to a new copy, which another process wrote after an eviction.
            if same_file(self.descriptor, self.path):
                os.unlink(self.path)

    def _read(self, start: int, length: int) -> bytes:
        data = os.pread(self.descriptor, length, start)
        if len(data) == length:
            return data
        parts, total = [data], len(data)
        while total < length:  # one system call returns at most 2 GiB
            data = os.pread(self.descriptor, length - total, start + total)
            if not data:
                raise OSError(errno.EIO, "it was cut while it was read")
            parts.append(data)
            total += len(data)
        return b"".join(parts)
