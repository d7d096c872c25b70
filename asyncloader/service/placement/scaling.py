"""How many nodes a service should have. Pure.

Data path: none; beside the service.

How long processes are at tasks in a second is what loaders take in a second, times what a batch costs: a measure of the
demand that needs no word from the loaders. A trainer that is slower than its service leaves processes idle, and gets no
more of them. Where no process is ever idle, the demand may be greater than what is seen; then it grows in steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

_GOOD_LOAD = 0.8  # the rest is for peaks
_SHORTEST_S, _LONGEST_S = 5.0, 60.0
_TASKS = 10  # of each process, that a measurement should have: a task counts when it ends


class Load(NamedTuple):
    """A node's totals.

    Attributes:
        busy: seconds that its processes were at tasks.
        tasks: tasks that have ended.
        processes: how many there are.
    """

    busy: float
    tasks: float
    processes: int


class Scaling:
    """Follows the load: up at once, down once the load was lower for long, as trainers pause to validate and to save.

    Args:
        fewest: nodes that there always are.
        most: nodes that there are at most.
        calm_s: seconds for which the load must have been lower before a node goes.
    """

    def __init__(self, fewest: int, most: int, calm_s: float) -> None:
        self.wanted = fewest
        """How many nodes there should be."""
        self._fewest, self._most, self._calm_s = fewest, most, calm_s
        self._seen: deque[tuple[float, dict[str, Load]]] = deque()  # of the same processes
        self._found: deque[tuple[float, int]] = deque()  # when, how many; falling: the first is the most

    def look(self, now: float, loads: Mapping[str, Load]) -> int:
        """Take a look at all nodes that are ready, at a time in seconds. Returns how many there should be."""
        if not self._seen or not _same(self._seen[-1][1], loads):
            self._seen.clear()
        self._seen.append((now, dict(loads)))
        found = self._measured()
        if found is not None:
            while self._found and self._found[-1][1] <= found:
                self._found.pop()
            self._found.append((now, found))
            while self._found[0][0] < now - self._calm_s:
                self._found.popleft()
            self.wanted = self._found[0][1]
        return self.wanted

    def _measured(self) -> int | None:
        """The nodes for the load of the newest looks; None: it is not known yet."""
        (now, newest), found = self._seen[-1], None
        processes = sum(each.processes for each in newest.values())
        while processes and now - self._seen[0][0] >= _SHORTEST_S:
            then, oldest = self._seen[0]
            tasks = sum(each.tasks - oldest[name].tasks for name, each in newest.items())
            if tasks < _TASKS * processes and now - then < _LONGEST_S:
                break  # too few for a verdict, unless an older look gave one
            busy = sum(each.busy - oldest[name].busy for name, each in newest.items()) / (now - then)
            nodes = math.ceil(min(busy, processes) / _GOOD_LOAD / (processes / len(newest)) - 1e-9)
            found = min(self._most, max(self._fewest, nodes))
            self._seen.popleft()
        return found


def _same(before: Mapping[str, Load], now: Mapping[str, Load]) -> bool:
    """Whether the same processes are there, so that differences of totals say what they did."""
    return before.keys() == now.keys() and all(
        before[name].processes == each.processes and before[name].tasks <= each.tasks for name, each in now.items()
    )
