from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from asyncloader.workers.fetch.setup import install_worker_info, seed_worker


class Draws(Dataset[Any]):
    """Each sample has a number of each of the three global generators."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return [random.random(), torch.rand(1).item(), np.random.rand()]


@pytest.fixture(autouse=True)
def same_generators() -> Iterator[None]:
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()
    yield
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    np.random.set_state(states[2])
    torch_worker._worker_info = None


def test_seeds_are_torchs_to_the_bit() -> None:
    """The three generators give the numbers that they give in a worker of torch's loader."""
    theirs = list(DataLoader(Draws(), batch_size=None, num_workers=2, generator=torch.Generator().manual_seed(3)))
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)).item()
    ours: dict[int, Any] = {}
    for worker in range(2):
        assert seed_worker(int(base_seed), worker) == base_seed + worker
        ours[worker], ours[worker + 2] = (Draws()[0] for _ in range(2))
    assert [ours[n] for n in range(4)] == theirs


def test_worker_info_is_torchs() -> None:
    """`get_worker_info` gives torch's own object with the worker's data."""
    dataset = Draws()
    install_worker_info(1, 3, 77, dataset)
    info = get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 3, 77, dataset)
