"""Reads an iterator in a thread, some items ahead of their taker.

Data path: graph -> [read_ahead: thread, buffer] -> `prefetch`, `pin_memory`, `fullsync`, and each worker's part.

An error of the iterator is kept and raised where its item would have come.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from asyncloader.errors import LoaderClosed
from asyncloader.workers.fetch.data_end import not_the_end

STOP_S = 20.0
"""Longest wait, in seconds, for an item that is being read when the thread is to end."""


class _Buffer:
    """The state that the thread and the taker share. Read and written under the lock of `changed`."""

    def __init__(self, size: int, even: bool) -> None:
        self.changed = threading.Condition()
        self.items: deque[Any] = deque()
        self.size = size
        self.even = even
        self.error: BaseException | None = None
        self.over = self.stopped = self.paused = self.reading = False

    def wants_more(self) -> bool:
        """In the thread: wait for room. Returns whether to read another item; False: read no more."""
        with self.changed:
            while True:
                room = len(self.items) < self.size
                if self.stopped and not (self.even and room):
                    return False
                if room and not self.paused:
                    # Under the same lock as the look at `paused`: once `pause` has set that, it either finds `reading`
                    # set, and waits, or no item will be read.
                    self.reading = True
                    return True
                self.changed.wait()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.error, self.over, self.reading = error, True, False
            self.changed.notify_all()


class ReadAhead:
    """Gives the items of an iterator that a thread reads ahead.

    Args:
        begin: returns the iterator; called in the thread.
        size: items that are kept ready, from 1.
        even: after `stop` the thread still reads until `size` items are ready, so that the number of items read follows
            from the number taken alone, in all ranks alike. Default: it stops at once.
        timeout: longest wait for an item, in seconds; default None: no limit.
        late: makes the error that is raised after `timeout`.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        size: int,
        *,
        even: bool = False,
        timeout: float | None = None,
        late: Callable[[], Exception] = TimeoutError,
    ) -> None:
        self._buffer = _Buffer(size, even)
        self._timeout, self._late = timeout, late
        # The thread refers to the buffer, and not to this object, which may therefore be dropped at any time: its
        # finalizer ends the thread.
        self._thread = threading.Thread(
            target=_read, args=(begin, self._buffer), name="asyncloader-read-ahead", daemon=True
        )
        self._thread.start()
        self._owner = os.getpid()
        self._joined = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.take(1)[0]

    def take(self, most: int) -> list[Any]:
        """Take the items that are ready, from 1 to `most`; wait for the first. Raises the iterator's error, and
        StopIteration at its end.
        """
        if os.getpid() != self._owner:
            raise LoaderClosed("this process was forked while a thread read ahead, which only its parent has")
        buffer = self._buffer
        deadline = None if self._timeout is None else monotonic() + self._timeout
        with buffer.changed:
            while not buffer.items and not buffer.over and not buffer.stopped:
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    raise self._late()
                buffer.changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
            if buffer.items:
                taken = [buffer.items.popleft() for _ in range(min(most, len(buffer.items)))]
                buffer.changed.notify_all()
                return taken
            error, buffer.error = buffer.error, None
            buffer.over = True
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def pause(self) -> None:
        """Stop reading until `resume`. Waits for an item that is being read, at most 20 seconds, so that the source is
        left alone afterwards.
        """
        buffer = self._buffer
        with buffer.changed:
            buffer.paused = True
            # A source that pauses its own reader, in this thread, must not wait for itself.
            if self._thread is not threading.current_thread():
                buffer.changed.wait_for(lambda: not buffer.reading, STOP_S)

    def resume(self) -> None:
        """Go on reading."""
        with self._buffer.changed:
            self._buffer.paused = False
            self._buffer.changed.notify_all()

    def stop(self, timeout: float | None = STOP_S) -> None:
        """End the thread, and wait for it; items that were read ahead are dropped. Idempotent.

        Args:
            timeout: seconds to wait; None: without a limit. A thread that is still reading an item then ends after it.
        """
        # In a forked child the thread does not exist, and the lock may have been held at the fork: it would never be
        # free.
        if os.getpid() != self._owner:
            return
        self._end()
        # Once: if a stuck item has used up the timeout, the next call does not wait for it again.
        if self._thread is not threading.current_thread() and not self._joined:
            self._thread.join(timeout)
            self._joined = True
        self._buffer.items.clear()

    def _end(self) -> None:
        with self._buffer.changed:
            self._buffer.stopped, self._buffer.paused = True, False
            self._buffer.changed.notify_all()

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # Taking the lock in a finalizer is safe here: it is reentrant, so the collector may run this in the thread that
        # holds it, and no thread waits for another while it holds it.
        if not exiting() and os.getpid() == getattr(self, "_owner", None):
            self._end()


def _read(begin: Callable[[], Iterator[Any]], buffer: _Buffer) -> None:
    error: BaseException | None = None
    try:
        try:
            iterator = begin()
        except StopIteration as stop:  # the taker would take it for the end, and find no item
            raise not_the_end(stop, "the graph's `__iter__`") from stop
        while buffer.wants_more():
            try:
                item = next(iterator)
            except StopIteration:
                break
            with buffer.changed:
                buffer.items.append(item)
                buffer.reading = False
                buffer.changed.notify_all()
            del item  # the taker's alone, not kept until the next item comes
    except BaseException as raised:
        error = raised
    finally:
        buffer.end(error)
        del error  # its traceback refers to this frame
