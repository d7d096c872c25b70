"""Finds the worker with the fewest unanswered tasks in logarithmic time, however many workers there are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


class WorkerChoice:
    """The workers that may get a task, by their number of unanswered ones.

    A heap whose entries may be out of date: a worker whose number changes is entered once more, and its old entries are
    dropped when they come to the top. A worker without an entry is not found: `enter` it when its number changes, and
    when it may get tasks again.

    Args:
        unanswered: of each worker; the caller's own list, which changes.
    """

    def __init__(self, unanswered: Sequence[int]) -> None:
        self._unanswered = unanswered
        self._heap = [(0, worker) for worker in range(len(unanswered))]
        self._most = 4 * len(unanswered) + 64

    def enter(self, worker: int) -> None:
        """This worker's number has changed, or it may get tasks again."""
        heappush(self._heap, (self._unanswered[worker], worker))
        # Entries that are out of date are dropped only at the top, so without this the heap could grow for ever.
        if len(self._heap) > self._most:
            self._heap = [(number, each) for each, number in enumerate(self._unanswered)]
            heapify(self._heap)

    def least(self, active: Sequence[bool], load: Sequence[int], share: int) -> int | None:
        """The worker to choose: of those that are active and have a load below `share`, one with the fewest unanswered
        tasks, and of these the first. None: no worker may get a task.
        """
        heap = self._heap
        while heap:
            number, worker = heap[0]
            if number == self._unanswered[worker] and active[worker] and load[worker] < share:
                # Not popped: the entry holds until the worker's number changes, and `enter` then adds another.
                return worker
            # Also the entry of a worker that has its share: the scheduler enters it again when its load falls.
            heappop(heap)
        return None
