"""PyTorch Geometric: its `DataLoader` over graphs, shuffled, and `RandomNodeLoader` over the nodes of one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, RandomNodeLoader


def _graph(nodes: int) -> Data:
    edges = torch.stack((torch.arange(nodes), (torch.arange(nodes) * 3 + 1) % nodes))
    return Data(x=torch.arange(nodes * 2.0).reshape(nodes, 2), edge_index=edges, y=torch.tensor([nodes]))


def batches(workers: int) -> dict[str, list[Any]]:
    """Read two epochs of each loader."""
    graphs = DataLoader([_graph(n) for n in range(2, 22)], batch_size=6, shuffle=True, num_workers=workers)
    nodes = RandomNodeLoader(_graph(40), num_parts=4, shuffle=True, num_workers=workers)
    return {
        "graphs": [batch.to_dict() for _ in range(2) for batch in graphs],
        "nodes": [batch.to_dict() for _ in range(2) for batch in nodes],
    }
