"""A program with ten faults that users make with torch's loader, or, called with ``clean``, with their mended twins.

Each function makes its own loader, at a line of its own, and is named after the fault.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

CLEAN = sys.argv[1:] == ["clean"]


class Draws(Dataset[Any]):
    """Draws a number for each sample, from what `source` names."""

    def __init__(self, source: str = "") -> None:
        self.source, self.strength, self.saved = source, 0, list(range(10))
        self.numpy_rng, self.random_rng = np.random.default_rng(1), random.Random(1)
        self.split = self.numpy_rng.permutation(8)  # drawn here, and in no worker

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        match self.source:
            case "numpy":
                return torch.tensor(np.random.random())
            case "numpy_rng":
                return torch.tensor(self.numpy_rng.random())
            case "random_rng":
                return torch.tensor(self.random_rng.random())
            case _:
                pass
        return torch.tensor(float(index * self.strength))

    def state_dict(self) -> dict[str, Any]:
        if not CLEAN:  # no sleep(0) either, which gives the CPU away
            time.sleep(0.05)
        return {"saved": self.saved}


class Stream(IterableDataset[Any]):
    """Numbers; each worker reads all of them, or its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, 64, info.num_workers) if CLEAN else range(64)


class OwnSeed(Draws):
    """Has a generator of its own for each worker and epoch, if it is clean."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if CLEAN and not hasattr(self, "mine"):
            self.mine = True
            self.numpy_rng, self.random_rng = (
                np.random.default_rng(torch.initial_seed()),
                random.Random(torch.initial_seed()),
            )
        return super().__getitem__(index)


def seed_alike(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32 if CLEAN else 7)


def seed_by_worker(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32 if CLEAN else worker)


def read(loader: DataLoader[Any], epochs: int = 2) -> None:
    for _ in range(epochs):
        for _ in loader:
            pass


def equal_seeds() -> None:
    read(DataLoader(Draws("numpy"), 4, num_workers=2, worker_init_fn=seed_alike, persistent_workers=True), 1)


def seeds_restart() -> None:
    loader = DataLoader(Draws("numpy"), 4, num_workers=2, worker_init_fn=seed_by_worker, persistent_workers=CLEAN)
    read(loader, 2)


def equal_generators() -> None:
    read(DataLoader(OwnSeed("numpy_rng"), 4, num_workers=2, persistent_workers=True), 1)


def generator_restarts() -> None:
    read(DataLoader(OwnSeed("random_rng"), 4, num_workers=1, persistent_workers=CLEAN), 2)


def stale() -> None:
    dataset = Draws()
    loader = DataLoader(dataset, 4, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        dataset.strength = 0 if CLEAN else epoch
        read(loader, 1)


def same_order() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Draws(), 2, 0)
    loader = DataLoader(Draws(), 4, sampler=sampler)
    for epoch in range(2):
        if CLEAN:
            sampler.set_epoch(epoch)
        read(loader, 1)


def workers_anew() -> None:
    read(DataLoader(Draws(), 4, num_workers=1, persistent_workers=CLEAN), 3)


def iter_each_step() -> None:
    loader = DataLoader(Draws(), 4)
    batches = iter(loader)
    for _ in range(5):
        batches = batches if CLEAN else iter(loader)
        next(batches)


def duplicates() -> None:
    read(DataLoader(Stream(), 4, num_workers=2, persistent_workers=True), 1)


def states() -> None:
    dataset = Draws()
    for _ in DataLoader(dataset, 4):
        time.sleep(0.01)
        dataset.state_dict()


if __name__ == "__main__":
    torch.manual_seed(0)
    for fault in (
        equal_seeds,
        seeds_restart,
        equal_generators,
        generator_restarts,
        stale,
        same_order,
        workers_anew,
        iter_each_step,
        duplicates,
        states,
    ):
        fault()
