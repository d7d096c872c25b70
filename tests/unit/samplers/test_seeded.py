"""The sampler of the keyed permutation: a function of seed and epoch, sought in O(1), usable in any loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import (
    AsyncDataLoader,
    BucketBatchSampler,
    DataLoader,
    MixtureSampler,
    SeededSampler,
    TokenBudgetBatchSampler,
)
from tests.helpers.running import run_async


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 9999, 10_000])
def test_resuming_at_any_position(start: int) -> None:
    """`iter_from(start)` is the rest of the epoch."""
    sampler = SeededSampler(range(10_000), seed=11)
    sampler.set_epoch(3)
    assert list(sampler.iter_from(start)) == list(sampler)[start:]


@pytest.mark.parametrize("start", [-1, 11])
def test_start_out_of_range(start: int) -> None:
    """A bad start is refused at once, not at the first index."""
    with pytest.raises(ValueError, match=f"between 0 and 10, but got start={start}"):
        SeededSampler(range(10), seed=1).iter_from(start)


def test_in_every_loader() -> None:
    """torch's loader and both of ours read the same batches from it."""
    data: Any = list(range(20))
    sampler = SeededSampler(data, seed=4)
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(data, 3, sampler=sampler)]
    assert [index for batch in expected for index in batch] == list(sampler)
    with DataLoader[Any](data, 3, sampler=sampler, num_workers=2) as loader:
        assert [batch.tolist() for batch in loader] == expected

    async def read() -> list[Any]:
        async with AsyncDataLoader[Any](data, 3, sampler=sampler, num_workers=1) as loader:
            return [batch.tolist() async for batch in loader]

    assert run_async(read()) == expected


SEEDED: dict[str, Callable[[Any], Any]] = {
    "indices": lambda seed: SeededSampler(range(20), seed),
    "mixture": lambda seed: MixtureSampler([range(12), range(8)], [1, 2], seed),
    "buckets": lambda seed: BucketBatchSampler(range(1, 21), 3, seed, window=6),
    "tokens": lambda seed: TokenBudgetBatchSampler(range(1, 21), 40, seed, window=6),
}


@pytest.mark.parametrize("name", SEEDED)
def test_integers_of_numpy_are_integers(name: str) -> None:
    """Seeds and epochs are often drawn or computed with numpy; the order is that of the number."""
    plain, drawn = SEEDED[name](7), SEEDED[name](np.int64(7))
    for epoch in (0, 3):
        plain.set_epoch(epoch)
        drawn.set_epoch(np.int64(epoch))
        assert list(drawn) == list(plain)
    assert (type(drawn.seed), type(drawn.epoch)) == (int, int)
    with pytest.raises(TypeError, match="integer"):
        SEEDED[name](7.0)
