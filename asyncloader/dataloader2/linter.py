"""Looks for mistakes in a graph.

Data path: none.
"""

from __future__ import annotations

from torch.utils.data.graph import DataPipeGraph, traverse_dps

from asyncloader.dataloader2.datapipes.forms import has_form
from asyncloader.dataloader2.graph.utils import DataPipe, list_dps

__all__ = ["_check_shuffle_before_sharding"]


def _check_shuffle_before_sharding(datapipe: DataPipe) -> bool:
    """Whether each `sharding_filter` of the graph has a `shuffle` somewhere before it: True without a filter, too."""
    graph: DataPipeGraph = traverse_dps(datapipe)
    for each in list_dps(graph):
        if has_form(each, "sharding_filter"):
            before = list_dps(traverse_dps(each))
            if not any(has_form(part, "shuffle") for part in before):
                return False
    return True
