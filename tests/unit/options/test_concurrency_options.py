"""Options for samples in flight: which values are refused, and how many batches are outstanding."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, Subset

from asyncloader import DataLoader
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.options.objects import grouped
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from tests.helpers.datasets import AsyncNumbers, AsyncStream, AsyncWholeBatches, Numbers


class Stateful(AsyncNumbers):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Whole(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


async def decode(sample: Any) -> Any:
    return sample


class Decodes:
    async def __call__(self, sample: Any) -> Any:
        return sample


def described(value: Any) -> str:
    """An id without a memory address, so that it is equal in every process."""
    if isinstance(value, dict):
        return ",".join(f"{name}={described(each)}" for name, each in value.items()) or "-"
    return str(value) if isinstance(value, (int, str, list, type(None))) else type(value).__name__


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Numbers(3), {"decode_threads": -1}, "-1"),
        (Numbers(3), {"decode_threads": "2"}, "'2'"),
        (Numbers(3), {"concurrency": 0}, "a positive integer or None .*, but got concurrency=0"),
        (Numbers(3), {"concurrency": True}, "concurrency=True"),
        (AsyncNumbers(3), {"concurrency": 1.5}, "concurrency=1.5"),
    ],
    ids=described,
)
def test_what_is_refused(dataset: Any, options: dict[str, Any], words: str) -> None:
    """The error has the option's value."""
    with pytest.raises(ValueError, match=words):
        DataLoader[Any](dataset, **grouped(options))


@pytest.mark.parametrize("function", [decode, Decodes(), 3], ids=["coroutine function", "coroutine call", "number"])
def test_decode_is_called(function: Any) -> None:
    """A function that would have to be awaited, or an object that cannot be called, is a TypeError."""
    with pytest.raises(TypeError, match="decode"):
        DataLoader[Any](Numbers(3), decode=function)


def credits(dataset: Any, **options: Any) -> int:
    return EpochConfig.of(DataLoader[Any](dataset, **options)).credits


@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (Numbers(9), {}, 2),
        (Numbers(9), {"concurrency": 16}, 17),
        (Numbers(9), {"concurrency": 16, "batch_size": 10}, 3),
        (Whole(9), {"concurrency": 16, "batch_size": 10}, 17),
        (AsyncNumbers(9), {}, 257),
        (AsyncNumbers(9), {"batch_size": None}, 257),
        (AsyncNumbers(9), {"batch_size": 64}, 5),
        (AsyncNumbers(9), {"batch_size": 60}, 6),
        (AsyncNumbers(9), {"batch_size": 1000}, 2),
        (AsyncNumbers(9), {"batch_size": 64, "prefetch_factor": 9}, 9),
        (AsyncNumbers(9), {"batch_size": 64, "concurrency": 512}, 9),
        (AsyncWholeBatches(9), {"batch_size": 64}, 5),
        (Subset(AsyncNumbers(9), [1, 2]), {"batch_size": 64}, 5),
        (AsyncNumbers(9), {"batch_sampler": BatchSampler(SequentialSampler(range(9)), 128, False)}, 3),
        (AsyncNumbers(9), {"batch_sampler": [[0, 1], [2]]}, 2),
        (AsyncStream([3, 3]), {"batch_size": 4}, 2),
        (Stateful(9), {"batch_size": 4}, 2),
    ],
    ids=described,
)
def test_batches_in_hand(dataset: Any, options: dict[str, Any], expected: int) -> None:
    """Per worker: enough batches for `concurrency` samples, or for all threads, and one batch more.

    It is torch's default of 2 where samples are not concurrent, where a state would be saved further ahead, and where
    the batch size is unknown.
    """
    assert credits(dataset, num_workers=2, **options) == expected


@given(size=st.integers(1, 600), concurrency=st.integers(1, 2000), prefetch=st.integers(1, 12))
def test_there_is_work_for_every_place_in_flight(size: int, concurrency: int, prefetch: int) -> None:
    """With one batch finished and waiting, the others have `concurrency` samples; not one batch more is outstanding."""
    found = credits(AsyncNumbers(9), batch_size=size, concurrency=concurrency, prefetch_factor=prefetch, num_workers=1)
    assert found >= prefetch
    assert (found - 1) * size >= concurrency
    assert found == prefetch or (found - 2) * size < concurrency


def waited(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, index: int) -> Any:
        return method(self, index)

    return wrapper


class Wrapped(Dataset[Any]):
    @waited
    async def __getitem__(self, index: int) -> int:
        return index


class Annotated(Dataset[Any]):
    def __getitem__(self, index: int) -> Awaitable[int]:
        return asyncio.sleep(0, index)


class Opened(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return asyncio.sleep(0, index)

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class Plain(Dataset[Any]):
    def __getitem__(self, index: int) -> "list[Awaitable[int]]":  # noqa: UP037
        return []


def test_plain_methods_that_return_awaitables() -> None:
    """A method counts as async by its return annotation, by the function it wraps, or by the dataset's `__aenter__`."""
    assert is_async_dataset(Wrapped())
    assert is_async_dataset(Annotated())
    assert is_async_dataset(Opened())
    assert not is_async_dataset(Plain())
