from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from asyncloader import (
    AsyncDataLoader,
    DataLoader,
    Recovery,
    SeededSampler,
    Tuning,
)
from asyncloader.options.clone import constructor_arguments
from tests.helpers.datasets import AsyncNumbers, AsyncStream, Numbers

Torchs = torch.utils.data.DataLoader

DEFAULTS = {
    "batch_size": 1,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "generator": None,
    "pin_memory_device": "",
    "in_order": True,
    "num_workers": 0,
}


def arguments(loader: Any, **changes: Any) -> dict[str, Any]:
    """The constructor's arguments without the dataset and without those that equal a default."""
    found = constructor_arguments(loader, changes)
    del found["dataset"]
    return {name: value for name, value in found.items() if DEFAULTS.get(name, ...) != value}


# ------------------------------------------------------------------------------------------- all options


def test_every_option_is_kept() -> None:
    """Each option of torch's and of ours is passed with its present value, also if set after construction."""
    options: dict[str, Any] = {
        "num_workers": 2,
        "pin_memory": True,
        "timeout": 7.5,
        "worker_init_fn": print,
        "multiprocessing_context": multiprocessing.get_context("spawn"),
        "generator": torch.Generator(),
        "prefetch_factor": 5,
        "persistent_workers": True,
        "pin_memory_device": "cuda",
        "in_order": False,
        "collate_fn": len,
        "batch_size": 3,
        "drop_last": True,
        "tuning": Tuning(ring_bytes=1 << 20, reorder_window=4),
        "concurrency": 7,
        "on_uneven": "error",
        "recovery": Recovery(allow_replay=True),
        "snapshot_every_n_steps": 3,
    }
    loader = DataLoader[Any](Numbers(9), **options)
    assert arguments(loader) == options
    loader.timeout = 9
    loader.worker_init_fn = None
    later = {name: value for name, value in (options | {"timeout": 9}).items() if name != "worker_init_fn"}
    assert arguments(loader) == later


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_seeded_loader_gets_its_sampler_anew(shuffle: bool) -> None:
    """The seed's own sampler is made again, for the dataset of the new loader."""
    loader = DataLoader[Any](Numbers(9), batch_size=2, shuffle=shuffle, seed=3, rank=1, world_size=2)
    again = loader.clone(dataset=Numbers(20))
    sampler = again.sampler
    assert isinstance(sampler, SeededSampler)
    assert (len(sampler), sampler.shuffle) == (20, shuffle)
    assert (again.seed, again.rank, again.world_size) == (3, 1, 2)


def test_a_loader_of_torchs_has_none_of_our_options() -> None:
    """Our options are then left to the constructor's defaults, unless `changes` has them."""
    assert not {"tuning", "concurrency"} & set(constructor_arguments(Torchs(Numbers(3)), {}))
    loader = DataLoader[Any].from_torch(Torchs(Numbers(3)), concurrency=9)
    assert (loader.tuning, loader.concurrency) == (Tuning(), 9)


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("collate_fn", [default_collate, default_convert, None])
def test_collations_of_torchs(batch_size: int | None, collate_fn: Any) -> None:
    """The default function follows the batch size; a default function that was given for the other case is kept."""
    loader = Torchs(Numbers(4), batch_size=batch_size, collate_fn=collate_fn)
    assert DataLoader[Any].from_torch(loader).collate_fn is loader.collate_fn


# ------------------------------------------------------------------------------------------- workers


def test_without_workers_what_needs_them_is_dropped() -> None:
    """prefetch_factor, persistent_workers and a context, which ``num_workers=0`` would refuse, are dropped."""
    loader = DataLoader[Any](
        Numbers(4),
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context="spawn",
        timeout=5,
        concurrency=3,
    )
    clone = loader.clone(num_workers=0)
    assert (clone.num_workers, clone.prefetch_factor, clone.persistent_workers) == (0, None, False)
    assert clone.multiprocessing_context is None
    assert clone.concurrency == 3
    assert len(list(clone)) == 4


# ------------------------------------------------------------------------------------------- order


def test_shuffling_is_made_anew() -> None:
    """A default RandomSampler becomes ``shuffle=True``, for the clone's dataset and with the clone's generator."""
    generator = torch.Generator()
    loader = DataLoader[Any](Numbers(4), shuffle=True, generator=generator)
    assert arguments(loader)["shuffle"] is True
    clone = loader.clone(dataset=Numbers(9), generator=torch.Generator())
    assert type(clone.sampler) is RandomSampler
    assert clone.sampler.generator is clone.generator is not generator
    assert sorted(float(batch[0, 0]) for batch in clone) == [100.0 * i for i in range(9)]


OWN_SAMPLERS: dict[str, Any] = {
    "list": [3, 1, 2],
    "weighted": WeightedRandomSampler([1.0, 2.0, 0.0], 5),
    "sequential, of something else": SequentialSampler(range(3)),
    "random, of something else": RandomSampler(range(3)),
    "subclass": type("Own", (SequentialSampler,), {})(range(4)),
}


