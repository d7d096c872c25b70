"""Holds the items that are ready for the consumer of ``for``, and wakes its thread where it waits for them.

Data path: sampler -> scheduler -> worker -> reorder -> delivery -> [blocking_queue] -> sync_iterator -> the user.

The consumer takes an item that is ready by `popleft`: without a lock, a system call or a call of Python code, each of
which takes 5 to 10 microseconds when the consumer's own work has driven its memory out of the caches.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from time import monotonic

from asyncloader.bridge import SIGNALS_S
from asyncloader.epoch.consumer import discard
from asyncloader.events import Action


class BlockingQueue(deque[Action | None]):
    """Items that are ready for a consumer. One thread takes them, and any thread puts them. None stands for a request
    of a replacement, which the consumer carries out.
    """

    _waiting = False
    _wakes: queue.SimpleQueue[None] | None = None

    def put(self, item: Action | None) -> None:
        """Add an item, and wake the consumer if it waits. Does not block."""
        self.append(item)
        # The consumer sets this before it looks for items, and here the item comes first: one of both sees the other.
        if self._waiting and self._wakes is not None:
            self._waiting = False
            self._wakes.put(None)

    def wait(self, seconds: float | None) -> None:
        """Wait until there is an item. Sometimes it returns without: look for an item, and wait again.

        Args:
            seconds: the longest wait; None: no limit.

        Raises:
            queue.Empty: no item came in this time.
        """
        if self._wakes is None:
            self._wakes = queue.SimpleQueue()
        until = None if seconds is None else monotonic() + seconds
        self._waiting = True
        try:
            while not self:
                left = SIGNALS_S if until is None else max(0.0, min(SIGNALS_S, until - monotonic()))
                with contextlib.suppress(queue.Empty):
                    self._wakes.get(timeout=left)
                    break
                if until is not None and monotonic() >= until:
                    raise queue.Empty
        finally:
            self._waiting = False

    def discard(self) -> None:
        """Free the memory of all items."""
        with contextlib.suppress(IndexError):
            while True:
                item = self.popleft()
                if item is not None:
                    discard(item)
