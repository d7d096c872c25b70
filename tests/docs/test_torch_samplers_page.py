"""The examples of torch's samplers, datasets and collation, with our loader: the output is as shown there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Sampler,
    StackDataset,
    Subset,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from asyncloader import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


# ------------------------------------------------------------------------------------- samplers


class ByLength(Sampler[int]):
    """A sampler that gives the shortest sample first."""

    def __init__(self, data: list[str]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        yield from torch.argsort(torch.tensor([len(x) for x in self.data])).tolist()


class BatchesByLength(Sampler[list[int]]):
    """A sampler that gives lists of indices, the shortest samples first."""

    def __init__(self, data: list[str], batch_size: int) -> None:
        self.data = data
        self.batch_size = batch_size

    def __len__(self) -> int:
        return (len(self.data) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.argsort(torch.tensor([len(x) for x in self.data]))
        for batch in torch.chunk(order, len(self)):
            yield batch.tolist()


@WORKERS
def test_own_samplers(workers: int) -> None:
    """Both samplers sort by length: one gives indices, the other lists of indices."""
    data: Any = ["dddd", "a", "ccc", "bb"]
    loader = DataLoader[Any](data, sampler=ByLength(data), batch_size=None, num_workers=workers)
    assert list(loader) == ["a", "bb", "ccc", "dddd"]
    loader = DataLoader[Any](data, batch_sampler=BatchesByLength(data, 2), num_workers=workers)
    assert list(loader) == [["a", "bb"], ["ccc", "dddd"]]
    assert len(loader) == 2


@pytest.mark.parametrize(
    ("drop_last", "shown"),
    [(False, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]), (True, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])],
)
def test_batch_sampler(drop_last: bool, shown: list[list[int]]) -> None:
    """BatchSampler's example gives the batches shown, by itself and in a loader."""
    sampler = BatchSampler(SequentialSampler(range(10)), batch_size=3, drop_last=drop_last)
    assert list(sampler) == shown
    dataset: Any = range(10)
    every: list[dict[str, Any]] = [{"batch_sampler": sampler}, {"batch_size": 3, "drop_last": drop_last}]
    for options in every:
        for workers in (0, 2):
            loader = DataLoader[Any](dataset, num_workers=workers, **options)
            assert [batch.tolist() for batch in loader] == shown


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted, with replacement": lambda: WeightedRandomSampler([0.1, 0.9, 0.4, 0.7, 3.0, 0.6], 5, replacement=True),
    "weighted, without": lambda: WeightedRandomSampler([0.9, 0.4, 0.05, 0.2, 0.3, 0.1], 5, replacement=False),
    "random": lambda: RandomSampler(range(6)),
    "random, with replacement": lambda: RandomSampler(range(6), replacement=True, num_samples=9),
    "subset": lambda: SubsetRandomSampler([5, 1, 3]),
    "sequential": lambda: SequentialSampler(range(6)),
}


@pytest.mark.thorough
@WORKERS
@pytest.mark.parametrize("name", SAMPLERS)
def test_random_samplers(name: str, workers: int) -> None:
    """From the same seed a loader draws the same indices with torch's samplers as torch's loader."""
    drawn = []
    numbers: Any = range(6)
    for make in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(11)
        loader: Any = make(numbers, sampler=SAMPLERS[name](), num_workers=workers)
        drawn.append([int(batch) for _ in range(2) for batch in loader])
    assert drawn[0] == drawn[1]
    count = len(drawn[0]) // 2
    assert count == {"random, with replacement": 9, "subset": 3}.get(name, 6 if "weighted" not in name else 5)
    if "replacement" not in name:
        assert len(set(drawn[0][:count])) == count


@WORKERS
def test_distributed_sampler(workers: int) -> None:
    """The page's recipe: each rank has a sampler, which shuffles; `set_epoch` before each epoch gives another order."""
    dataset: Any = range(8)
    epochs: list[list[int]] = [[], [], []]
    for rank in range(2):
        sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=rank)
        loader = DataLoader[Any](dataset, shuffle=False, sampler=sampler, num_workers=workers)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            epochs[epoch] += [int(batch) for batch in loader]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


# ------------------------------------------------------------------------------------- datasets


