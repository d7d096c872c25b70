"""A dataset that can only be read where it is: for worker threads, which share it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from asyncloader import sample_rng
from tests.helpers.seeded_runs import epochs_of

THREADED: dict[str, Any] = {"num_workers": 2, "workers": "threads"}
"""The options of a loader with worker threads."""


class Sealed(Dataset[Any]):
    """Cannot be pickled or copied, nor can what it is given."""

    def __init__(self, make: Any, length: int = 24) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("this dataset does not travel")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this dataset is not copied")


def epoch(kind: str, dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of an epoch."""
    return epochs_of(kind, dataset, **options)[0]


def same(samples: list[Any]) -> list[Any]:
    return samples


class Drawing(Dataset[Any]):
    """Draws as worker threads may: by generators that worker processes take from the process."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        rng = getattr(get_worker_info(), "rng", None)
        pythons = random if rng is None else rng.random_generator
        torchs = None if rng is None else rng.torch_generator
        own = sample_rng()
        drawn = [pythons.random(), float(torch.rand((), generator=torchs)), pythons.randrange(1000)]
        return index, *drawn, float(own.numpy.random()), own.random.random()
