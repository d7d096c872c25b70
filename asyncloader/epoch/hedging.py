"""Decides when the task that the consumer waits for is given to a second node too, and waits until then.

Data path: beside the pipeline, which uses it where a loader's workers are at several nodes, and each makes the same
batch of a task. The first of the two answers counts.

A node may be slow without being gone: a disk that fails, a neighbour that takes its CPUs. A task is late once it takes
longer than 99 of 100 tasks of the quickest node did, from when it was assigned. Before a node has answered that many,
it is late once it takes three times as long as the longest of the first 16 tasks: of all nodes, or of the quickest. The
second worker has nothing to do; for at most one task in 20 it is the worker with the fewest tasks. So hedging costs
little where all are busy. A loader's next epoch begins with the times of the epoch before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import Late
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.pool import WorkerPool

_KEPT = 200  # answers of each node that are remembered
_ENOUGH = 100  # of these before the limit is their 99th percentile
_FIRST = 16  # of these, or of all nodes' together, before there is a limit at all
_MARGIN = 3.0  # by which that is above the longest of them
_EVERY = 32  # answers between two computations of the limit
_MOST = 20  # tasks for each late task that is given to a worker with others


class Hedging:
    """The times that tasks took at each node, and the limit that follows from them. Times are seconds on any one clock.

    Args:
        took: the times of earlier epochs, by node, to which those of this epoch are added; default: no times.
    """

    def __init__(self, took: dict[str, deque[float]] | None = None) -> None:
        self._sent: dict[tuple[int, int], tuple[str, float]] = {}  # by task and worker
        self._took = {} if took is None else took
        self._answers = self._costly = 0
        self.limit = self._limit()
        """Seconds after which a task is late. None: too few answers are known."""

    def assigned(self, seq: int, worker: int, node: str, now: float) -> None:
        """Record that the task was given to this worker, which runs at this node."""
        self._sent[seq, worker] = node, now

    def answered(self, seq: int, worker: int, now: float) -> None:
        """Record the worker's answer to the task."""
        node, sent = self._sent.pop((seq, worker))
        took = self._took.get(node)
        if took is None:
            took = self._took[node] = deque(maxlen=_KEPT)
        took.append(now - sent)
        self._answers += 1
        # Not after each answer, because the times are sorted for it.
        if self._answers % _EVERY == 0 or self._answers == _FIRST:
            self.limit = self._limit()

    def _limit(self) -> float | None:
        nodes = self._took.values()
        known = [sorted(each)[int(0.99 * (len(each) - 1))] for each in nodes if len(each) >= _ENOUGH]
        if known:
            # That of the quickest node: a slow node must not raise the limit that it is judged by.
            return min(known)
        longest = [max(each) for each in nodes if len(each) >= _FIRST]
        if sum(map(len, nodes)) >= _FIRST:
            longest.append(max(map(max, nodes)))
        return _MARGIN * min(longest) if longest else None

    def died(self, worker: int) -> None:
        """Forget the tasks of a worker that will not answer them."""
        for key in [key for key in self._sent if key[1] == worker]:
            del self._sent[key]

    def late_at(self, seq: int, worker: int) -> float | None:
        """Return the time from which this task is late at this worker. None: not known yet."""
        sent = self._sent.get((seq, worker))
        return None if sent is None or self.limit is None else sent[1] + self.limit

    @property
    def may_cost(self) -> bool:
        """Whether a worker that has other tasks may get the next late task."""
        # Few of all tasks: where all workers are busy, a task that is given twice delays another.
        return (self._costly + 1) * _MOST <= self._answers

    def costs(self) -> None:
        """Record that a worker with other tasks got a late task."""
        self._costly += 1


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
