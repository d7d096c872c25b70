"""Offers the cut of a graph under the name that it has in `torchdata.dataloader2.utils`."""

from __future__ import annotations

from asyncloader.dataloader2.graph.utils import (
    _DummyIterDataPipe,
    find_lca_round_robin_sharding_dp,
    find_non_dispatching_branches,
)

__all__ = ["_DummyIterDataPipe", "find_lca_round_robin_sharding_dp", "find_non_dispatching_branches"]
