"""Computes how many nodes a service should have. Pure.

The seconds of work that all processes do per second equal the batches that loaders take per second, times the seconds
of work in a batch. So they measure the demand without asking the loaders. A trainer that is slower than its service
leaves processes idle, and gets no more of them. Where no process is ever idle, the demand may be higher than the
measurement; then the service grows in steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

_GOOD_LOAD = 0.8  # the rest is for peaks
_SHORTEST_S, _LONGEST_S = 5.0, 60.0
_TASKS = 10  # per process that a measurement should have: a task counts when it ends, so few of them are inexact


class Load(NamedTuple):
    """A node's totals.

    Attributes:
        busy: seconds for which its processes carried out tasks.
        tasks: tasks that have ended.
        processes: its processes.
    """

    busy: float
    tasks: float
    processes: int


class Scaling:
    """Follows the load: up at once, down only after a long time of lower load, because trainers pause to validate and
    to save.

    Args:
        fewest: nodes, at least.
        most: nodes, at most.
        calm_s: seconds for which the load must have been lower before a node is removed.
    """

    def __init__(self, fewest: int, most: int, calm_s: float) -> None:
        self.wanted = fewest
        """Nodes that the service should have."""
        self._fewest, self._most, self._calm_s = fewest, most, calm_s
        self._seen: deque[tuple[float, dict[str, Load]]] = deque()  # totals over time, all of the same processes
        self._found: deque[tuple[float, int]] = deque()  # time and nodes; see `look`

    def look(self, now: float, loads: Mapping[str, Load]) -> int:
        """Take the totals of all nodes that are ready, at a time in seconds. Returns how many nodes there should be."""
        # A node that has come, gone or restarted makes the differences of totals meaningless.
        if not self._seen or not _same(self._seen[-1][1], loads):
            self._seen.clear()
        self._seen.append((now, dict(loads)))
        found = self._measure()
        if found is not None:
            # The maximum over the last `calm_s`: a measurement that is not above a later one never is the maximum
            # again, so it is dropped. The rest falls, and its first is the maximum.
            while self._found and self._found[-1][1] <= found:
                self._found.pop()
            self._found.append((now, found))
            while self._found[0][0] < now - self._calm_s:
                self._found.popleft()
            self.wanted = self._found[0][1]
        return self.wanted

    def _measure(self) -> int | None:
        """Compute the nodes that the newest load needs; None: the totals do not span enough time and tasks yet."""
        (now, newest), found = self._seen[-1], None
        processes = sum(each.processes for each in newest.values())
        while processes and now - self._seen[0][0] >= _SHORTEST_S:
            then, oldest = self._seen[0]
            tasks = sum(each.tasks - oldest[name].tasks for name, each in newest.items())
            if tasks < _TASKS * processes and now - then < _LONGEST_S:
                break  # too few tasks; the result of an older start, if any, stands
            busy = sum(each.busy - oldest[name].busy for name, each in newest.items()) / (now - then)
            # Not above the number of processes: work counts when a task ends, so a long one may exceed its interval.
            nodes = math.ceil(min(busy, processes) / _GOOD_LOAD / (processes / len(newest)) - 1e-9)
            found = min(self._most, max(self._fewest, nodes))
            self._seen.popleft()
        return found


def _same(before: Mapping[str, Load], now: Mapping[str, Load]) -> bool:
    """Whether both are totals of the same processes. Totals that fell are of a node that was started again."""
    return before.keys() == now.keys() and all(
        before[name].processes == each.processes and before[name].tasks <= each.tasks for name, each in now.items()
    )
