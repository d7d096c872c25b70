"""Functions that read, change and seed graphs of datapipes.

Data path: none. Names as in `torchdata.dataloader2.graph`.
"""

from __future__ import annotations

from asyncloader.dataloader2.graph.settings import set_datapipes_seed, set_graph_random_seed
from asyncloader.dataloader2.graph.utils import (
    DataPipe,
    DataPipeGraph,
    find_dps,
    list_dps,
    remove_dp,
    replace_dp,
    traverse_dps,
)

__all__ = [
    "DataPipe",
    "DataPipeGraph",
    "find_dps",
    "list_dps",
    "remove_dp",
    "replace_dp",
    "set_datapipes_seed",
    "set_graph_random_seed",
    "traverse_dps",
]
