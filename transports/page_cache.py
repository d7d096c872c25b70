"""Opens and reads files as far as memory has their names and bytes: it never waits for a disk.

Data path: local: [page_cache] -> file system; what memory does not have is read in a thread.

For a small file, a call in a thread takes as much CPU time again as the read. Only Linux says whether it would have to
wait (openat2 since 5.12, and preadv2 on most file systems for disks); elsewhere nothing is found here.
"""

from __future__ import annotations

import ctypes
import os
import sys

MOST_BYTES = 1 << 18
"""Longest read: copying it takes some 25 microseconds, for which an event loop can wait."""

_OPENAT2 = 437  # on every architecture
_AT_FDCWD = -100
_RESOLVE_CACHED = 0x20
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)


class NotCached(Exception):
    """The system would have to wait for a disk, or does not say, or there is an error, which a thread will see too."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def open_cached(path: str, flags: int) -> int:
    """Open a file like `os.open`.

    Raises:
        NotCached: see there.
    """
    name = os.fsencode(path)
    # C would take a name with a null byte for that of another file.
    if _libc is None or b"\0" in name:
        raise NotCached
    how = _OpenHow(flags, 0, _RESOLVE_CACHED)
    descriptor: int = _libc.syscall(
        ctypes.c_long(_OPENAT2),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(name),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if descriptor < 0:
        raise NotCached
    return descriptor


def pread_cached(descriptor: int, length: int, start: int) -> bytes:
    """Read like `os.pread`. Fewer bytes than requested are the end of the file, or all that memory has at this
    position: the next call tells which.

    Raises:
        NotCached: see there; also if `length` is more than `MOST_BYTES`.
    """
    if length > MOST_BYTES or _NOWAIT is None:
        raise NotCached
    buffer = bytearray(length)
    try:
        number = os.preadv(descriptor, (buffer,), start, _NOWAIT)
    except OSError as error:
        raise NotCached from error
    return bytes(buffer) if number == length else bytes(memoryview(buffer)[:number])
