"""Opacus: the loader with Poisson sampling that `PrivacyEngine` builds from the user's."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data
from opacus import PrivacyEngine


def batches(workers: int) -> dict[str, list[Any]]:
    """Read two epochs, empty batches among them."""
    rows = torch.utils.data.TensorDataset(torch.arange(60.0).reshape(20, 3), torch.arange(20))
    loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=workers)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, private = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    return {"private": [batch for _ in range(2) for batch in private]}
