"""Holds the items that are ready for the consumer of ``async for``, and wakes the tasks that wait for them.

Data path: sampler -> scheduler -> worker -> reorder -> delivery -> [ready_queue] -> async_iterator -> the user.

Several tasks may wait at a time. A task that is cancelled just after it was woken passes the wake-up on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from asyncloader.epoch.consumer import discard
from asyncloader.events import Action


class ReadyQueue:
    """Items that are ready for the consumer. `put` never blocks; cancelling `wait` loses nothing."""

    def __init__(self) -> None:
        self.items: deque[Action] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def put(self, item: Action) -> None:
        """Add an item and wake one waiter. In the loop's thread."""
        if self._closed:
            discard(item)  # was in flight from another thread when the iterator was closed
            return
        self.items.append(item)
        if self._waiters:
            self.wake_one()

    def give_back(self, item: Action) -> None:
        """Return the item that was taken last, because its taker was cancelled."""
        self.items.appendleft(item)
        self.wake_one()

    def wake_one(self) -> None:
        """Wake a waiter. Also in the place of a waiter that was woken and will take no item."""
        while self._waiters:
            waiter = self._waiters.popleft()
            # A waiter that was cancelled would lose the wake-up.
            if not waiter.done():
                waiter.set_result(None)
                return

    def close(self) -> None:
        """Discard all items and wake all waiters, which check whether the iterator has ended."""
        # Before the items are discarded: a stage's thread may have an item on its way.
        self._closed = True
        while self.items:
            discard(self.items.popleft())
        while self._waiters:
            self.wake_one()

    async def wait(self) -> None:
        """Wait until there may be an item. The caller checks, and waits again if another task took it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with suppress(ValueError):  # `close` has just taken it out
                    self._waiters.remove(waiter)
            else:
                # No second wake-up comes for the item that this waiter was woken for and will not take.
                self.wake_one()
            raise
