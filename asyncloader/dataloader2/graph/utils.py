"""Reads and changes graphs of datapipes: finds, lists, replaces and removes parts, and finds where to cut.

Data path: none; before the first epoch.

A graph is what `traverse_dps` returns: ``{id(datapipe): (datapipe, graph of what it reads from)}``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from asyncloader.dataloader2.datapipes.forms import is_replicable

__all__ = [
    "DataPipe",
    "DataPipeGraph",
    "end_of",
    "find_dps",
    "find_replicable_branches",
    "list_dps",
    "remove_dp",
    "replace_dp",
    "traverse_dps",
]

DataPipe: TypeAlias = "IterDataPipe[Any] | MapDataPipe[Any]"


def end_of(graph: DataPipeGraph) -> DataPipe:
    """The datapipe that a graph ends with, which is the one that is read."""
    assert len(graph) == 1, "DataPipeGraph should only contain a single output DataPipe"
    return next(iter(graph.values()))[0]


def find_dps(graph: DataPipeGraph, dp_type: type[DataPipe]) -> list[DataPipe]:
    """The parts of exactly this class, not of subclasses; each once, the end of the graph first."""
    return [datapipe for datapipe in list_dps(graph) if type(datapipe) is dp_type]


def list_dps(graph: DataPipeGraph, exclude_dps: DataPipe | list[DataPipe] | None = None) -> list[DataPipe]:
    """All parts, each once, breadth first from the end of the graph.

    Args:
        graph: of `traverse_dps`.
        exclude_dps: parts that are left out with all that comes before them; default None: nothing is.
    """
    excluded: list[DataPipe] = []
    if exclude_dps is not None:
        excluded = list(exclude_dps) if isinstance(exclude_dps, (list, tuple)) else [exclude_dps]
    seen = {id(datapipe) for part in excluded for datapipe in list_dps(traverse_dps(part))}
    found: list[DataPipe] = []
    level = deque([graph])
    while level:
        for number, (datapipe, before) in level.popleft().items():
            if number not in seen:
                seen.add(number)
                found.append(datapipe)
                level.append(before)
    return found


def replace_dp(graph: DataPipeGraph, old_datapipe: DataPipe, new_datapipe: DataPipe) -> DataPipeGraph:
    """Put a part in another one's place, in all that read from it. Returns the graph as it is then.

    The new part may read from the old one: between the two nothing changes.
    """
    end = end_of(graph)
    if end is old_datapipe:
        return traverse_dps(new_datapipe)
    kept = {id(datapipe) for datapipe in list_dps(traverse_dps(new_datapipe))}
    for datapipe in list_dps(graph):
        if id(datapipe) not in kept:
            for name, value in list(vars(datapipe).items()):
                changed = _exchanged(value, old_datapipe, new_datapipe)
                if changed is not value:
                    setattr(datapipe, name, changed)
    return traverse_dps(end)


def _exchanged(value: Any, old: DataPipe, new: DataPipe) -> Any:
    """The value with the part exchanged, also in lists, tuples and dictionaries; the same object if it is not there."""
    if value is old:
        return new
    if isinstance(value, dict):
        pairs = {key: _exchanged(each, old, new) for key, each in value.items()}
        return value if all(pairs[key] is value[key] for key in value) else pairs
    if type(value) in (list, tuple):
        items = [_exchanged(each, old, new) for each in value]
        return value if all(ours is theirs for ours, theirs in zip(items, value, strict=True)) else type(value)(items)
    return value


def remove_dp(graph: DataPipeGraph, datapipe: DataPipe) -> DataPipeGraph:
    """Take a part out: what read from it reads from what it read from. Returns the graph as it is then.

    Raises:
        RuntimeError: it reads from nothing, or from several parts.
    """
    before = next((below for found, below in _pairs(graph) if found is datapipe), {})
    if not before:
        raise RuntimeError("Cannot remove the source DataPipe from the graph of DataPipe")
    if len(before) > 1:
        raise RuntimeError("Cannot remove the receiving DataPipe having multiple sending DataPipes")
    return replace_dp(graph, datapipe, end_of(before))


def _pairs(graph: DataPipeGraph) -> Iterator[tuple[DataPipe, DataPipeGraph]]:
    for datapipe, before in graph.values():
        yield datapipe, before
        yield from _pairs(before)


def find_replicable_branches(graph: DataPipeGraph) -> list[DataPipe]:
    """The ends of the largest branches of which each worker may have a copy: all parts of them are replicable."""
    found: dict[int, DataPipe] = {}

    def visit(datapipe: DataPipe, before: DataPipeGraph) -> None:
        if all(is_replicable(each) for each in list_dps(traverse_dps(datapipe))):
            found[id(datapipe)] = datapipe
        else:
            for each in before.values():
                visit(*each)

    visit(*next(iter(graph.values())))
    return list(found.values())


_find_replicable_branches = find_replicable_branches
