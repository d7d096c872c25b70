"""torch's `StackDataset` over asynchronous parts gives the batches that a blocking stack of the same samples gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from asyncloader import AsyncDataLoader, DataLoader, sample_rng


class Rows(Dataset[Any]):
    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.first + index, torch.rand((), generator=sample_rng().torch).item()])


class Awaited(Rows):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return super().__getitem__(index)


class Whole(Rows):
    """Gives whole batches by `async def __getitems__`."""

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return [Rows.__getitem__(self, index) for index in indices]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a batch was asked for sample by sample")


class BlockingWhole(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Short(Rows):
    async def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.first]


# Pairs: a stack with asynchronous parts, and a stack of the same samples with blocking parts.
STACKS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda: StackDataset(Awaited(0), Rows(50)), lambda: StackDataset(Rows(0), Rows(50))),
    "dict": (lambda: StackDataset(a=Rows(0), b=Awaited(50)), lambda: StackDataset(a=Rows(0), b=Rows(50))),
    "getitems": (lambda: StackDataset(Whole(0), Rows(50)), lambda: StackDataset(BlockingWhole(0), Rows(50))),
    "getitems, dict": (lambda: StackDataset(a=Whole(0)), lambda: StackDataset(a=BlockingWhole(0))),
    "nested": (
        lambda: StackDataset(ConcatDataset([Subset(StackDataset(Awaited(0)), [3, 1]), StackDataset(Awaited(20))])),
        lambda: StackDataset(ConcatDataset([Subset(StackDataset(Rows(0)), [3, 1]), StackDataset(Rows(20))])),
    ),
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else [type(value), *map(plain, value)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STACKS)
async def test_batches_are_a_blocking_stacks(name: str, workers: int) -> None:
    """The batches are equal for `for` and `async for`, random numbers included."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": workers}
    asynchronous, blocking = STACKS[name]
    inline: dict[str, Any] = options | {"num_workers": 0}
    with DataLoader(blocking(), **inline) as loader:
        expected = plain(list(loader))
    with DataLoader(asynchronous(), **options) as loader:
        assert plain(list(loader)) == expected
    async with AsyncDataLoader(asynchronous(), **options) as other:
        assert plain([batch async for batch in other]) == expected


def test_a_part_that_gives_too_few() -> None:
    """The error is torch's, with torch's text."""
    with (
        DataLoader(StackDataset(Short(0)), batch_size=4) as loader,
        pytest.raises(ValueError, match=r"output size mismatch\. Expected 4, got 1"),
    ):
        next(iter(loader))
