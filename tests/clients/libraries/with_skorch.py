"""skorch: the batches on which a net and its pickled copy are fitted and validated, by loaders that the net makes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback


class _Keep(Callback):  # type: ignore[misc]
    """Keeps every batch of training and of validation."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_batch_begin(self, net: Any, batch: Any = None, **kwargs: Any) -> None:
        self.batches.append(batch)


class _Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def batches(workers: int) -> dict[str, list[Any]]:
    """Read two epochs of each net."""
    net = NeuralNetRegressor(
        _Line,
        max_epochs=2,
        batch_size=8,
        iterator_train__shuffle=True,
        iterator_train__num_workers=workers,
        iterator_valid__num_workers=workers,
        callbacks=[("keep", _Keep())],
        callbacks__print_log=None,
    )
    rows = np.random.default_rng(1).random((40, 3), dtype=np.float32)
    again = pickle.loads(pickle.dumps(net.initialize()))
    found = {}
    for name, each in {"fitted": net, "pickled": again}.items():
        each.fit(rows, rows.sum(1, keepdims=True))
        found[name] = dict(each.callbacks_)["keep"].batches
    return found
