"""Datasets whose methods are awaited: concurrent within a worker, in order at the consumer, on every loader."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, AsyncStream, AsyncWholeBatches, BothStreams, Numbers
from tests.helpers.running import BOTH, KINDS, assert_like_torch, collect, outcomes, run_async

WORKERS = [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": None}, {"sampler": [3, 1, 3], "batch_size": 2}], ids=str
)
def test_async_getitem(kind: str, workers: int, options: dict[str, Any]) -> None:
    """`async def __getitem__` gives the batches of a plain dataset with the same samples."""
    got = collect(kind, AsyncNumbers(10), num_workers=workers, **options)
    assert_same(got, collect("torch", Numbers(10), **options))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_async_getitems(kind: str, workers: int) -> None:
    """`async def __getitems__` is awaited with all indices of the batch."""
    got = collect(kind, AsyncWholeBatches(10), num_workers=workers, batch_size=4)
    assert_same(got, collect("torch", Numbers(10), batch_size=4))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_views_of_an_async_dataset(kind: str, workers: int) -> None:
    """torch's Subset and ConcatDataset around async datasets are read like async datasets, also nested."""
    dataset: Any = ConcatDataset([Subset(AsyncNumbers(6), [5, 0, 1]), AsyncNumbers(2), Numbers(2)])
    twin: Any = ConcatDataset([Subset(Numbers(6), [5, 0, 1]), Numbers(2), Numbers(2)])
    for one, other in ((dataset, twin), (Subset(AsyncNumbers(6), [5, 0]), Subset(Numbers(6), [5, 0]))):
        got = collect(kind, one, num_workers=workers, batch_size=2)
        assert_same(got, collect("torch", other, batch_size=2))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}], ids=str
)
@pytest.mark.parametrize("make", [AsyncStream, BothStreams])
def test_async_streams(kind: str, make: Any, options: dict[str, Any]) -> None:
    """`__aiter__` streams: each worker reads its own copy; batches have torch's order, also with uneven lengths."""
    for workers, lengths in ((0, [7]), (1, [8]), (2, [3, 14]), (2, [0, 5])):
        got = collect(kind, make(lengths), num_workers=workers, **options)
        twin = _PlainStream(lengths)
        assert_same(got, collect("torch", twin, num_workers=workers, **options))


class _PlainStream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return (torch.tensor([worker, i]) for i in range(self.lengths[worker]))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_of_an_async_dataset(kind: str, workers: int) -> None:
    """Shuffled epochs, with persistent workers where there are workers: order and generators afterwards are torch's."""
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "num_workers": workers}
    assert_like_torch(kind, AsyncNumbers(50), twin=Numbers(50), epochs=3, persistent_workers=bool(workers), **options)


class InFlight(Dataset[Any]):
    """Each sample is the highest number of samples that were in flight together so far."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def __len__(self) -> int:
        return 30

    async def __getitem__(self, index: int) -> int:
        self.now += 1
        self.peak = max(self.peak, self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1
        return self.peak


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_bounds_samples_in_flight(kind: str, workers: int, concurrency: int) -> None:
    """`concurrency` is the number of samples that a worker awaits at a time, over all of its batches."""
    got = collect(kind, InFlight(), batch_size=10, num_workers=workers, concurrency=concurrency)
    assert max(int(batch.max()) for batch in got) == concurrency


class Cancelled(Dataset[Any]):
    """One sample fails; the others of its batch note that they were cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def __len__(self) -> int:
        return 4

    async def __getitem__(self, index: int) -> int:
        if index == 1:
            raise FileNotFoundError("sample 1")
        if index < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return self.cancelled


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_first_error_cancels_the_rest_of_its_batch(kind: str, workers: int) -> None:
    """The error is raised alone (no group), and the siblings are cancelled rather than left running."""
    dataset = Cancelled()
    failed, rest = outcomes(kind, dataset, batch_size=2, num_workers=workers)
    assert failed[0] is FileNotFoundError
    assert "sample 1" in failed[1]
    assert rest.tolist() in ([0, 0], [1, 1])  # the next batch is in flight at that time
    assert workers or dataset.cancelled == 1


async def test_without_workers_it_runs_on_the_running_loop() -> None:
    """A dataset that is awaited without workers runs on the consumer's own loop."""
    here = asyncio.get_running_loop()

    class Loops(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        async def __getitem__(self, index: int) -> bool:
            return asyncio.get_running_loop() is here

    async with AsyncDataLoader[Any](Loops()) as loader:
        assert [bool(batch) async for batch in loader] == [True, True]


variable: contextvars.ContextVar[int] = contextvars.ContextVar("v", default=-1)


class Uses(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    async def __getitem__(self, index: int) -> Any:
        before = variable.get()
        variable.set(index)
        await asyncio.sleep(0)
        return before, variable.get()


def test_context_variables_are_each_samples_own() -> None:
    """A context variable set for one sample is not seen by another."""
    with DataLoader[Any](Uses(), batch_size=3, num_workers=1) as loader:
        assert [[pair.tolist() for pair in batch] for batch in loader] == [
            [[-1, -1, -1], [0, 1, 2]],
            [[-1, -1, -1], [3, 4, 5]],
        ]


class Stuck(AsyncNumbers):
    async def __getitem__(self, index: int) -> Any:
        if index:
            await asyncio.Event().wait()
        return await super().__getitem__(index)


def test_closing_does_not_wait_for_slow_samples() -> None:
    """Leaving the loop while samples wait for ever cancels these samples."""

    async def run() -> None:
        async with AsyncDataLoader[Any](Stuck(5), num_workers=2) as loader:
            async for _ in loader:
                break

    run_async(run())
    for workers in (0, 2):
        with DataLoader[Any](Stuck(5), num_workers=workers) as loader:
            next(iter(loader))
