"""The examples of torch's data loading page, with our loader: each gives the output that the page shows."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from asyncloader import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


# ------------------------------------------------------------------------------------- splitting iterable datasets


class Range(IterableDataset[int]):
    """A stream that gives all of a range in every worker."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


class SplitRange(Range):
    """A stream that gives each worker its share of the range."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:  # loading in this process: all of it
            return super().__iter__()
        share = math.ceil((self.end - self.start) / info.num_workers)
        first = self.start + info.id * share
        return iter(range(first, min(first + share, self.end)))


def take_a_share(worker: int) -> None:
    """A `worker_init_fn` that narrows its worker's copy of the dataset."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    start, end = dataset.start, dataset.end
    share = math.ceil((end - start) / info.num_workers)
    dataset.start = start + info.id * share
    dataset.end = min(dataset.start + share, end)


@pytest.mark.parametrize(("workers", "shown"), [(0, [3, 4, 5, 6]), (2, [3, 5, 4, 6]), (12, [3, 4, 5, 6])])
def test_splitting_in_iter(workers: int, shown: list[int]) -> None:
    """Example 1 of IterableDataset: `__iter__` asks `get_worker_info` for its share. Each batch has one item."""
    loader = DataLoader[Any](SplitRange(start=3, end=7), num_workers=workers)
    assert repr(list(loader)) == repr([torch.tensor([i]) for i in shown])


@pytest.mark.parametrize(
    ("workers", "init", "shown"),
    [
        (0, None, [3, 4, 5, 6]),
        (2, None, [3, 3, 4, 4, 5, 5, 6, 6]),
        (2, take_a_share, [3, 5, 4, 6]),
        (12, take_a_share, [3, 4, 5, 6]),
    ],
)
def test_splitting_by_worker_init_fn(workers: int, init: Any, shown: list[int]) -> None:
    """Example 2 of IterableDataset: each worker gives all data without a split, and its share with `worker_init_fn`."""
    loader = DataLoader[Any](Range(start=3, end=7), num_workers=workers, worker_init_fn=init)
    assert [int(batch) for batch in loader] == shown


# -------------------------------------------------------------------------------------------- equivalents of loading


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> Any:
        return torch.arange(3) + 10 * index, index


def same(got: list[Any], expected: list[Any]) -> None:
    assert repr(got) == repr(expected)
    assert len(got) > 1


@WORKERS
def test_automatic_batching_of_a_map_dataset(workers: int) -> None:
    """``for indices in batch_sampler: yield collate_fn([dataset[i] for i in indices])``."""
    dataset = Rows()
    loader = DataLoader[Any](dataset, batch_size=4, num_workers=workers)
    batch_sampler: Any = loader.batch_sampler
    same(list(loader), [loader.collate_fn([dataset[i] for i in indices]) for indices in batch_sampler])


@WORKERS
def test_automatic_batching_of_an_iterable_dataset(workers: int) -> None:
    """``for indices in batch_sampler: yield collate_fn([next(dataset_iter) for _ in indices])``."""
    loader = DataLoader[Any](SplitRange(0, 10), batch_size=5, num_workers=min(workers, 1))
    dataset: Any = loader.dataset
    dataset_iter = iter(dataset)
    same(list(loader), [loader.collate_fn([next(dataset_iter) for _ in range(5)]) for _ in range(2)])


@WORKERS
def test_no_batching_of_a_map_dataset(workers: int) -> None:
    """``for index in sampler: yield collate_fn(dataset[index])``."""
    dataset = Rows()
    loader = DataLoader[Any](dataset, batch_size=None, num_workers=workers)
    same(list(loader), [loader.collate_fn(dataset[index]) for index in loader.sampler])


@WORKERS
def test_no_batching_of_an_iterable_dataset(workers: int) -> None:
    """``for data in iter(dataset): yield collate_fn(data)``."""
    loader = DataLoader[Any](SplitRange(0, 10), batch_size=None, num_workers=min(workers, 1))
    collate_fn: Any = loader.collate_fn
    same(list(loader), [collate_fn(data) for data in SplitRange(0, 10)])


class Blocks(Dataset[Any]):
    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.arange(10)[indices]


@WORKERS
def test_batches_by_the_sampler(workers: int) -> None:
    """A dataset that reads whole batches takes a BatchSampler as `sampler`, with ``batch_size=None``."""
    sampler = BatchSampler(SequentialSampler(Rows()), batch_size=4, drop_last=False)
    loader = DataLoader[Any](Blocks(), sampler=sampler, batch_size=None, num_workers=workers)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@WORKERS
def test_collate_fn_that_pads(workers: int) -> None:
    """Sequences of several lengths are padded to the longest of their batch."""
    dataset: Any = [torch.ones(n, dtype=torch.int64) for n in (1, 3, 2, 2)]
    batches = list(DataLoader[Any](dataset, batch_size=2, collate_fn=pad, num_workers=workers))
    assert [batch.tolist() for batch in batches] == [[[1, 0, 0], [1, 1, 1]], [[1, 1], [1, 1]]]


# ------------------------------------------------------------------------------------- memory pinning


class SimpleCustomBatch:
    """Inputs and targets with a method `pin_memory`."""

    def __init__(self, data: list[Any]) -> None:
        inputs, targets = zip(*data, strict=True)
        self.inp = torch.stack(inputs, 0)
        self.tgt = torch.stack(targets, 0)

    def pin_memory(self) -> SimpleCustomBatch:
        self.inp = self.inp.pin_memory()
        self.tgt = self.tgt.pin_memory()
        return self


@WORKERS
def test_custom_batch_with_pin_memory(workers: int) -> None:
    """The batch arrives as the user's class, page-locked where an accelerator exists (the page's ``True``)."""
    inputs = torch.arange(10 * 5, dtype=torch.float32).view(10, 5)
    targets = torch.arange(10 * 5, dtype=torch.float32).view(10, 5)
    dataset = TensorDataset(inputs, targets)
    options: dict[str, Any] = {"batch_size": 2, "collate_fn": SimpleCustomBatch, "pin_memory": True}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")
        batches = list(DataLoader[Any](dataset, num_workers=workers, **options))
    assert len(batches) == 5
    for number, sample in enumerate(batches):
        assert type(sample) is SimpleCustomBatch
        assert torch.equal(sample.inp, inputs[2 * number : 2 * number + 2])
        assert torch.equal(sample.tgt, sample.inp)
        assert sample.inp.is_pinned() == sample.tgt.is_pinned() == torch.accelerator.is_available()


# ------------------------------------------------------------------------------------- randomness


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


def seed_worker(worker: int) -> None:
    """Seed numpy and random, as the recipe for reproducible workers does."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.thorough
def test_recipe_for_reproducible_workers() -> None:
    """With `worker_init_fn=seed_worker` and a seeded generator each run has the same numbers, and they are torch's."""
    runs = []
    for make in (torch.utils.data.DataLoader, DataLoader, DataLoader):
        generator = torch.Generator()
        generator.manual_seed(0)
        loader: Any = make(
            Drawn(), batch_size=2, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=generator
        )
        runs.append([repr(list(loader)) for _ in range(2)])
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] != runs[0][1]


class Seeds(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert torch.initial_seed() == info.seed
        return info.id, info.seed


def test_worker_seeds() -> None:
    """A worker's seed is ``base_seed + worker_id``, in its information and as `torch.initial_seed`."""
    torch.manual_seed(3)
    base = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(3)
    found = [batch[0] for batch in DataLoader[Any](Seeds(), num_workers=2, collate_fn=list)]
    assert found == [(i % 2, base + i % 2) for i in range(4)]
