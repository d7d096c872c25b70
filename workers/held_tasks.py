"""Holds tasks back whose batches would need another large slot, until the consumer has dropped a batch.

Data path: scheduler -> [held_tasks] -> worker -> ring.

A consumer that is slower than the workers has one batch, while `prefetch_factor` further batches of each worker are
ready. So each ring would come to use one slot more than that: with batches of 38 MB, 38 MB more for each worker. While
a task waits for the slot of the consumer's batch, the consumer has others to go on with; where it has none, no task
waits:

    a task is held back  while the slots that suffice are in use (`RingManager.full`)
    it is sent           when the consumer asks for the next batch and has dropped one of this worker's,
                         or when the consumer has to wait for the next batch: then one slot more is needed

The consumer's thread and the loop's thread share `awaiting` and `holding`. The consumer counts itself first, and then
looks whether tasks are held; the loop notes first that it holds one, and then looks whether the consumer waits. So one
of them sees the other, and no task stays behind that the consumer waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncloader.workers.memory.ring_manager import RingManager


class HeldTasks:
    """The tasks of a pool that were not sent yet. The managers of the workers' rings keep them, and drop them with
    the tasks that were sent.

    Args:
        rings: the managers.
        possible: whether a worker carries out its tasks one after the other, and gets them at once.
    """

    def __init__(self, rings: Sequence[RingManager], *, possible: bool = True) -> None:
        self._rings = rings
        self._possible = possible
        self.wanted = False
        """Whether tasks may be held back in this epoch: the consumer does as this module says. Set before the first."""
        self.holding = False
        """Whether a task is held back. Set in the loop's thread, read in any."""
        self.awaiting = 0
        """How many callers wait for the next batch."""

    def hold(self, worker: int, epoch: int, seq: int, packed: bytes) -> bool:
        """Hold the task back, if it had better wait. Call `send` if this returns True. In the loop's thread."""
        manager = self._rings[worker]
        # Behind a task that is held back every other waits, too: the worker gets its tasks in order.
        if not (self.wanted and self._possible) or not (manager.held or self._waits(manager)):
            return False
        manager.held.append((epoch, seq, packed))
        self.holding = True
        return True

    def _waits(self, manager: RingManager) -> bool:
        return manager.full and not self.awaiting

    def reclaim(self) -> None:
        """Free the slots of dropped batches, where a task waits for one. In the consumer's thread."""
        for manager in self._rings:
            ring = manager.ring
            if manager.held and ring is not None:
                ring.reclaim()

    def send(self, send: Callable[[int, int, int, bytes], None]) -> None:
        """Send the tasks that need not wait any more. In the loop's thread."""
        for worker, manager in enumerate(self._rings):
            if manager.held and self.awaiting:
                manager.need_more()
            while manager.held and not self._waits(manager):
                send(worker, *manager.held.popleft())
        self.holding = any(manager.held for manager in self._rings)

    def clear(self) -> None:
        """Drop all: their epoch is over."""
        for manager in self._rings:
            manager.held.clear()
        self.holding = False
