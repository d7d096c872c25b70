"""Queues within a process, and a queue whose reader notices that the process at its other end has ended.

Data path: protocol -> [queue] -> protocol.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import queue
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from asyncloader.dataloader2.error import worker_died

__all__ = ["LocalQueue", "ThreadingQueue", "WatchedQueue"]


class ThreadingQueue:
    """A queue between threads, first in first out.

    Args:
        name: for the user; default "unnamed".
    """

    def __init__(self, name: str = "unnamed") -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any, block: bool = True) -> None:  # noqa: ARG002 - it is never full
        """Add an item."""
        self._queue.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The oldest item.

        Args:
            block: wait for one; default True.
            timeout: seconds to wait; default None: as long as it takes.

        Raises:
            queue.Empty: there was none.
        """
        return self._queue.get(block, timeout)


class LocalQueue(ThreadingQueue):
    """A queue within one thread: an empty one is not waited for."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002 - nobody else could put one
        """The oldest item.

        Raises:
            queue.Empty: there is none.
        """
        return self._queue.get_nowait()


class WatchedQueue:
    """One process's view of a queue of `multiprocessing`, whose other end belongs to another process.

    Waiting for an item ends with that process, or with the one that started the reader's. What cannot be pickled is
    refused where it is put, not in a thread that only prints it.

    Args:
        bare: the queue.
        other: the other process, if this one has started it; None: it is the one that has started this.
        ended: the error for who waits then.
    """

    def __init__(self, bare: Any, other: Any, ended: Callable[[], Exception]) -> None:
        self.bare = bare
        self._other = other
        self._ended = ended

    def __reduce__(self) -> Any:
        if self._other is None or self._other.pid is None:
            return _same, (self.bare,)  # for the other process itself, which it starts
        return _watched, (self.bare, self._other.pid, str(self._ended()))

    def __getattr__(self, name: str) -> Any:
        if name == "bare":  # while it is copied
            raise AttributeError(name)
        return getattr(self.bare, name)

    def put(self, item: Any) -> None:
        """Add an item; raises what pickling it raises."""
        self.bare.put(_Pickled(bytes(ForkingPickler.dumps(item))))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The oldest item; see `ThreadingQueue.get`.

        Raises:
            Exception: `ended`: the other process has ended, and there is no item.
        """
        if block:
            reader = self.bare._reader
            ready = wait([reader, *self.sentinels()], timeout)
            if reader not in ready:
                raise self._ended() if ready else queue.Empty
        return self.bare.get(block=False)

    def sentinels(self) -> list[int]:
        """Handles that get ready when one of the two processes has ended."""
        found = [_parent(os.getpid())]
        if self._other is not None and self._other.pid is not None:
            found.append(self._other.sentinel)
        return [each for each in found if each is not None]


@functools.cache
def _parent(_: int) -> int | None:
    """The handle of the process that `multiprocessing` has started this one from. The argument is this one's pid."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return None
    try:  # the other handle is a pipe that processes hold open which were forked later
        return os.pidfd_open(parent.pid or 0)
    except (AttributeError, OSError):
        return parent.sentinel


class _Elsewhere:
    """A process that another one has started."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        try:
            self.sentinel = os.pidfd_open(pid)
        except ProcessLookupError:  # a handle that is ready
            self.sentinel, end = os.pipe()
            os.close(end)
        except (AttributeError, OSError):
            self.pid = None  # it cannot be watched


def _watched(bare: Any, pid: int, text: str) -> WatchedQueue:
    return WatchedQueue(bare, _Elsewhere(pid), functools.partial(worker_died, text))


class _Pickled:
    """Pickled bytes, which are unpickled with what they are in."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self._data,)


def _same(value: Any) -> Any:
    return value
