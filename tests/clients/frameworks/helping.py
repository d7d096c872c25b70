"""Shared by the tests with frameworks: seeds, data that draws random numbers, a model, and a check for processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import DataLoader
from tests.helpers.running import Deaths
from tests.processes import own_children


def seed_all(seed: int = 7) -> None:
    """Seed the three global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draws() -> tuple[float, float, float]:
    """Draw a number from each global generator: the numbers are equal after equal use."""
    return float(torch.rand(())), random.random(), float(np.random.random())


def _row(index: int) -> dict[str, torch.Tensor]:
    x = torch.rand(3) + index / 10
    label = random.random() + index / 10 + np.random.random()
    return {"x": x, "labels": torch.tensor([label], dtype=torch.float32)}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """`n` rows that depend on the index and on every global generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _row(index)


class RowStream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows of `Rows` as a stream without a length, dealt out to the workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (_row(index) for index in range(first, self.n, step))


class Line(torch.nn.Module):
    """A linear model with its loss, in the form that the HF Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


def batches_given(loader: Any) -> int:
    """Return the number of batches that this loader has delivered. It must be ours: others do not count them."""
    assert isinstance(loader, DataLoader), type(loader)
    return int(loader.stats()["data/batches"])


def workers_of_now() -> Deaths:
    """Return the children that this process has at this moment, except those of multiprocessing itself."""
    return Deaths(set(own_children()))
