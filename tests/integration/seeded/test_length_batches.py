"""Length-aware batches and mixtures in seeded mode: ranks take turns in one plan; a run resumes where it stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncloader import BucketBatchSampler, DataLoader, TokenBudgetBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)
DATA: Any = list(range(400))


def batch_samplers() -> list[Any]:
    return [TokenBudgetBatchSampler(LENGTHS, 300, seed=5), BucketBatchSampler(LENGTHS, 8, seed=5)]


@pytest.mark.parametrize("kind", [0, 1], ids=["budget", "bucket"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_take_turns_in_one_plan(kind: int, world_size: int) -> None:
    """Rank r of W delivers the plan's batches r, r + W, ...: the same number on each rank, and none twice."""
    expected = list(batch_samplers()[kind])
    steps = len(expected) // world_size
    for rank in range(world_size):
        sampler = batch_samplers()[kind]
        with DataLoader[Any](
            DATA, batch_sampler=sampler, seed=1, rank=rank, world_size=world_size, num_workers=1
        ) as loader:
            assert [batch.tolist() for batch in loader] == expected[rank : steps * world_size : world_size]


@pytest.mark.parametrize("kind", [0, 1], ids=["budget", "bucket"])
def test_resumed_with_other_workers(kind: int) -> None:
    """The resumed loader gives the rest of the epoch, and then the next epoch's plan."""
    sampler = batch_samplers()[kind]
    expected = list(sampler)
    sampler.set_epoch(1)
    following = list(sampler)
    with DataLoader[Any](DATA, batch_sampler=batch_samplers()[kind], seed=1, num_workers=2) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(7)] == expected[:7]
        state = loader.state_dict()
        del iterator
    with DataLoader[Any](DATA, batch_sampler=batch_samplers()[kind], seed=1, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected[7:]
        assert [batch.tolist() for batch in loader] == following
