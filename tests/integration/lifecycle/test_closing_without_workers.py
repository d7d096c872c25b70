"""Iterators without workers that are closed while a call waits, or before the sampler's end, or by another rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH, PATIENCE_S, await_our_threads, cancelled_after, run_async


class Rows(Dataset[Any]):
    """The second sample never comes. `reached` is set when it is awaited, and `tidied` by the end of its clean-up."""

    def __init__(self, event: type[asyncio.Event | threading.Event]) -> None:
        self.reached, self.tidied = event(), event()

    def __len__(self) -> int:
        return 5

    async def __getitem__(self, index: int) -> int:
        if index == 1:
            self.reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                self.tidied.set()
        return index


class Stream:
    """The same as a stream."""

    def __init__(self, event: type[asyncio.Event | threading.Event]) -> None:
        self.rows = Rows(event)
        self.reached, self.tidied = self.rows.reached, self.rows.tidied

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(len(self.rows)):
            yield await self.rows[index]


DATASETS = pytest.mark.parametrize("make", [Rows, Stream])


@DATASETS
def test_closed_by_another_thread(make: Any) -> None:
    """The call that waits raises LoaderClosed once the dataset's clean-up is over, and counts no batch."""
    dataset = make(threading.Event)
    loader = DataLoader[Any](dataset, batch_size=None)
    batches = iter(loader)
    assert next(batches) == 0
    position = loader.state_dict()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, batches)
        assert dataset.reached.wait(PATIENCE_S)
        loader.close()
        with pytest.raises(LoaderClosed, match="was shut down"):
            waiting.result(PATIENCE_S)
    assert dataset.tidied.is_set()
    assert loader.state_dict() == position


@DATASETS
@pytest.mark.parametrize("plainly", [True, False])
async def test_closed_by_another_task(make: Any, plainly: bool) -> None:
    """`close` and `aclose` have the call that waits raise LoaderClosed, which counts no batch."""
    dataset = make(asyncio.Event)
    loader = AsyncDataLoader[Any](dataset, batch_size=None)
    batches: Any = aiter(loader)
    assert await anext(batches) == 0
    position = loader.state_dict()
    waiting = asyncio.ensure_future(anext(batches))
    await dataset.reached.wait()
    if plainly:
        loader.close()
    else:
        await loader.aclose()
        assert dataset.tidied.is_set()
    with pytest.raises(LoaderClosed, match="was closed"):
        await waiting
    await dataset.tidied.wait()
    assert loader.state_dict() == position


@DATASETS
async def test_closed_after_a_call_was_cancelled(make: Any) -> None:
    """`close` cancels the batch that is still pending, and the loop logs no error that was not retrieved."""
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: logged.append(report))
    dataset = make(asyncio.Event)
    loader = AsyncDataLoader[Any](dataset, batch_size=None)
    batches: Any = aiter(loader)
    assert await anext(batches) == 0
    await cancelled_after(20, anext(batches))
    assert dataset.reached.is_set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    loader.close()
    await asyncio.wait(others)
    assert dataset.tidied.is_set()
    del batches
    gc.collect()
    assert not logged


class Tidy:
    """An endless sampler whose clean-up waits. `ends` says how each clean-up ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            while True:
                yield 0
        finally:
            try:
                for _ in range(5):
                    await asyncio.sleep(0)
                self.ends.append("whole")
            except BaseException:
                self.ends.append("cut short")
                raise


class Opens(Numbers):
    """Counts how often its context was left."""

    left = 0

    async def __getitem__(self, index: int) -> Any:
        return index

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left += 1


@pytest.mark.parametrize("dataset", [Numbers(5), Opens(5)], ids=["blocking", "async"])
@pytest.mark.parametrize("drop", [True, False])
def test_the_samplers_clean_up_is_waited_for(dataset: Any, drop: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A sampler's generator is closed before the loop ends, whether the iterator is dropped or closed."""
    sampler = Tidy()
    loader = DataLoader[Any](dataset, sampler=sampler, batch_size=None)
    batches = iter(loader)
    next(batches)
    if drop:
        del batches
        await_our_threads()
    loader.close()
    assert sampler.ends == ["whole"]
    assert not caplog.records


class OtherRank:
    """An agreement in which another rank has one batch."""

    def __init__(self) -> None:
        self.steps = 0

    def batch(self) -> bool:
        self.steps += 1
        return self.steps == 1

    def end(self) -> None:
        pass

    def give_up(self) -> None:
        pass


@pytest.mark.parametrize("kind", BOTH)
def test_the_end_by_another_rank_closes_all(kind: str) -> None:
    """When another rank ends the epoch, context and sampler are closed within `next`, and nothing is fetched again."""
    dataset, sampler, other = Opens(5), Tidy(), OtherRank()

    def check() -> None:
        assert (dataset.left, sampler.ends, other.steps) == (1, ["whole"], 2)

    if kind == "sync":
        with DataLoader[Any](dataset, sampler=sampler) as loader:
            batches: Any = iter(loader)
            batches._epoch.agreement = other
            assert len(list(batches)) == 1
            check()
            assert next(batches, None) is None
            check()
    else:

        async def run() -> None:
            async with AsyncDataLoader[Any](dataset, sampler=sampler) as loader:
                batches: Any = aiter(loader)
                batches._epoch.agreement = other
                assert len([batch async for batch in batches]) == 1
                check()
                assert await anext(batches, None) is None
                check()

        run_async(run())


class Entered(Rows):
    """Rows whose context takes several turns of the loop to exit."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _turn in range(20):
            await asyncio.sleep(0)
        self.tidied.set()

    async def __getitem__(self, index: int) -> int:
        return index


class EnteredStream(Entered):
    """The same as a stream."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(len(self)):
            yield index


@pytest.mark.parametrize("make", [Entered, EnteredStream])
async def test_left_after_a_break(make: Any) -> None:
    """The end of `async with` waits for the dataset's context, also where a `break` has dropped the iterator."""
    dataset = make(asyncio.Event)
    async with AsyncDataLoader[Any](dataset, batch_size=None) as loader:
        async for _ in loader:
            break
    assert dataset.tidied.is_set()
