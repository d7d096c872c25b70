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
    """The later the index, the earlier it is ready."""

    def __len__(self) -> int:
        return 100

    async def __getitem__(self, index: int) -> int:
        for _ in range(23 - min(index, 20)):
            await asyncio.sleep(0)
        return index * 10


def fetcher(dataset: Any, *, auto: bool = True, concurrency: int = 256) -> AsyncMapFetcher:
    return AsyncMapFetcher(SampleMaker(dataset, asynchronous=True), auto, lambda data: data, concurrency)


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
