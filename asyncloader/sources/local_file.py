"""Reads parts of a local file, and notices where it is not the file that it was.

Data path: file -> [local_file] -> tokens, megatron -> worker.

Parts are read by `preadv`, which has no position that processes could share, and not through a map of the file: reading
a map of a file that another program cuts ends the process (SIGBUS), and no check before can exclude that. A map is made
for whole arrays, where the user asks for one.

The file is opened when it is first used, in each process: a pickled `LocalFile` is its path and the file's status then.
A forked process uses its parent's descriptor.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from typing import Any, NamedTuple

import numpy as np

from asyncloader.errors import ShardError

_CAN_READ_AT = hasattr(os, "preadv")  # not on Windows, where no program can cut a file that is mapped


class FileIdentity(NamedTuple):
    """A file's status when it was first opened."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileIdentity:
        """Return that of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_size, found.st_mtime_ns)


class LocalFile:
    """A local file of numbers.

    Args:
        path: the file. A relative path is taken from the current folder now, not from that of a worker.

    Attributes:
        path: its absolute path.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))  # noqa: PTH100 - a str is kept
        self._identity: FileIdentity | None = None
        self._descriptor: int | None = None
        self._map: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._open()

    @property
    def size(self) -> int:
        """Its bytes, when it was first opened."""
        assert self._identity is not None
        return self._identity.size

    def __reduce__(self) -> Any:
        return _unpickled, (self.path, self._identity)

    def _open(self) -> int:
        # A FIFO would be waited for, without the flag.
        descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        # Not at exit: the system closes it then.
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._descriptor = descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{self.path} is no regular file")
        if self._identity is None:
            self._identity = FileIdentity.of(descriptor)
        self.check()
        return descriptor

    def check(self) -> None:
        """Raise if the file has changed.

        Raises:
            ShardError: it has another size or time of change than when it was first opened.
        """
        assert self._identity is not None
        found = FileIdentity.of(self._open() if self._descriptor is None else self._descriptor)
        if found != self._identity:
            raise ShardError(
                f"the file has changed: it had {self._identity.size:,} bytes when the dataset was made, and has "
                f"{found.size:,}{', written since' if found.size == self._identity.size else ''}. Make the dataset "
                "anew",
                url=self.path,
            )

    def read_into(self, values: np.ndarray[Any, Any], offset: int) -> None:
        """Fill an array with the file's values from a byte on. Call `check` after the last read.

        Args:
            values: contiguous, of the file's dtype.
            offset: the first value's byte.

        Raises:
            ShardError: the file ends before.
        """
        if not _CAN_READ_AT:
            values[:] = self.array(values.dtype, offset, len(values))
            return
        descriptor = self._open() if self._descriptor is None else self._descriptor
        done, wanted = 0, values.nbytes
        while done < wanted:
            # All at once, but for 2 GiB and more.
            count = os.preadv(descriptor, [values.view(np.uint8).data[done:] if done else values.data], offset + done)
            if not count:
                self.check()
                raise ShardError("the file ends here", url=self.path, offset=offset + done)
            done += count

    def array(self, dtype: np.dtype[Any], offset: int = 0, count: int | None = None) -> np.ndarray[Any, Any]:
        """Return values of the file, as a read-only view of a map of it. Whoever cuts the file then ends the process
        that reads there.

        Args:
            dtype: of the values.
            offset: the first value's byte.
            count: the number of values, which must be in the file; None: all that follow.

        Raises:
            ShardError: the file has changed.
        """
        self.check()
        if self._map is None:
            assert self._descriptor is not None
            # An empty file cannot be mapped.
            memory: Any = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ) if self.size else b""
            self._map = np.frombuffer(memory, np.uint8)
        end = None if count is None else offset + count * dtype.itemsize
        return self._map[offset:end].view(dtype)

    def __repr__(self) -> str:
        return f"<LocalFile {self.path!r}: {self.size:,} bytes>"


def _unpickled(path: str, identity: FileIdentity) -> LocalFile:
    """Return a file that is opened when it is used, and must be the same then."""
    found = LocalFile.__new__(LocalFile)
    found.path, found._identity, found._descriptor, found._map = path, identity, None, None
    return found
