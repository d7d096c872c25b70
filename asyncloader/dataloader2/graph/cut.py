"""Finds the parts that must run in one dispatching process: the sources of each `sharding_round_robin_dispatch`.

Data path: none; before the first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import DataPipeGraph

from asyncloader.dataloader2.datapipes.forms import has_form
from asyncloader.dataloader2.graph.utils import DataPipe, largest_branches, parts_of_form

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
