"""Holds the items that are ready for the consumer: of ``async for`` in `ReadyQueue`, of ``for`` in `BlockingQueue`.

Data path: sampler -> scheduler -> worker -> reorder -> delivery -> [ready_queue] -> iterator -> the user.

Several tasks may wait at a time.

The consumer of ``for`` takes an item that is ready by `popleft`: without a lock, a system call or a call of Python
code, each of which takes 5 to 10 microseconds when the consumer's own work has driven its memory out of the caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from time import monotonic

from asyncloader.base.bridge import SIGNALS_S
from asyncloader.base.events import Action
from asyncloader.epoch.consumer import discard


class ReadyQueue:
    """Items that are ready for the consumer. `put` never blocks; cancelling `wait` loses nothing."""

    def __init__(self) -> None:
        self.items: deque[Action] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False

    def put(self, item: Action) -> None:
        """Add an item and wake who waits. In the loop's thread."""
        if self._closed:
            discard(item)  # was in flight from another thread when the iterator was closed
            return
        self.items.append(item)
        if self._waiters:
            self.wake()

    def give_back(self, item: Action) -> None:
        """Return the item that was taken last, because its taker was cancelled."""
        self.items.appendleft(item)
        self.wake()

    def wake(self) -> None:
        """Wake all that wait, in the order in which they came: each looks whether there is something for it."""
        # All, and not the first: a waiter that is cancelled just now would have to pass the wake-up on.
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Discard all items and wake all waiters, which check whether the iterator has ended."""
        # Before the items are discarded: a stage's thread may have an item on its way.
        self._closed = True
        while self.items:
            discard(self.items.popleft())
        self.wake()

    async def wait(self) -> None:
        """Wait until there may be an item. The caller checks, and waits again if another task took it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # it was woken just before
                self._waiters.remove(waiter)
            raise


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