@pytest.mark.parametrize("name", OWN_SAMPLERS)
def test_own_samplers_are_passed_on(name: str) -> None:
    """The user's sampler is passed to the clone as the same object."""
    sampler = OWN_SAMPLERS[name]
    loader = Torchs(Numbers(4), sampler=sampler, batch_size=2, drop_last=True)
    assert arguments(loader) == {"sampler": sampler, "batch_size": 2, "drop_last": True}
    assert constructor_arguments(loader, {})["sampler"] is sampler


@pytest.mark.parametrize("change", [{"sampler": [2, 1]}, {"shuffle": True}, {"shuffle": False}], ids=str)
@pytest.mark.parametrize("before", [{}, {"shuffle": True}, {"sampler": [3, 3]}], ids=str)
def test_sampler_and_shuffle_replace_each_other(before: dict[str, Any], change: dict[str, Any]) -> None:
    """If `sampler` or `shuffle` is changed, the other is left out, and the constructor accepts the rest."""
    found = arguments(Torchs(Numbers(4), batch_size=2, **before), **change)
    assert found == {"batch_size": 2, **change}
    DataLoader[Any](Numbers(4), **found)


# ------------------------------------------------------------------------------------------- batches


def test_own_batch_sampler_is_passed_on() -> None:
    """The user's batch sampler is passed alone: torch refuses every other option about batches beside it."""
    every: list[Any] = [[[0, 1], [2]], BatchSampler(range(4), 3, drop_last=True)]
    for batch_sampler in every:
        loader = Torchs(Numbers(4), batch_sampler=batch_sampler)
        found = arguments(loader)
        assert found == {"batch_sampler": batch_sampler}
        assert DataLoader[Any].from_torch(loader).batch_sampler is batch_sampler


@pytest.mark.parametrize(
    "before",
    [{"batch_size": 3, "drop_last": True}, {"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[3]]}],
    ids=str,
)
def test_a_new_batch_sampler_replaces_everything(before: dict[str, Any]) -> None:
    """batch_size, drop_last, shuffle, sampler and the old batch sampler are all left out."""
    found = arguments(Torchs(Numbers(4), **before), batch_sampler=[[0], [1, 2]])
    assert found == {"batch_sampler": [[0], [1, 2]]}
    assert [len(batch) for batch in DataLoader[Any](Numbers(4), **found)] == [1, 2]


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 3}, {"batch_size": None}, {"batch_sampler": None}, {"shuffle": True}, {"sampler": [2]}],
    ids=str,
)
def test_leaving_an_own_batch_sampler(change: dict[str, Any]) -> None:
    """Any other option about batches replaces the batch sampler; options not given have the constructor's defaults."""
    loader = Torchs(Numbers(4), batch_sampler=[[0, 1]])
    assert arguments(loader, **change) == change
    clone = DataLoader[Any].from_torch(loader, **change)
    assert clone.batch_size == change.get("batch_size", 1)


# ------------------------------------------------------------------------------------------- kinds of datasets


def test_datapipes() -> None:
    """torch keeps a datapipe in a wrapper; the clone gets the pipe itself and wraps it again."""
    every: list[tuple[Any, str]] = [(IterableWrapper(range(5)), "Iter"), (SequenceWrapper(range(5)), "Map")]
    for pipe, kind in every:
        loader = Torchs(pipe, batch_size=2)
        assert loader.dataset is not pipe
        assert constructor_arguments(loader, {})["dataset"] is pipe
        clone = DataLoader[Any].from_torch(loader).clone()
        assert type(clone.dataset) is type(loader.dataset)
        assert kind in type(clone.dataset).__name__
        assert [batch.tolist() for batch in clone] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
def test_async_datasets(make: Any) -> None:
    """An async stream, which torch does not recognise as iterable, stays iterable; an async map keeps its sampler."""
    stream = AsyncStream([5])
    loader = make(stream, batch_size=2, drop_last=True)
    clone = loader.clone()
    assert clone.dataset is stream
    assert (clone.batch_size, clone.drop_last) == (2, True)
    rows = make(AsyncNumbers(5), sampler=[1, 2], concurrency=4).clone(batch_size=2)
    assert (rows.sampler, rows.batch_size, rows.concurrency) == ([1, 2], 2, 4)


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
def test_clones_are_of_the_loaders_class(make: Any) -> None:
    """`clone` and `from_torch` return the class they are called on, from the options of either loader."""
    own = type("Own", (make,), {})
    assert type(own(Numbers(3)).clone()) is own
    assert type(own.from_torch(Torchs(Numbers(3)))) is own
    assert type(own.from_torch(DataLoader[Any](Numbers(3), concurrency=2))) is own
