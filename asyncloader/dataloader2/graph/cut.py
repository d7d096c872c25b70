"""Finds what must run in one dispatching process: all that `sharding_round_robin_dispatch` deals from.

Data path: none; before the first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

from asyncloader.dataloader2.datapipes.forms import has_form
from asyncloader.dataloader2.graph.utils import DataPipe, list_dps

_FORM = "sharding_round_robin_dispatch"


class _DummyIterDataPipe(IterDataPipe[Any]):
    """Stands in a worker's graph for what the dispatching process runs. It is never read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("this datapipe stands for the dispatching process, and is replaced in each worker")


def _dispatches(datapipe: DataPipe) -> bool:
    return any(has_form(each, _FORM) for each in list_dps(traverse_dps(datapipe)))


def find_lca_round_robin_sharding_dp(graph: DataPipeGraph) -> DataPipe | None:
    """The part nearest to the sources that all `sharding_round_robin_dispatch` of the graph come before, or are;
    None: the graph has none.
    """
    for datapipe, before in graph.values():
        if not _dispatches(datapipe):
            continue
        branches = {number: each for number, each in before.items() if _dispatches(each[0])}
        if len(branches) == 1 and not has_form(datapipe, _FORM):
            return find_lca_round_robin_sharding_dp(branches)
        return datapipe
    return None


def find_non_dispatching_branches(graph: DataPipeGraph) -> list[DataPipe]:
    """The ends of the largest branches in which nothing is dispatched."""
    found: dict[int, DataPipe] = {}

    def visit(datapipe: DataPipe, before: DataPipeGraph) -> None:
        if any(isinstance(each, _DummyIterDataPipe) or has_form(each, _FORM) for each in _all(datapipe)):
            for each in before.values():
                visit(*each)
        else:
            found[id(datapipe)] = datapipe

    visit(*next(iter(graph.values())))
    return list(found.values())


def _all(datapipe: DataPipe) -> list[DataPipe]:
    return list_dps(traverse_dps(datapipe))
