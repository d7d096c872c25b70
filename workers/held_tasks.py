"""Holds tasks back whose batches would need another large slot, until the consumer has dropped a batch.

Data path: scheduler -> [held_tasks] -> worker -> ring.

The consumer has one batch while further batches of each worker are made, or are ready. So each ring would come to use
one slot more than `prefetch_factor`: with batches of 38 MB, 38 MB more for each worker. A worker needs that slot only
where it has made all of its batches before the consumer drops the one it has:

    a task is held back  while the slots that suffice are in use (`RingManager.full`)
    it is sent           when the consumer asks for the next batch and has dropped one of this worker's,
                         or when the consumer waits for a batch and the worker has been without a task for longer than a
                         small part of its working time (`HoldingCost`): then one slot more is needed

The consumer's thread and the loop's thread share `awaiting` and `holding`. The consumer counts itself first, and then
looks whether tasks are held; the loop notes first that it holds one, and then looks whether the consumer waits. So one
of them sees the other, and no task stays behind that the consumer waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter

from asyncloader.workers.memory.ring_manager import RingManager

_LEAST_S = 1e-4
"""No timer is set for less."""


class HeldTasks:
    """The tasks of a pool that were not sent yet. The managers of the workers' rings keep them, and drop them with
    the tasks that were sent.

    Args:
        rings: the managers.
        possible: whether a worker carries out its tasks one after the other, and gets them at once.
        clock: the time in seconds.
    """

    def __init__(
        self, rings: Sequence[RingManager], *, possible: bool = True, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._rings = rings
        self._possible = possible
        self._clock = clock
        self.wanted = False
        """Whether tasks may be held back in this epoch: the consumer does as this module says. Set before the first."""
        self.holding = False
        """Whether a task is held back. Set in the loop's thread, read in any."""
        self.awaiting = 0
        """How many callers wait for the next batch."""
        self.waited = 0.0
        """Seconds for which callers have waited so far. Written by the consumer's thread."""
        self.timer: asyncio.TimerHandle | None = None
        """Calls `send` again after the time that it returned."""

    def hold(self, worker: int, epoch: int, seq: int, packed: bytes) -> bool:
        """Hold the task back, if it had better wait. Call `send` if this returns True. In the loop's thread."""
        manager = self._rings[worker]
        # Behind a task that is held back every other waits, too: the worker gets its tasks in order.
        if not (self.wanted and self._possible and (manager.held or manager.full)):
            return False
        manager.held.append((epoch, seq, packed))
        self.holding = True
        return True

    def reclaim(self) -> None:
        """Free the slots of dropped batches, where a task waits for one. In the consumer's thread."""
        for manager in self._rings:
            ring = manager.ring
            if manager.held and ring is not None:
                ring.reclaim()

    def send(self, send: Callable[[int, int, int, bytes], None]) -> float:
        """Send the tasks that need not wait any more. In the loop's thread, also after each answer of a worker.

        Returns:
            Seconds after which to call this again, if nothing else calls it before; infinity: never.
        """
        now, again = self._clock(), inf
        for worker, manager in enumerate(self._rings):
            while manager.held:
                if (wait := self._wait(manager, now)) > 0.0:
                    again = min(again, wait)
                    break
                send(worker, *manager.held.popleft())
        self.holding = any(manager.held for manager in self._rings)
        return again

    def _wait(self, manager: RingManager, now: float) -> float:
        """How long the next of its tasks that are held back may have to wait."""
        cost = manager.cost
        if manager.tasks:
            left = inf  # its answer will come, and then this is called
        else:
            cost.idle(now, self.waited, awaiting=self.awaiting > 0)
            left = cost.left(now)
            if left <= _LEAST_S:
                cost.forget()
                manager.need_more()
        if not manager.full:
            cost.sent(now)
            return 0.0
        # A consumer that does not wait asks again.
        return left if self.awaiting else inf

    def cancel_timer(self) -> None:
        """Let nothing call `send`. In the loop's thread."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def clear(self) -> None:
        """Drop all: their epoch is over."""
        for manager in self._rings:
            manager.held.clear()
        self.holding = False
