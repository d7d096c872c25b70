"""A cancelled `__anext__` loses no batch, wherever it was: the next call returns the batch that it would have given."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, WorkerDied
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Numbers, Sized
from tests.helpers.running import PATIENCE_S, cancelled_after, collect, run_async

pytestmark = pytest.mark.loops

SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "no workers": (Numbers(60), {"num_workers": 0}),
    "no workers, async": (AsyncNumbers(60), {"num_workers": 0}),
    "two workers": (Numbers(60), {"num_workers": 2}),
    "async, two workers": (AsyncNumbers(60), {"num_workers": 2}),
    "one ahead": (Numbers(60), {"num_workers": 1, "prefetch_factor": 1}),
    "large": (Sized([3 << 20] * 30), {"num_workers": 2}),
    "timeout": (Numbers(60), {"num_workers": 2, "timeout": PATIENCE_S}),
    "shuffled": (Numbers(60), {"num_workers": 2, "shuffle": True}),
}


async def cancelled_often(batches: Any, kept: list[Any]) -> int:
    """Iterate to the end; before taking each batch, cancel `__anext__` after 0, 1, 2, 3 turns of the loop."""
    cancelled = 0
    while True:
        for turns in range(4):
            task = asyncio.ensure_future(anext(batches, None))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                batch = await task
            except asyncio.CancelledError:
                cancelled += 1
                continue
            break
        else:
            batch = await anext(batches, None)
        if batch is None:
            return cancelled
        kept.append(batch)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("name", SOURCES)
def test_cancelled_at_every_await(kind: str, name: str) -> None:
    """Cancelled again and again, while starting, waiting and copying: every batch is delivered once and in order."""
    dataset, options = SOURCES[name]

    async def run() -> tuple[int, list[Any]]:
        torch.manual_seed(7)
        kept: list[Any] = []
        async with AsyncDataLoader[Any](dataset, batch_size=2, **options) as loader:
            cancelled = await cancelled_often(aiter(loader), kept)
        return cancelled, kept

    cancelled, got = run_async(run(), kind)
    assert cancelled > 0
    twin = Numbers(60) if isinstance(dataset, AsyncNumbers) else dataset
    assert_same(got, collect("torch", twin, batch_size=2, **{**options, "timeout": 0}))


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_cancelled_during_large_copies(kind: str) -> None:
    """Batches that are copied in a thread, because the consumer keeps every batch, survive cancellation too."""

    async def run() -> tuple[int, float, list[Any]]:
        kept: list[Any] = []
        async with AsyncDataLoader[Any](Sized([2 << 20] * 40), num_workers=1, batch_size=1) as loader:
            cancelled = await cancelled_often(aiter(loader), kept)
            copies = loader.stats()["data/ring_copies"]
        return cancelled, copies, kept

    cancelled, copies, got = run_async(run(), kind)
    assert copies > 10
    assert cancelled > 0
    assert [int(batch[0, -1]) for batch in got] == list(range(40))


@pytest.mark.thorough
async def test_cancelled_start_goes_on() -> None:
    """The first call is cancelled while the workers start (spawned, in a thread); the second gets the first batch."""
    async with AsyncDataLoader[Any](Numbers(4), num_workers=1, multiprocessing_context="spawn") as loader:
        batches = aiter(loader)
        await cancelled_after(3, anext(batches))
        assert [float(batch[0, 0]) async for batch in batches] == [0.0, 100.0, 200.0, 300.0]


async def test_wait_for_that_expires_loses_nothing() -> None:
    """A deadline around `anext` may pass; a later call returns the batch."""
    opened = asyncio.Event()

    class Waits(Numbers):
        async def __getitem__(self, index: int) -> Any:
            if index == 1:
                await opened.wait()
            return super().__getitem__(index)

    async with AsyncDataLoader[Any](Waits(3)) as loader:
        batches = aiter(loader)
        assert float((await anext(batches))[0, 0]) == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(batches), 0.01)
        opened.set()
        assert [float(batch[0, 0]) async for batch in batches] == [100.0, 200.0]


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("size", [10, 2 << 20])
@pytest.mark.parametrize("workers", [0, 2])
def test_several_consumers_of_one_iterator(kind: str, size: int, workers: int) -> None:
    """Tasks that share an iterator get each batch once, and all of these tasks finish."""

    async def consume(batches: Any, kept: list[int]) -> None:
        async for batch in batches:
            kept.append(int(batch[0, -1]))
            await asyncio.sleep(0)

    async def run() -> list[list[int]]:
        kept: list[list[int]] = [[] for _ in range(4)]
        async with AsyncDataLoader[Any](Sized([size] * 60), num_workers=workers) as loader:
            batches = aiter(loader)
            async with asyncio.TaskGroup() as group:
                for share in kept:
                    group.create_task(consume(batches, share))
        return kept

    shares = run_async(run(), kind)
    assert sorted(value for share in shares for value in share) == list(range(60))
    assert all(share == sorted(share) for share in shares)


class Stuck(AsyncNumbers):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("workers", [0, 1])
def test_closing_wakes_who_waits(kind: str, workers: int) -> None:
    """`aclose` while another task waits in `anext`: that call raises an error or ends the epoch, and does not hang."""

    async def run() -> None:
        async with AsyncDataLoader[Any](Stuck(3), num_workers=workers) as loader:
            batches = aiter(loader)
            waiting = asyncio.ensure_future(anext(batches))
            while repr(batches).startswith("<AsyncLoaderIterator new"):  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0)
            await batches.aclose()
            done, _ = await asyncio.wait([waiting], timeout=10)
            assert done, "anext() still waits"
            assert isinstance(waiting.exception(), RuntimeError | asyncio.CancelledError | StopAsyncIteration)

    run_async(run(), kind)


class Sleeper(Numbers):
    """The process that reads index 1 hangs."""

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            threading.Event().wait()
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_failure_is_not_lost_with_a_cancelled_call(kind: str) -> None:
    """A call cancelled while it ends the iterator leaves the error to the next call, which does not raise the end."""

    async def run() -> None:
        loader = AsyncDataLoader[Any](Sleeper(5), num_workers=1, prefetch_factor=1)
        batches: Any = aiter(loader)
        await anext(batches)
        os.kill(batches.pool.processes[0].pid, signal.SIGKILL)
        await batches._queue.wait()
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(WorkerDied):
            await anext(batches)
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        await loader.aclose()

    run_async(run(), kind)
