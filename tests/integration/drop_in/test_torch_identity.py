"""The facade is a torch DataLoader, has its attributes, and uses its samplers: frameworks rely on this."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

import asyncloader
from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.frameworks import epoch as epoch_of
from tests.helpers.running import run_async


def test_the_async_loader_is_none() -> None:
    """The async loader is no instance of torch's loader; it is asynchronously iterable."""
    loader: Any = AsyncDataLoader[Any](Numbers(3))
    assert not isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader, AsyncIterable)
    assert isinstance(aiter(loader), AsyncIterator)


def test_reexports_are_torchs_own() -> None:
    """Every name of torch that asyncloader offers is torch's own object."""
    shared = {name for name in asyncloader.__all__ if hasattr(torch.utils.data, name)} - {"DataLoader"}
    assert {"Dataset", "IterableDataset", "DistributedSampler", "default_collate", "get_worker_info"} <= shared
    for name in shared:
        assert getattr(asyncloader, name) is getattr(torch.utils.data, name)
    assert set(asyncloader.__all__) <= set(dir(asyncloader))


def test_private_names_that_frameworks_read() -> None:
    """`_auto_collation`, `_index_sampler`, `_dataset_kind`, `_IterableDataset_len_called` are torch's."""
    every: list[dict[str, Any]] = [{"batch_size": 2}, {"batch_size": None}, {"batch_size": 2, "shuffle": True}]
    for options in every:
        ours, theirs = DataLoader[Any](Numbers(6), **options), torch.utils.data.DataLoader(Numbers(6), **options)
        assert ours._auto_collation == theirs._auto_collation
        assert type(ours._index_sampler) is type(theirs._index_sampler)
        assert ours._dataset_kind == theirs._dataset_kind
        assert ours._IterableDataset_len_called is None
        assert isinstance(ours.sampler, RandomSampler if options.get("shuffle") else SequentialSampler)
        assert ours._DataLoader__initialized  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_async_iterators_refuse_pickling(workers: int) -> None:
    """The async loader's iterators raise NotImplementedError like torch's, before and after the first batch."""

    async def run() -> None:
        async with AsyncDataLoader[Any](Numbers(3), num_workers=workers) as loader:
            batches: Any = aiter(loader)
            for _ in range(2):
                with pytest.raises(NotImplementedError) as caught:
                    pickle.dumps(batches)
                assert caught.value.args == ("{} cannot be pickled", type(batches).__name__)
                await anext(batches)

    run_async(run())


@pytest.mark.thorough
@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
@pytest.mark.parametrize("persistent", [False, True])
def test_distributed_sampler(make: Any, persistent: bool) -> None:
    """`set_epoch` between epochs reshuffles as in torch; the ranks' shares together are the whole dataset."""
    shares: list[list[float]] = [[], []]
    batches: list[Any] = []
    for rank in range(2):
        mine: Any = DistributedSampler(Numbers(20), num_replicas=2, rank=rank, seed=5)
        theirs: Any = DistributedSampler(Numbers(20), num_replicas=2, rank=rank, seed=5)
        loader = make(Numbers(20), sampler=mine, batch_size=3, num_workers=2, persistent_workers=persistent)
        torch_loader = torch.utils.data.DataLoader(Numbers(20), sampler=theirs, batch_size=3)
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            torch_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            batches = epoch_of(loader)
            assert_same(batches, list(torch_loader))
        shares[rank] = [float(value) for batch in batches for value in batch[:, 0]]
        loader.close()
    assert sorted(shares[0] + shares[1]) == [100.0 * i for i in range(20)]
