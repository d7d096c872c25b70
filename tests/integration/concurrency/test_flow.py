"""Timeouts, how far workers run ahead, and the order of their batches."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from multiprocessing.synchronize import Semaphore
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, LoaderTimeout
from tests.helpers.running import BOTH, KINDS, run_async


class Gated(Dataset[Any]):
    """Sample `i` waits for its gate; every fetch that begins is counted."""

    def __init__(self, n: int, closed: set[int]) -> None:
        self.n = n
        self.gates: dict[int, Semaphore] = {i: multiprocessing.Semaphore(0) for i in closed}
        self.begun = multiprocessing.Semaphore(0)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.begun.release()
        if index in self.gates:
            self.gates[index].acquire()
        return index

    def wait_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=60)


def patiently(batches: Any) -> int:
    """The next batch, after any number of timeouts: on a busy machine a worker may take long to start and to go on."""
    while True:
        with contextlib.suppress(RuntimeError):
            return int(next(batches))


async def patiently_async(batches: Any) -> int:
    while True:
        with contextlib.suppress(RuntimeError):
            return int(await anext(batches))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["torch", *BOTH])
def test_timeout(kind: str) -> None:
    """A batch that does not arrive in time raises torch's RuntimeError; later calls return it and the rest."""
    dataset = Gated(4, {1})
    text = "DataLoader timed out after 0.2 seconds"
    if kind != "asyncio":
        make = torch.utils.data.DataLoader if kind == "torch" else DataLoader
        batches = iter(make(dataset, num_workers=2, timeout=0.2))
        assert patiently(batches) == 0
        with pytest.raises(RuntimeError, match=text) as caught:
            next(batches)
        dataset.gates[1].release()
        assert [patiently(batches) for _ in range(3)] == [1, 2, 3]
        if kind == "torch":  # the traceback keeps the iterator alive, and torch then may not wait for its worker
            batches._shutdown_workers()  # type: ignore[attr-defined]
    else:

        async def run() -> Any:
            async with AsyncDataLoader[Any](dataset, num_workers=2, timeout=0.2) as loader:
                batches = aiter(loader)
                assert await patiently_async(batches) == 0
                with pytest.raises(RuntimeError, match=text) as caught:
                    await anext(batches)
                dataset.gates[1].release()
                assert [await patiently_async(batches) for _ in range(3)] == [1, 2, 3]
            return caught

        caught = run_async(run())
    if kind != "torch":
        assert isinstance(caught.value, LoaderTimeout)
        assert caught.value.seconds == 0.2


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("workers", "factor"), [(1, 1), (2, 3)])
def test_read_ahead_is_bounded(kind: str, workers: int, factor: int) -> None:
    """``prefetch_factor * num_workers`` batches are fetched ahead, and one more for each batch the consumer takes."""
    dataset = Gated(30, set())
    ahead = workers * factor

    def nothing_more() -> None:
        # No event reports that nothing happens. Were the workers allowed to, they would have begun within this time.
        assert not dataset.begun.acquire(timeout=0.05)

    if kind == "sync":
        batches = iter(DataLoader[Any](dataset, num_workers=workers, prefetch_factor=factor))
        dataset.wait_begun(ahead)
        nothing_more()
        for _ in range(5):
            next(batches)
            dataset.wait_begun(1)
        nothing_more()
        del batches
        return

    async def run() -> None:
        async with AsyncDataLoader[Any](dataset, num_workers=workers, prefetch_factor=factor) as loader:
            batches = aiter(loader)
            for taken in range(1, 6):
                await anext(batches)
                dataset.wait_begun(ahead + 1 if taken == 1 else 1)
            nothing_more()

    run_async(run())


@pytest.mark.parametrize("kind", KINDS)
def test_in_order_waits_for_the_head_of_the_line(kind: str) -> None:
    """in_order=True: a slow first batch holds the others back, and order is kept."""
    dataset = Gated(8, {0})

    def release() -> None:
        dataset.wait_begun(5)  # the other worker's four batches, and the first worker's second batch, which waits
        dataset.gates[0].release()

    if kind == "sync":
        batches = iter(DataLoader[Any](dataset, num_workers=2, prefetch_factor=4))
        release()
        assert [int(batch) for batch in batches] == list(range(8))
        return

    async def run() -> list[int]:
        async with AsyncDataLoader[Any](dataset, num_workers=2, prefetch_factor=4) as loader:
            batches = aiter(loader)
            first = asyncio.ensure_future(anext(batches))
            await asyncio.to_thread(release)
            return [int(await first), *[int(batch) async for batch in batches]]

    assert run_async(run(), kind) == list(range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_order_passes_a_slow_worker(kind: str) -> None:
    """in_order=False: the other worker's batches are delivered while the first worker is stuck."""
    dataset = Gated(8, {0})

    if kind == "sync":
        batches = iter(DataLoader[Any](dataset, num_workers=2, prefetch_factor=1, in_order=False))
        early = [int(next(batches)) for _ in range(4)]
        dataset.gates[0].release()
        late = [int(batch) for batch in batches]
    else:

        async def run() -> tuple[list[int], list[int]]:
            async with AsyncDataLoader[Any](dataset, num_workers=2, prefetch_factor=1, in_order=False) as loader:
                batches = aiter(loader)
                early = [int(await anext(batches)) for _ in range(4)]
                dataset.gates[0].release()
                return early, [int(batch) async for batch in batches]

        early, late = run_async(run(), kind)
    assert 0 not in early
    assert early == sorted(early)
    assert sorted(early + late) == list(range(8))
