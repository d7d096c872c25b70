"""Awaited samples: concurrent, in the order of their indices, and no sample left running."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from asyncloader.workers.fetch.map_async import AsyncMapFetcher
from asyncloader.workers.fetch.sample import SampleMaker


class Plain(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index * 10

    def __len__(self) -> int:
        return 100


class Async(Dataset[Any]):
    """Counts how many samples are awaited at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.cancelled: list[int] = []
        self.turns = 3
        self.begun = asyncio.Event()

    def __len__(self) -> int:
        return 100

    async def __getitem__(self, index: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == 2:
            self.begun.set()
        try:
            # The later the index, the earlier it is ready.
            for _ in range(self.turns + 20 - min(index, 20)):
                await asyncio.sleep(0)
            return index * 10
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise
        finally:
            self.now -= 1


class AsyncBatched(Dataset[Any]):
    async def __getitems__(self, indices: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [-index for index in indices]


class Failing(Async):
    async def __getitem__(self, index: int) -> int:
        if index == 3:
            await asyncio.sleep(0)
            raise KeyError(index)
        await asyncio.get_running_loop().create_future()
        raise AssertionError


class FailsAt3(Async):
    async def __getitem__(self, index: int) -> int:
        if index == 3:
            raise KeyError(index)
        return await super().__getitem__(index)


def fetcher(dataset: Any, *, auto: bool = True, concurrency: int = 256) -> AsyncMapFetcher:
    return AsyncMapFetcher(SampleMaker(dataset, asynchronous=True), auto, lambda data: data, concurrency)


async def test_samples_come_in_the_order_of_their_indices() -> None:
    """The order of the batch is that of the indices, whichever sample is ready first."""
    assert await fetcher(Async()).fetch_async([5, 1, 19, 0]) == [50, 10, 190, 0]


@pytest.mark.parametrize("concurrency", [1, 3, 256])
async def test_concurrency_is_bounded_and_used(concurrency: int) -> None:
    """Exactly the allowed number of samples is awaited at a time, over all batches of the worker."""
    dataset = Async()
    f = fetcher(dataset, concurrency=concurrency)
    batches = await asyncio.gather(f.fetch_async(list(range(8))), f.fetch_async(list(range(8, 16))))
    assert list(batches) == [[i * 10 for i in range(8)], [i * 10 for i in range(8, 16)]]
    assert dataset.most == min(concurrency, 16)


async def test_single_sample_without_batching() -> None:
    """Without automatic batching the index is fetched as it is."""
    assert await fetcher(Async(), auto=False).fetch_async(7) == 70
    assert await fetcher(Plain(), auto=False).fetch_async(7) == 70


async def test_getitems_is_asked_once_for_the_batch() -> None:
    """An async `__getitems__` gets the complete list."""
    assert await fetcher(AsyncBatched()).fetch_async([1, 2]) == [-1, -2]


@pytest.mark.parametrize(
    "dataset",
    [Subset(Async(), range(4, 20)), ConcatDataset([Plain(), Async()]), Subset(ConcatDataset([Async()]), range(4, 20))],
    ids=["subset", "concat", "subset of concat"],
)
async def test_views_of_async_datasets(dataset: Any) -> None:
    """torch's views over an async dataset work, with their own indices."""
    expected = [dataset[i] for i in (0, 1)]
    expected = [await e if asyncio.iscoroutine(e) else e for e in expected]
    assert await fetcher(dataset).fetch_async([0, 1]) == expected


async def test_first_error_is_raised_alone() -> None:
    """A failing sample ends the batch with its own error, not with a group of errors."""
    with pytest.raises(KeyError) as caught:
        await fetcher(Failing()).fetch_async([1, 2, 3, 4])
    assert caught.value.args == (3,)


async def test_first_error_cancels_the_others() -> None:
    """Samples that were running when another failed are cancelled and can clean up."""
    dataset = FailsAt3()
    with pytest.raises(KeyError):
        await fetcher(dataset).fetch_async([1, 2, 3])
    assert sorted(dataset.cancelled) == [1, 2]
    assert dataset.now == 0


@pytest.mark.parametrize("view", [False, True], ids=["dataset", "subset"])
async def test_error_with_samples_still_waiting_for_their_turn(view: bool) -> None:
    """Samples that never started cause no warning about a coroutine that was never awaited."""

    class Late(Async):
        async def __getitem__(self, index: int) -> int:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise KeyError(index)

    dataset: Any = Subset(Late(), range(10)) if view else Late()
    with pytest.raises(KeyError):
        await fetcher(dataset, concurrency=1).fetch_async([0, 1, 2])
    gc.collect()  # a forgotten coroutine would warn here, and a warning is an error


async def test_cancelling_a_fetch_cancels_its_samples() -> None:
    """A task that is dropped (a new epoch, the end) leaves no sample running."""
    dataset = Async()
    dataset.turns = 10**6
    task = asyncio.ensure_future(fetcher(dataset).fetch_async([1, 2]))
    await dataset.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert dataset.now == 0


async def test_concurrency_is_free_again_after_an_error() -> None:
    """A failed batch gives its permits back."""
    f = fetcher(FailsAt3(), concurrency=1)
    for _ in range(3):
        with pytest.raises(KeyError):
            await f.fetch_async([3, 1])
    assert await f.fetch_async([1, 2]) == [10, 20]
