"""The segment under a shared structure: written once, mapped by every process, freed with the last view.

Data path: share -> shared_build -> [segment] -> shared_layout -> a dataset in any process.

It is written through its descriptor while it grows, so that nothing has to be measured beforehand, and then mapped
*privately*: the pages are the same ones in all processes as long as they are only read, and a process that writes to
one (to a tensor; arrays refuse) gets a copy of that page of its own. Nobody can change what another process reads.

The descriptor stays open as long as the structure, for processes yet to be spawned. A forked process has inherited
mapping and descriptor.
"""

from __future__ import annotations

import mmap
import multiprocessing.context as context  # noqa: PLR0402 - pyright knows it by this name only
import os
import resource
import tempfile
import weakref
from multiprocessing import reduction
from typing import Any

from asyncloader.errors import RingMemoryError
from asyncloader.workers.memory import segment

__all__ = ["SegmentWriter", "SharedSegment", "spawning"]

_BUFFER = 1 << 20  # bytes gathered before they are written
_STEP = 1 << 26  # bytes that are reserved at a time, at most, for small writes


def spawning() -> bool:
    """Whether this thread is pickling the arguments of a process that is being started: descriptors may travel."""
    return context.get_spawning_popen() is not None


class SegmentWriter:
    """Appends to a new segment. Every page is reserved before it is written.

    Args:
        what: what it is for, to be named in errors.

    Raises:
        RingMemoryError: the system refuses a segment.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._fd = _open_growing()
        self._buffer = bytearray()
        self._written = 0
        self._reserved = 0

    def write(self, data: Any, align: int = 1) -> int:
        """Append the bytes of any contiguous buffer at the next multiple of `align`; gives their offset.

        Raises:
            RingMemoryError: there is no memory for them.
        """
        buffer = self._buffer
        buffer += bytes(-(self._written + len(buffer)) % align)
        offset = self._written + len(buffer)
        with memoryview(data) as view:
            if view.nbytes >= _BUFFER:
                self._flush()
                self._put(view.cast("B"))
            elif view.nbytes:
                buffer += view
                if len(buffer) >= _BUFFER:
                    self._flush()
        return offset

    def finish(self, externals: tuple[Any, ...] = ()) -> SharedSegment:
        """The segment, trimmed and mapped. Nothing can be written any more."""
        self._flush()
        nbytes = max(1, self._written)
        os.ftruncate(self._fd, nbytes)
        fd, self._fd = self._fd, -1
        return SharedSegment(fd, nbytes, externals)

    def close(self) -> None:
        """Give up what was written, unless it was finished. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        self._put(memoryview(buffer))

    def _put(self, view: memoryview) -> None:
        self._make_room(self._written + len(view))
        while len(view):
            count = os.pwrite(self._fd, view, self._written)  # 2 GiB at most, at a time
            self._written += count
            view = view[count:]

    def _make_room(self, end: int) -> None:
        if end <= self._reserved:
            return
        start = self._reserved
        end = max(end, start + min(max(start, _BUFFER), _STEP))
        segment.check_room(
            end - start,
            f"{self._what}, besides {start:,} bytes of it that are written",
            "Share less, or raise the limit.",
        )
        try:
            os.ftruncate(self._fd, end)
        except OSError as error:
            limit, reason = segment._process_limit(resource.RLIMIT_FSIZE, "file size limit, ulimit -f")
            raise RingMemoryError(end, limit, f"{reason}; ftruncate for {self._what}: {error}") from error
        segment.reserve(self._fd, start, end - start)
        self._reserved = end


def _open_growing() -> int:
    """A segment that is made larger later on, and can be written to through its descriptor."""
    if hasattr(os, "memfd_create"):
        return segment.create(0)
    # macOS: POSIX shared memory has one size for ever and no write(); a file without a name in the temporary folder.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedSegment:
    """A finished segment, mapped in this process. Pickles, for a process being spawned, as its descriptor.

    Args:
        fd: the descriptor; taken, and closed when this object goes. The mapping lives on under its views.
        nbytes: its size.
        externals: what the structure in it refers to, and is shared already.

    Raises:
        RingMemoryError: it cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int, externals: tuple[Any, ...]) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self.nbytes = nbytes
        self.externals = externals
        self.memory = _map_privately(fd, nbytes)

    def __reduce__(self) -> Any:
        if not spawning():
            raise TypeError("a segment travels only to a process that is being started")
        return _received, (reduction.DupFd(self._fd), self.nbytes, self.externals)


def _received(duplicate: Any, nbytes: int, externals: tuple[Any, ...]) -> SharedSegment:
    return SharedSegment(duplicate.detach(), nbytes, externals)


def _map_privately(fd: int, nbytes: int) -> mmap.mmap:
    # Without MAP_NORESERVE (where mmap knows it) strict overcommit counts the whole mapping again for each process.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        limit, reason = segment._process_limit(resource.RLIMIT_AS, "address space limit, ulimit -v")
        raise RingMemoryError(nbytes, limit, f"{reason}; mmap of the segment: {error}") from error
