"""The part of our bridge to Ray Train that needs no Ray: each rank's share of a loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from asyncloader import DataLoader, Tuning
from asyncloader.integrations.ray import shard
from tests.clients.frameworks.helping import RowStream
from tests.helpers.datasets import AsyncStream

DATA = TensorDataset(torch.arange(23))


def values(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_dataset_as_under_a_stock_loader(world_size: int, shuffle: bool) -> None:
    """Every rank gets the batches of a stock loader with torch's DistributedSampler, shuffled if the loader was."""
    data = TensorDataset(torch.arange(23))  # not DATA: a fork server's workers get it in shared memory, where it stays
    for rank in range(world_size):
        ours = shard(
            DataLoader[Any](data, 4, shuffle=shuffle, num_workers=1, tuning=Tuning(ring_bytes=1 << 20)),
            world_size,
            rank,
        )
        sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, shuffle=shuffle)
        assert isinstance(ours, DataLoader)
        assert ours.tuning.ring_bytes == 1 << 20
        assert values(ours) == values(torch.utils.data.DataLoader(data, 4, sampler=sampler))


def test_what_is_not_shared_out_stays() -> None:
    """The loader itself is returned for a single rank, for a stream, and if its sampler already shares the dataset."""
    alone = DataLoader[Any](DATA, 4, shuffle=True)
    streams = [DataLoader[Any](RowStream(5), 2), DataLoader[Any](AsyncStream([5]), 2)]
    done = DataLoader[Any](DATA, 4, sampler=DistributedSampler(DATA, 2, 1))
    assert shard(alone, 1, 0) is alone
    assert all(shard(stream, 2, 1) is stream for stream in streams)
    assert shard(done, 2, 1) is done
    assert isinstance(alone.sampler, RandomSampler)


def test_any_order_but_the_datasets_own_is_shuffled() -> None:
    """Ray does the same: a sequential sampler is replaced by an unshuffled sampler, any other by a shuffled one."""
    own = DataLoader[Any](DATA, 4, sampler=torch.utils.data.SubsetRandomSampler(range(10)))
    plain = DataLoader[Any](DATA, 4)
    assert isinstance(plain.sampler, SequentialSampler)
    for loader, shuffled in ((own, True), (plain, False)):
        sampler: Any = shard(loader, 2, 0).sampler
        assert isinstance(sampler, DistributedSampler)
        assert sampler.shuffle is shuffled
        assert (sampler.num_replicas, sampler.rank) == (2, 0)
