"""Waits until the task that the consumer waits for is late, and says which workers could make it too.

Data path: beside the pipeline, of a loader whose workers are at several nodes. `hedging.py` has the rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

from asyncloader.epoch.hedging import Hedging
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import Late
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.pool import WorkerPool


class LateTasks:
    """The late tasks of one epoch. In its loop's thread.

    Args:
        pool: the workers.
        scheduler: the epoch's.
        statistics: the loader's counters.
    """

    def __init__(self, pool: WorkerPool, scheduler: Scheduler, statistics: Statistics) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._statistics = statistics
        took = statistics.task_seconds
        for node in took.keys() - {worker.node for worker in pool.processes}:
            del took[node]  # a quick node that has left is no measure for the others
        self._hedging = Hedging(took)
        self._timer: asyncio.TimerHandle | None = None

    def assigned(self, seq: int, worker: int) -> None:
        """The worker was sent the task."""
        if self._scheduler.hedged(seq):
            self._statistics.hedged_batches += 1
            if self._scheduler.unanswered(worker) > 1:
                self._hedging.costs()
        self._hedging.assigned(seq, worker, self._pool.processes[worker].node, perf_counter())

    def answered(self, seq: int, worker: int) -> None:
        """The worker answered the task."""
        self._hedging.answered(seq, worker, perf_counter())

    def died(self, worker: int) -> None:
        """Forget the tasks of a worker that will not answer them."""
        self._hedging.died(worker)

    def due(self, again: Callable[[], None]) -> Late | None:
        """Return the event for the scheduler if the task that the consumer waits for is late now, else None.

        `again` is called when that task becomes late. Call this, too, after each answer and each delivery.
        """
        hedging, scheduler = self._hedging, self._scheduler
        # One timer is enough: it is set for the task that the consumer waits for, and `again` looks which task that is
        # by then.
        if hedging.limit is None or self._timer is not None or not scheduler.starved:
            return None
        head = scheduler.head
        at = None if head is None or scheduler.hedged(head[0].seq) else hedging.late_at(head[0].seq, head[1])
        if head is None or at is None:
            return None
        left = at - perf_counter()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._ring, again)
            return None
        nodes = [worker.node for worker in self._pool.processes]
        # Not another worker of the same node: what makes the node slow holds it up, too.
        others = [worker for worker, node in enumerate(nodes) if node != nodes[head[1]]]
        return Late(others, idle=not hedging.may_cost) if others else None

    def _ring(self, again: Callable[[], None]) -> None:
        self._timer = None
        again()

    def close(self) -> None:
        """Wait for nothing any more."""
        # Until it rings, the loop would keep the pipeline, whose method it calls.
        if self._timer is not None:
            self._timer.cancel()