@WORKERS
def test_datasets_made_of_datasets(workers: int) -> None:
    """StackDataset by position and by name, ConcatDataset (also by ``+``), Subset and `random_split`."""
    images: Any = list(range(4))
    texts: Any = ["a", "b", "c", "d"]
    whole: Any = range(10)

    def first(dataset: Any) -> Any:
        return next(iter(DataLoader[Any](dataset, batch_size=2, num_workers=workers)))

    tuples: Any = StackDataset(images, texts)
    assert tuples[0] == (0, "a")
    assert repr(first(tuples)) == "[tensor([0, 1]), ('a', 'b')]"
    named: Any = StackDataset(image=images, text=texts)
    assert repr(first(named)) == "{'image': tensor([0, 1]), 'text': ['a', 'b']}"
    joined: Any = Subset(whole, [3]) + Subset(whole, [9])
    assert isinstance(joined, ConcatDataset)
    assert first(joined).tolist() == [3, 9]
    parts: list[Any] = random_split(whole, [3, 7], generator=torch.Generator().manual_seed(42))
    shares: list[Any] = random_split(whole, [0.3, 0.3, 0.4], generator=torch.Generator().manual_seed(42))
    assert [len(part) for part in [*parts, *shares]] == [3, 7, 3, 3, 4]
    loaded = [int(batch) for part in parts for batch in DataLoader[Any](part, num_workers=workers)]
    assert sorted(loaded) == list(range(10))


# ------------------------------------------------------------------------------------- default_collate


class Point(NamedTuple):
    x: Any
    y: Any


COLLATED: dict[str, tuple[list[Any], str]] = {
    "ints": ([0, 1, 2, 3], "tensor([0, 1, 2, 3])"),
    "strings": (["a", "b", "c"], "['a', 'b', 'c']"),
    "maps": ([{"A": 0, "B": 1}, {"A": 100, "B": 100}], "{'A': tensor([  0, 100]), 'B': tensor([  1, 100])}"),
    "named tuples": ([Point(0, 0), Point(1, 1)], "Point(x=tensor([0, 1]), y=tensor([0, 1]))"),
    "tuples": ([(0, 1), (2, 3)], "[tensor([0, 2]), tensor([1, 3])]"),
    "lists": ([[0, 1], [2, 3]], "[tensor([0, 2]), tensor([1, 3])]"),
}


@WORKERS
@pytest.mark.parametrize("name", COLLATED)
def test_default_collate_examples(name: str, workers: int) -> None:
    """The printed results are those of `default_collate`'s examples."""
    samples, shown = COLLATED[name]
    dataset: Any = samples
    (batch,) = DataLoader[Any](dataset, batch_size=len(samples), num_workers=workers)
    assert repr(batch) == shown


@WORKERS
def test_default_convert_examples(workers: int) -> None:
    """With ``batch_size=None``: numbers stay, arrays become tensors, named tuples keep their type."""
    dataset: Any = [0, np.array([0, 1]), Point(0, 0), Point(np.array(0), np.array(0)), [np.array([0, 1]), "a"]]
    found = list(DataLoader[Any](dataset, batch_size=None, num_workers=workers))
    assert repr(found) == (
        "[0, tensor([0, 1]), Point(x=0, y=0), Point(x=tensor(0), y=tensor(0)), [tensor([0, 1]), 'a']]"
    )


class CustomType:
    def __init__(self, value: int) -> None:
        self.value = value


def collate_custom(batch: list[Any]) -> Any:
    """Extend `default_collate` in the first of two ways: by a function around it."""
    if isinstance(batch[0], CustomType):
        return CustomType(sum(x.value for x in batch))
    return default_collate(batch)


class MappedType(CustomType):
    pass


def collate_mapped(batch: list[MappedType], *, collate_fn_map: Any = None) -> MappedType:
    """Extend it in the second way: by an entry in torch's table. Workers that are not forked import this module."""
    return MappedType(sum(x.value for x in batch))


default_collate_fn_map[MappedType] = collate_mapped


@WORKERS
@pytest.mark.parametrize(("kind", "options"), [(CustomType, {"collate_fn": collate_custom}), (MappedType, {})])
def test_two_ways_to_extend_default_collate(kind: type[CustomType], options: dict[str, Any], workers: int) -> None:
    """A `collate_fn` that falls back to the default collation, and an entry in `default_collate_fn_map`."""
    dataset: Any = [kind(n) for n in range(4)]
    batches = list(DataLoader[Any](dataset, batch_size=2, num_workers=workers, **options))
    assert [(type(batch), batch.value) for batch in batches] == [(kind, 1), (kind, 5)]
