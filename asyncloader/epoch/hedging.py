"""Decides when the task that the consumer waits for is given to a second node too. Pure: no I/O, no clock.

Data path: beside the pipeline, which uses it where a loader's workers are at several nodes, and each makes the same
batch of a task. Of the two answers the first one counts.

A node may be slow without being gone: a disk that fails, a neighbour that takes its CPUs. A task is late once it takes
longer than 99 of 100 tasks of the quickest node did, from when it was assigned. Before a node has answered that many,
it is late once it takes three times as long as the longest of the first 16 tasks: of all nodes, or of the quickest. The
second worker is one with nothing to do, or, for at most one task in 20, the one with the fewest tasks: so hedging costs
little where all are busy. A loader's next epoch begins with the times of the one before.
"""

from __future__ import annotations

from collections import deque

_KEPT = 200  # answers of each node that are remembered
_ENOUGH = 100  # of these before the limit is their 99th percentile
_FIRST = 16  # of these, or of all nodes' together, before there is a limit at all
_MARGIN = 3.0  # by which that is above the longest of them
_EVERY = 32  # answers between two computations of the limit
_MOST = 20  # tasks for each one that is given to a worker with others


class Hedging:
    """What is known of the times that tasks take at each node. Times are seconds on any one clock.

    Args:
        took: the times of earlier epochs, by node, to which those of this one are added; default: none.
    """

    def __init__(self, took: dict[str, deque[float]] | None = None) -> None:
        self._sent: dict[tuple[int, int], tuple[str, float]] = {}  # by task and worker
        self._took = {} if took is None else took
        self._answers = self._costly = 0
        self.limit = self._limit()
        """Seconds after which a task is late. None: too few answers to tell."""

    def assigned(self, seq: int, worker: int, node: str, now: float) -> None:
        """The task was given to this worker, which is at this node."""
        self._sent[seq, worker] = node, now

    def answered(self, seq: int, worker: int, now: float) -> None:
        """The worker answered the task."""
        node, sent = self._sent.pop((seq, worker), ("", now))
        took = self._took.get(node)
        if took is None:
            took = self._took[node] = deque(maxlen=_KEPT)
        took.append(now - sent)
        self._answers += 1
        if self._answers % _EVERY == 0 or self._answers == _FIRST:
            self.limit = self._limit()

    def _limit(self) -> float | None:
        nodes = self._took.values()
        known = [sorted(each)[int(0.99 * (len(each) - 1))] for each in nodes if len(each) >= _ENOUGH]
        if known:
            return min(known)
        longest = [max(each) for each in nodes if len(each) >= _FIRST]
        if sum(map(len, nodes)) >= _FIRST:
            longest.append(max(map(max, nodes)))
        return _MARGIN * min(longest) if longest else None

    def died(self, worker: int) -> None:
        """The worker will not answer what it has."""
        for key in [key for key in self._sent if key[1] == worker]:
            del self._sent[key]

    def late_at(self, seq: int, worker: int) -> float | None:
        """When this task is late at this worker. None: not known yet."""
        sent = self._sent.get((seq, worker))
        return None if sent is None or self.limit is None else sent[1] + self.limit

    @property
    def may_cost(self) -> bool:
        """Whether a worker that has other tasks may get the next one."""
        return (self._costly + 1) * _MOST <= self._answers

    def costs(self) -> None:
        """A worker that has other tasks got one."""
        self._costly += 1
