"""Reads and changes graphs of datapipes: finds, lists, replaces and removes parts, and finds where to cut.

Data path: none; before the first epoch.

A graph is the nested dictionary that `traverse_dps` returns: ``{id(datapipe): (datapipe, graph of its sources)}``. Each
datapipe in it is called a part; its sources are the datapipes that it reads from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from asyncloader.dataloader2.datapipes.forms import has_form, is_replicable

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
    """Return the datapipe that a graph ends with: the last part, which the loader reads."""
    assert len(graph) == 1, "DataPipeGraph should only contain a single output DataPipe"
    return next(iter(graph.values()))[0]


def find_dps(graph: DataPipeGraph, dp_type: type[DataPipe]) -> list[DataPipe]:
    """Return the parts of exactly this class, not of subclasses; each once, the end of the graph first."""
    return [datapipe for datapipe in list_dps(graph) if type(datapipe) is dp_type]


def list_dps(graph: DataPipeGraph, exclude_dps: DataPipe | list[DataPipe] | None = None) -> list[DataPipe]:
    """Return all parts, each once, breadth first from the end of the graph.

    Args:
        graph: of `traverse_dps`.
        exclude_dps: parts that are left out together with all their sources; default None: no part is.
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


def parts_of(datapipe: DataPipe) -> list[Any]:
    """Return all parts of the graph that ends with this datapipe, in the order of `list_dps`. A service may return any
    iterable in a datapipe's place: that has no parts.
    """
    return list_dps(traverse_dps(datapipe)) if isinstance(datapipe, IterDataPipe | MapDataPipe) else []


def parts_of_form(datapipe: DataPipe, *names: str) -> list[Any]:
    """Return those `parts_of` a graph that functional forms of these names make."""
    return [each for each in parts_of(datapipe) if any(has_form(each, name) for name in names)]


def end_with(datapipe: DataPipe, form: str, *arguments: Any) -> DataPipe:
    """Add a part of this form at the end of a graph that does not end with such a part. Returns the graph's end."""
    end: DataPipe = datapipe if has_form(datapipe, form) else getattr(datapipe, form)(*arguments)
    return end


def replace_dp(graph: DataPipeGraph, old_datapipe: DataPipe, new_datapipe: DataPipe) -> DataPipeGraph:
    """Have every part that reads from the old datapipe read from the new datapipe. Returns the changed graph.

    The new datapipe may itself read from the old: its own branch stays as it is.
    """
    end = end_of(graph)
    if end is old_datapipe:
        return traverse_dps(new_datapipe)
    # A new datapipe that reads from the old one must go on reading from it, and not from itself.
    kept = {id(datapipe) for datapipe in parts_of(new_datapipe)}
    for datapipe in list_dps(graph):
        if id(datapipe) not in kept:
            for name, value in list(vars(datapipe).items()):
                changed = _exchange(value, old_datapipe, new_datapipe)
                if changed is not value:
                    setattr(datapipe, name, changed)
    return traverse_dps(end)


def _exchange(value: Any, old: DataPipe, new: DataPipe) -> Any:
    """Return the value with the part exchanged, also in lists, tuples and dictionaries; a value without it as it is."""
    if value is old:
        return new
    if isinstance(value, dict):
        pairs = {key: _exchange(each, old, new) for key, each in value.items()}
        return value if all(pairs[key] is value[key] for key in value) else pairs
    if type(value) in (list, tuple):
        items = [_exchange(each, old, new) for each in value]
        return value if all(ours is theirs for ours, theirs in zip(items, value, strict=True)) else type(value)(items)
    return value


def remove_dp(graph: DataPipeGraph, datapipe: DataPipe) -> DataPipeGraph:
    """Take a part out: the parts that read from it read from its source instead. Returns the changed graph.

    Raises:
        RuntimeError: the part has no source, or several.
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


def largest_branches(graph: DataPipeGraph, belongs: Callable[[DataPipe], bool]) -> list[DataPipe]:
    """Return the ends of the largest branches in which every part `belongs`; each branch once."""
    found: dict[int, DataPipe] = {}

    def visit(datapipe: DataPipe, before: DataPipeGraph) -> None:
        if all(belongs(each) for each in parts_of(datapipe)):
            found[id(datapipe)] = datapipe
        else:
            for each in before.values():
                visit(*each)

    visit(*next(iter(graph.values())))
    return list(found.values())


def find_replicable_branches(graph: DataPipeGraph) -> list[DataPipe]:
    """Return the ends of the largest branches of which each worker may have a copy: all their parts are replicable."""
    return largest_branches(graph, is_replicable)


_find_replicable_branches = find_replicable_branches


_FORM = "sharding_round_robin_dispatch"


class _DummyIterDataPipe(IterDataPipe[Any]):
    """Stands in a worker's graph for the parts that the dispatching process runs. It is never read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("this datapipe stands for the dispatching process, and is replaced in each worker")


def find_lca_round_robin_sharding_dp(graph: DataPipeGraph) -> DataPipe | None:
    """Return the part nearest to the sources whose branch holds every `sharding_round_robin_dispatch` of the graph.

    It may be a `sharding_round_robin_dispatch` itself. None: the graph has no such part.
    """
    for datapipe, before in graph.values():
        if not parts_of_form(datapipe, _FORM):
            continue
        branches = {number: each for number, each in before.items() if parts_of_form(each[0], _FORM)}
        if len(branches) == 1 and not has_form(datapipe, _FORM):
            return find_lca_round_robin_sharding_dp(branches)
        return datapipe
    return None


def find_non_dispatching_branches(graph: DataPipeGraph) -> list[DataPipe]:
    """Return the ends of the largest branches without a `sharding_round_robin_dispatch` or its stand-in."""
    return largest_branches(graph, lambda each: not (isinstance(each, _DummyIterDataPipe) or has_form(each, _FORM)))
