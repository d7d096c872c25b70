"""The facade is a torch DataLoader, has its attributes, and uses its samplers: frameworks rely on this."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import asyncloader
from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers, collate_strings
from tests.helpers.frameworks import epoch as epoch_of
from tests.helpers.running import collect, run_async


def test_the_facade_is_a_torch_dataloader() -> None:
    """It is an instance of torch's loader with its name, and is iterable."""
    loader = DataLoader[Any](Numbers(3))
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader, Iterable)
    assert type(loader).__name__ == "DataLoader"


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


OURS = {
    "concurrency",
    "decode",
    "device",
    "device_options",
    "group",
    "max_worker_restarts",
    "on_error",
    "on_uneven",
    "rank",
    "recovery",
    "seed",
    "snapshot_every_n_steps",
    "tuning",
    "world_size",
}


def test_no_public_attributes_of_our_own_but_options() -> None:
    """Besides torch's attributes and our options the facade's instances have no public attribute, also after use.
    Options at their defaults are read from the class: torch's loader can be made from the instance's attributes.
    """
    loader = DataLoader[Any](
        Numbers(5), num_workers=1, persistent_workers=True, concurrency=7, snapshot_every_n_steps=1
    )
    list(loader)
    theirs = set(vars(torch.utils.data.DataLoader(Numbers(5), num_workers=1)))
    extra = {name for name in vars(loader) if not name.startswith("_")} - theirs
    assert extra == {"concurrency"}
    assert all(hasattr(loader, name) for name in OURS)
    loader.close()
    plain = vars(DataLoader[Any](Numbers(5), batch_size=2))
    passed = {name: plain[name] for name in plain if not name.startswith("_") and "sampler" not in name}
    assert len(torch.utils.data.DataLoader(**passed)) == 3


class SubclassLoader(DataLoader[Any]):
    """A framework's subclass, with an argument and behaviour of its own."""

    def __init__(self, dataset: Any, extra: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.extra = extra

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + self.extra


def test_subclassing() -> None:
    """A subclass may wrap `__iter__` and keep attributes."""
    batches = list(SubclassLoader(Numbers(4), extra=1, num_workers=1, batch_size=2))
    assert [float(batch[0, 0]) for batch in batches] == [1.0, 201.0]


def test_rebuilding_from_attributes() -> None:
    """A framework may make a new loader from another loader's attributes, with another sampler."""
    old = DataLoader[Any](
        Numbers(10), batch_size=3, num_workers=1, tuning=Tuning(ring_bytes=1 << 20), collate_fn=collate_strings
    )
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"]
    sampler = BatchSampler(range(9, -1, -1), 5, drop_last=False)
    options = {name: getattr(old, name) for name in names}
    new = type(old)(old.dataset, batch_sampler=sampler, tuning=old.tuning, **options)
    assert_same(list(new), collect("torch", Numbers(10), batch_sampler=sampler, collate_fn=collate_strings))


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
