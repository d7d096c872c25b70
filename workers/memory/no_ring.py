"""Manages the tasks of a worker whose batches are objects of this process: as `RingManager`, without a ring.

Data path: scheduler -> [no_ring, one per worker] -> worker thread -> consumer.
"""

from __future__ import annotations

from asyncloader.workers.ipc import wire
from asyncloader.workers.memory.ring import Ring
from asyncloader.workers.memory.ring_manager import RingManager


class NoRing(RingManager):
    """Counts the tasks of one worker. The memory of outstanding batches is bounded as that of a ring's would be."""

    def __init__(
        self,
        credits: int,
        ring_bytes: int | None,
        reorder_window: int = 0,
        workers: int = 1,
        least_credits: int | None = None,
    ) -> None:
        del ring_bytes  # there is no ring that it could bound
        super().__init__(credits, None, reorder_window, workers, least_credits)

    def replacement(self, most_bytes: int | None = None) -> Ring | None:
        """Return None."""
        del most_bytes
        return None

    def assign(self, epoch: int, seq: int) -> tuple[int, int]:
        """Note the task. Returns no ring and no slot."""
        self.tasks[epoch, seq] = None
        return 0, wire.NO_SLOT

    def answered(self, epoch: int, seq: int, slot: int, nbytes: int) -> Ring | None:
        """Note that the task was answered. The batch's size decides how many may be outstanding."""
        del slot  # there is none
        self.tasks.pop((epoch, seq), None)
        self._learn(nbytes)
        return None
