"""Looks for mistakes in a graph.

Data path: none.
"""

from __future__ import annotations

from asyncloader.dataloader2.graph.utils import DataPipe, parts_of_form

__all__ = ["_check_shuffle_before_sharding"]


def _check_shuffle_before_sharding(datapipe: DataPipe) -> bool:
    """Whether each `sharding_filter` of the graph has a `shuffle` somewhere before it: True without a filter, too."""
    return all(parts_of_form(each, "shuffle") for each in parts_of_form(datapipe, "sharding_filter"))
