"""Chooses the nodes of a loader's workers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


def node_order(loads: Sequence[float], turn: int, failures: Sequence[int] | None = None) -> list[int]:
    """Return the numbers of nodes in the order in which a worker tries them: by failures, by load, and in turn."""
    failed = failures or [0] * len(loads)
    return sorted(range(len(loads)), key=lambda number: (failed[number], loads[number], (number - turn) % len(loads)))


def to_move(nodes: Sequence[str], capacities: Mapping[str, int], avoided: Collection[str] = ()) -> list[int]:
    """Choose workers that should leave, so that nodes that have come get their part.

    Args:
        nodes: the node of each worker.
        capacities: the processes of each node of the service.
        avoided: nodes that failed, or could not be reached, when they were last tried. They keep their workers, and get
            no more, because a worker that left for such a node would come back.

    Returns:
        the numbers of workers: as few as possible, so that no node has more than its part, rounded up, as long as
        another node has less than its part, rounded down.
    """
    there = Counter(node for node in nodes if node in capacities)
    capacities = {node: number for node, number in capacities.items() if there[node] or node not in avoided}
    total = sum(capacities.values())
    if not total:
        return []
    fair = {node: len(nodes) * capacity / total for node, capacity in capacities.items()}
    # Rounded down: a node that lacks a part of a worker gets none, or workers would move back and forth.
    missing = sum(max(0, int(fair[node]) - there[node]) for node in capacities if node not in avoided)
    leaving = []
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if missing and node in capacities and there[node] > fair[node]:
            there[node] -= 1
            missing -= 1
            leaving.append(number)
    return leaving
