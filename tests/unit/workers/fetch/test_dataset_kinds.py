"""Kinds of datasets: awaited or blocking, of samples or of batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import partial, wraps
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from asyncloader.workers.fetch.dataset_kinds import (
    check_plain,
    fetches_batches,
    fetches_samples,
    is_async_dataset,
    is_awaited,
)


class Plain(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index * 10

    def __len__(self) -> int:
        return 100


class Getitems(Plain):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 10 for index in indices]


class Async(Plain):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index * 10


class AsyncBatched(Dataset[Any]):
    async def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class AsyncStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise TypeError("read it with async for")

    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1


class OnlyAiter:
    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1


class PlainStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    ("dataset", "asynchronous"),
    [
        (Plain(), False),
        (Async(), True),
        (AsyncBatched(), True),
        (Subset(Async(), [1]), True),
        (Subset(Subset(Async(), [1]), [0]), True),
        (Subset(Plain(), [1]), False),
        (ConcatDataset([Plain(), Async()]), True),
        (ConcatDataset([Plain(), Plain()]), False),
        (OnlyAiter(), True),
        (AsyncStream(), True),
        (PlainStream(), False),
        (ChainDataset([PlainStream()]), False),
        ([1, 2], False),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool) else str(value),
)
def test_which_datasets_are_async(dataset: Any, asynchronous: bool) -> None:
    """A dataset is async by its own methods, or by those of the dataset under a view."""
    assert is_async_dataset(dataset) is asynchronous


def test_a_stack_of_awaited_parts_is_refused() -> None:
    """Its methods would await nothing; the error says what to write, also under a view."""
    with pytest.raises(TypeError, match="a StackDataset does not await its parts' samples: write a dataset whose"):
        is_async_dataset(Subset(StackDataset(Plain(), Async()), [0]))


def test_views_of_torch_only_pass_indices_on() -> None:
    """A dataset's own `__getitems__` is found through torch's views; a view alone does not count."""
    plain, whole = Plain(), Getitems()
    assert fetches_batches(whole)
    assert fetches_batches(Subset(Subset(whole, [0, 1]), [0]))
    assert fetches_batches(StackDataset(plain, whole))
    assert fetches_batches(StackDataset(a=plain, b=whole))
    for dataset in (plain, TensorDataset(torch.zeros(2)), [1, 2]):
        assert not fetches_batches(dataset)
        assert not fetches_batches(Subset(dataset, [0]))  # type: ignore[arg-type]
        assert not fetches_batches(StackDataset(dataset))  # type: ignore[arg-type]
    assert not fetches_batches(ConcatDataset([plain, plain]))


def test_a_subclass_of_a_view_is_the_users() -> None:
    """A subclass of Subset may have changed `__getitems__`."""

    class Mine(Subset[Any]):
        pass

    assert fetches_batches(Mine(Plain(), [0]))


def test_a_sample_can_be_fetched_alone_through_views() -> None:
    """Every dataset under the view must have a `__getitem__` of its own: `Dataset`'s raises."""
    alone, batches = Plain(), AsyncBatched()
    can: list[Any] = [alone, [1, 2], Subset(alone, [0]), StackDataset(a=alone), ConcatDataset([alone, alone])]
    assert all(map(fetches_samples, can))
    cannot: list[Any] = [batches, Subset(batches, [0]), ConcatDataset([alone, Subset(batches, [0])])]
    assert not any(map(fetches_samples, cannot))


# --------------------------------------------------------------------------- functions that have to be awaited


class Own:
    async def awaited(self, sample: Any) -> Any:
        return sample

    async def __call__(self, sample: Any) -> Any:
        return sample


async def awaited(sample: Any) -> Any:
    return sample


@wraps(awaited)
def wrapping(sample: Any) -> Any:
    return sample


def annotated(sample: Any) -> Awaitable[Any]:
    return awaited(sample)


@pytest.mark.parametrize("function", [awaited, Own().awaited, Own(), partial(awaited, 1), wrapping, annotated])
def test_coroutine_functions(function: Any) -> None:
    """A function, a method, a callable object, a partial, a wrapper and an annotation are recognized."""
    assert is_awaited(function)
    with pytest.raises(TypeError, match=r"^f is a coroutine function, .* make it a plain function, without async$"):
        check_plain("f", function)


@pytest.mark.parametrize("function", [abs, Own, lambda x: awaited(abs(x)), MagicMock(), partial(abs, 1), None])
def test_others(function: Any) -> None:
    """Calling a class does not call its instances' `__call__`; a plain function's result is not known in advance."""
    assert not is_awaited(function)
    check_plain("f", function)
