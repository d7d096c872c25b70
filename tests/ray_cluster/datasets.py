"""Datasets that the machines of a Ray cluster import."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Noise(Dataset[Any]):
    """Each sample has its index and random numbers; the test sets the seconds that a sample takes."""

    def __init__(self, length: int, shape: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        self.length, self.shape, self.seconds = length, shape, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, torch.rand(self.shape)


class Counting(IterableDataset[Any]):
    """A stream, of which each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, 50, info.num_workers)
