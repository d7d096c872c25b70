"""Writes and maps the memory segment of a shared structure.

Data path: share -> builder -> [segment] -> layout -> a dataset in any process.

A segment is written through its descriptor while it grows, so its size need not be known in advance. It is then mapped
*privately*: all processes share the pages as long as they only read them, and a process that writes to a page (through
a tensor; arrays are read-only) gets its own copy of that page. So no process can change the bytes that others read.

The descriptor stays open as long as the structure exists, for processes that are spawned later. A forked process
inherits mapping and descriptor. The memory is freed with the last view.
"""

from __future__ import annotations

import mmap
import multiprocessing.context as context  # noqa: PLR0402 - pyright knows it by this name only
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

from asyncloader.errors import RingMemoryError
from asyncloader.workers.ipc import segment

if sys.platform != "win32":
    import resource

_BUFFER = 1 << 20  # bytes that are buffered before they are written


def is_spawning() -> bool:
    """Return whether this thread is pickling the arguments of a new process, to which descriptors can be passed."""
    return context.get_spawning_popen() is not None


class SegmentWriter:
    """Appends to a new segment.

    Args:
        what: name of the structure, for errors.

    Raises:
        RingMemoryError: the system refuses a segment.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._fd = _open_growing()
        self._buffer = bytearray()
        self._written = 0

    def write(self, data: Any, align: int = 1) -> int:
        """Append the bytes of any contiguous buffer at the next multiple of `align`. Returns their offset.

        Raises:
            RingMemoryError: the memory does not suffice.
        """
        buffer = self._buffer
        buffer += bytes(-(self._written + len(buffer)) % align)
        offset = self._written + len(buffer)
        with memoryview(data) as view:
            # Large data is written without a copy, after the buffered bytes, whose offsets are lower.
            if view.nbytes >= _BUFFER:
                self._flush()
                self._put(view.cast("B"))
            elif view.nbytes:
                buffer += view
                if len(buffer) >= _BUFFER:
                    self._flush()
        return offset

    def finish(self, session_objects: Sequence[Any] = ()) -> SharedSegment:
        """Map the segment, and end writing. See `SharedSegment`."""
        self._flush()
        fd, self._fd = self._fd, -1
        return SharedSegment(fd, self._written, session_objects)

    def close(self) -> None:
        """Discard the segment, unless `finish` was called. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        self._put(memoryview(buffer))

    def _put(self, view: memoryview) -> None:
        segment.check_room(
            len(view),
            f"{self._what}, besides {self._written:,} bytes of it that are written",
            "Share less, or raise the limit.",
        )
        while len(view):
            # Through the descriptor: a page that the system cannot provide is an error here, and no SIGBUS. A system
            # call writes 2 GiB at most.
            try:
                count = os.pwrite(self._fd, view, self._written)
            except OSError as error:
                limit, reason = segment._process_limit(resource.RLIMIT_FSIZE, "file size limit, ulimit -f")
                wanted = self._written + len(view)
                raise RingMemoryError(wanted, limit, f"{reason}; writing {self._what}: {error}") from error
            self._written += count
            view = view[count:]


def _open_growing() -> int:
    """Open a segment that can grow, and be written to through its descriptor."""
    if hasattr(os, "memfd_create"):
        return segment.create(0)
    # macOS: POSIX shared memory cannot be resized or written to, so an unnamed temporary file is used.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedSegment:
    """A finished segment, mapped in this process. Pickles as its descriptor, only for a process that is being spawned.

    Args:
        fd: the descriptor, which this object owns and closes. The mapping lives as long as its views.
        nbytes: its size, above 0.
        session_objects: functions and classes that the items are made of, and that a spawned process cannot import.

    Raises:
        RingMemoryError: the segment cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int, session_objects: Sequence[Any]) -> None:
        self._fd = fd
        # Not at exit: the system closes it then.
        weakref.finalize(self, os.close, fd).atexit = False
        self.nbytes = nbytes
        self._session_objects = session_objects
        self.memory = _map_privately(fd, nbytes)
        self.view = memoryview(self.memory)
        self.read_only = self.view.toreadonly()

    def __reduce__(self) -> Any:
        if not is_spawning():
            raise TypeError("a segment travels only to a process that is being started")
        return _receive, (reduction.DupFd(self._fd), self.nbytes, self._session_objects)


def _receive(duplicate: Any, nbytes: int, session_objects: Sequence[Any]) -> SharedSegment:
    return SharedSegment(duplicate.detach(), nbytes, session_objects)


def _map_privately(fd: int, nbytes: int) -> mmap.mmap:
    # Without MAP_NORESERVE (where mmap knows it) strict overcommit counts the whole mapping again for each process.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        limit, reason = segment._process_limit(resource.RLIMIT_AS, "address space limit, ulimit -v")
        raise RingMemoryError(nbytes, limit, f"{reason}; mmap of the segment: {error}") from error
