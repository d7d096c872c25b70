"""Queues within a process, and a queue whose reader notices that the process at its other end has ended.

Data path: protocol -> [queue] -> protocol.
"""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

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

    Waiting for an item ends with that process. What cannot be pickled is refused where it is put, not in a thread that
    only prints it. Other processes get the bare queue by pickle.

    Args:
        bare: the queue.
        sentinel: the handle that gets ready when the other process ends; None: it has not started.
        ended: the error for who waits then.
    """

    def __init__(self, bare: Any, sentinel: Callable[[], int | None], ended: Callable[[], Exception]) -> None:
        self.bare = bare
        self._sentinel = sentinel
        self._ended = ended

    def __reduce__(self) -> Any:
        return _same, (self.bare,)

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
            reader, sentinel = self.bare._reader, self._sentinel()
            ready = wait([reader] if sentinel is None else [reader, sentinel], timeout)
            if reader not in ready:
                raise self._ended() if ready else queue.Empty
        return self.bare.get(block=False)


class _Pickled:
    """Pickled bytes, which are unpickled with what they are in."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self._data,)


def _same(value: Any) -> Any:
    return value
