"""Awaited samples: concurrent, in the order of their indices, and no sample left running."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from asyncloader.workers.fetch.map_async import AsyncMapFetcher, ConcurrencyLimiter
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


# ---------------------------------------------------------------------------------------------------- the limiter alone


variable: ContextVar[int] = ContextVar("variable", default=-1)


class Samples:
    """Fake samples: each runs until the test sets its future, and records that it started or was cancelled."""

    def __init__(self) -> None:
        self.running: dict[Any, asyncio.Future[Any]] = {}
        self.peak = 0
        self.started: list[Any] = []
        self.cancelled: list[Any] = []

    async def run(self, name: Any) -> Any:
        self.started.append(name)
        future = self.running[name] = asyncio.get_running_loop().create_future()
        self.peak = max(self.peak, len(self.running))
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            del self.running[name]

    async def settle(self) -> None:
        """Run the loop until every task is waiting."""
        for _ in range(6):
            await asyncio.sleep(0)


def batch(samples: Samples, limiter: ConcurrencyLimiter, name: str, count: int) -> asyncio.Task[list[Any]]:
    return asyncio.get_running_loop().create_task(limiter.gather(lambda item, _: samples.run((name, item)), count))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    room=st.integers(1, 7),
    random=st.randoms(use_true_random=False),
)
def test_results_are_in_order_within_the_bound(sizes: list[int], room: int, random: Random) -> None:
    """A batch has its results in order, whichever sample ends first; at most `room` samples run.

    Older batches start first, and no capacity is idle while a sample waits.
    """

    async def run() -> None:
        samples, limiter = Samples(), ConcurrencyLimiter(room)
        tasks = [batch(samples, limiter, str(number), size) for number, size in enumerate(sizes)]
        await samples.settle()
        left = sum(sizes)
        while left:
            assert len(samples.running) == min(room, left)
            name = random.choice(sorted(samples.running))
            samples.running[name].set_result(name)
            left -= 1
            await samples.settle()
        everything = [(str(number), item) for number, size in enumerate(sizes) for item in range(size)]
        assert samples.started == everything
        assert samples.peak <= room
        for number, task in enumerate(tasks):
            assert await task == [(str(number), item) for item in range(sizes[number])]

    asyncio.run(run())


async def test_the_first_error_is_raised_alone() -> None:
    """The other running samples of its batch are cancelled, later ones never start; other batches go on."""
    samples, limiter = Samples(), ConcurrencyLimiter(3)
    reported: list[tuple[int, BaseException]] = []
    failing = asyncio.ensure_future(
        limiter.gather(lambda item, _: samples.run(("a", item)), 5, lambda item, error: reported.append((item, error)))
    )
    other = batch(samples, limiter, "b", 1)
    await samples.settle()
    error = OSError("sample 1")
    samples.running["a", 1].set_exception(error)
    with pytest.raises(OSError, match="sample 1") as raised:
        await failing
    assert raised.value is error
    assert reported == [(1, error)]
    assert samples.cancelled == [("a", 0), ("a", 2)]
    await samples.settle()
    assert ("a", 3) not in samples.started
    samples.running["b", 0].set_result(7)
    assert await other == [7]


async def test_an_error_before_the_coroutine_is_the_samples() -> None:
    """An error that the dataset raises when it is asked for a coroutine fails that sample's batch."""

    def start(item: int, context: Context) -> Coroutine[Any, Any, Any]:
        if item == 1:
            raise KeyError(item)
        return asyncio.sleep(0, item)

    failed: list[int] = []
    with pytest.raises(KeyError):
        await ConcurrencyLimiter(4).gather(start, 3, lambda item, _: failed.append(item))
    assert failed == [1]


async def test_cancelling_waits_for_the_running_samples() -> None:
    """A cancelled batch ends when its samples have ended: `finally` blocks have run and the capacity is free."""
    samples, limiter = Samples(), ConcurrencyLimiter(2)
    task = batch(samples, limiter, "a", 4)
    await samples.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert samples.cancelled == [("a", 0), ("a", 1)]
    assert not samples.running
    after = batch(samples, limiter, "b", 2)
    await samples.settle()
    assert list(samples.running) == [("b", 0), ("b", 1)]
    after.cancel()
    with pytest.raises(asyncio.CancelledError):
        await after


async def test_a_sample_that_is_cancelled_by_itself_is_an_error() -> None:
    """The sample's task was not cancelled from outside, so the batch fails instead of waiting forever."""

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await ConcurrencyLimiter(2).gather(lambda item, context: cancels(), 1)


async def test_each_sample_has_a_context_of_its_own() -> None:
    """A context variable set in one sample is not seen by another; `start` may set it, too."""

    async def sets(item: int) -> tuple[int, int]:
        before = variable.get()
        variable.set(item)
        await asyncio.sleep(0)
        return before, variable.get()

    def start(item: int, context: Context) -> Coroutine[Any, Any, Any]:
        context.run(variable.set, 100 + item)
        return sets(item)

    variable.set(5)
    assert await ConcurrencyLimiter(1).gather(lambda item, _: sets(item), 3) == [(5, 0), (5, 1), (5, 2)]
    assert await ConcurrencyLimiter(1).gather(start, 2) == [(100, 0), (101, 1)]
    assert variable.get() == 5
