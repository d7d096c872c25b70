"""Lives of asynchronous iterators: break, close, `async with`, several at a time, several event loops."""

from __future__ import annotations

import asyncio
import errno
import gc
import multiprocessing
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed
from asyncloader.workers.pool import WorkerPool
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers, Pids
from tests.helpers.running import Deaths, collect, run_async

pytestmark = pytest.mark.loops

LOOPS = ["asyncio", "uvloop"]


async def test_break_frees_the_workers_at_once() -> None:
    """Leaving the loop with `break` ends the worker processes without a further call, while the loader lives."""
    loader = AsyncDataLoader[Any](Pids(100), num_workers=2)
    pids = set()
    deaths = Deaths([])
    async for batch in loader:
        pids.add(int(batch[0]))
        if len(pids) == 2:
            deaths = Deaths(pids)
            break
    assert deaths.fds
    await asyncio.to_thread(deaths.wait)


async def test_break_from_a_persistent_loader_keeps_the_workers() -> None:
    """With persistent workers the next iterator gets the same processes, for a new epoch."""
    async with AsyncDataLoader[Any](Pids(40), num_workers=2, persistent_workers=True) as loader:
        pids = []
        for _ in range(3):
            seen = set()
            async for batch in loader:
                seen.add(int(batch[0]))
                if len(seen) == 2:
                    break
            pids.append(seen)
        assert pids[0] == pids[1] == pids[2]
        deaths = Deaths(pids[0])
    assert deaths.ended()  # `async with` has waited for them
    deaths.close()


async def test_aclose_ends_the_workers_before_it_returns() -> None:
    """`aclose()` of iterator and loader returns when the processes have exited; both may be called twice."""
    loader = AsyncDataLoader[Any](Pids(100), num_workers=1)
    batches = aiter(loader)
    deaths = Deaths([int((await anext(batches))[0])])
    await batches.aclose()
    await batches.aclose()
    assert deaths.ended()
    deaths.close()
    with pytest.raises(LoaderClosed):
        await anext(batches)
    batches = aiter(loader)
    with Deaths([int((await anext(batches))[0])]) as deaths:
        await loader.aclose()
        await loader.aclose()
        assert deaths.ended()
    with pytest.raises(LoaderClosed, match="closed; make a new loader"):
        aiter(loader)
    with pytest.raises(LoaderClosed):
        await anext(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_plain_close_and_with(workers: int) -> None:
    """`with` and `close()` work where nothing can be awaited, inside a loop and after it."""

    async def take(loader: AsyncDataLoader[Any]) -> tuple[Any, int]:
        batches = aiter(loader)
        return batches, int((await anext(batches))[0])

    with AsyncDataLoader[Any](Pids(9), num_workers=workers, persistent_workers=bool(workers)) as loader:
        batches, pid = run_async(take(loader))
        deaths = Deaths([pid] if workers else [])
    assert deaths.ended()
    deaths.close()
    loader.close()
    with pytest.raises(LoaderClosed):
        aiter(loader)
    del batches

    async def closes_inside() -> None:
        with AsyncDataLoader[Any](Pids(9), num_workers=workers) as loader:
            async for _ in loader:
                break

    run_async(closes_inside())


@pytest.mark.parametrize("workers", [0, 1])
async def test_exhausted_iterator_stays_exhausted(workers: int) -> None:
    """After its end an iterator raises StopAsyncIteration each time, and its workers have exited."""
    batches = aiter(AsyncDataLoader[Any](Numbers(3), num_workers=workers))
    assert len([batch async for batch in batches]) == 3
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_several_iterators_at_a_time(kind: str, options: dict[str, Any]) -> None:
    """Iterators of one loader run concurrently, each over the whole dataset, each with workers of its own."""

    async def one(loader: AsyncDataLoader[Any]) -> list[Any]:
        got = []
        async for batch in loader:
            got.append(batch)
            await asyncio.sleep(0)
        return got

    async def run() -> list[list[Any]]:
        async with AsyncDataLoader[Any](Numbers(40), batch_size=3, **options) as loader:
            return await asyncio.gather(*[one(loader) for _ in range(3)])

    expected = collect("torch", Numbers(40), batch_size=3)
    for got in run_async(run(), kind):
        assert_same(got, expected)


@pytest.mark.parametrize("kind", LOOPS)
def test_an_iterator_left_behind_by_its_loop(kind: str) -> None:
    """`asyncio.run` returns with an iterator still alive: deleting it afterwards ends the workers."""

    async def leave() -> Any:
        batches = aiter(AsyncDataLoader[Any](Pids(50), num_workers=1))
        return batches, int((await anext(batches))[0])

    batches, pid = run_async(leave(), kind)
    deaths = Deaths([pid])
    del batches
    deaths.wait()


def test_an_iterator_is_of_one_loop() -> None:
    """An iterator used in a second event loop raises a clear error, or continues; it never hangs or loses batches."""
    loader = AsyncDataLoader[Any](Numbers(10), num_workers=1)
    batches = aiter(loader)

    async def take() -> float:
        return float((await anext(batches))[0, 0])

    assert run_async(take()) == 0
    try:
        assert [run_async(take()) for _ in range(9)] == [100.0 * i for i in range(1, 10)]
    except RuntimeError as error:
        assert "loop" in str(error)  # noqa: PT017 - either outcome will do
    finally:
        loader.close()


async def test_iterators_start_nothing_before_the_first_anext() -> None:
    """`aiter` draws random numbers, as torch's `iter` does, but starts no process."""
    before = torch.get_rng_state()
    batches = aiter(AsyncDataLoader[Any](Numbers(10), num_workers=2, shuffle=True))
    assert not multiprocessing.active_children()
    assert not torch.equal(torch.get_rng_state(), before)
    del batches


class Failing(Numbers):
    """The third sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise ValueError("the third")
        return super().__getitem__(index)


class Marker:
    """Stands for an object in a consumer's frame."""


@pytest.mark.parametrize("workers", [0, 1])
async def test_an_error_that_was_caught_holds_nothing(workers: int) -> None:
    """When the error is deleted, the frames that it passed and their objects are freed, without garbage collection."""

    async def consume(_: Marker) -> None:
        async with AsyncDataLoader[Any](Failing(5), num_workers=workers) as loader:
            with pytest.raises(ValueError, match="the third"):
                async for _batch in loader:
                    pass

    marker = Marker()
    held = weakref.ref(marker)
    gc.disable()
    try:
        await consume(marker)
        del marker
        await asyncio.sleep(0)  # the callback that woke this task holds the future, which holds the error
        assert held() is None
    finally:
        gc.enable()


async def test_close_during_the_start() -> None:
    """`close` does not wait for workers that are being started in a thread: they end as soon as they have started."""
    loader = AsyncDataLoader[Any](Numbers(4), num_workers=1, multiprocessing_context="forkserver")
    batches: Any = aiter(loader)
    waiting = asyncio.ensure_future(anext(batches))
    for _ in range(3):
        await asyncio.sleep(0)
    loader.close()
    with pytest.raises(LoaderClosed, match="was closed"):
        await waiting
    assert batches.pool is None


def test_an_error_while_the_pipeline_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterator raises the error each time: an epoch that could not begin is not an empty one. Another begins it."""

    def refused(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WorkerPool, "attach", refused)

    async def run() -> None:
        async with AsyncDataLoader[Any](Numbers(4), num_workers=1) as loader:
            batches = aiter(loader)
            with pytest.raises(OSError, match="No space left"):
                await anext(batches)
            with pytest.raises(OSError, match="No space left"):
                await anext(batches)

    run_async(run())
    with DataLoader[Any](Numbers(4), num_workers=1) as loader:
        batches = iter(loader)
        with pytest.raises(OSError, match="No space left"):
            next(batches)
        with pytest.raises(OSError, match="No space left"):
            next(batches)
        monkeypatch.undo()
        assert len(list(loader)) == 4


class Draws(Dataset[float]):
    """Each sample is a random number of its worker."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


async def test_two_iterators_that_begin_before_either_starts() -> None:
    """Only one iterator continues with the persistent workers. The workers of the other iterator draw new numbers, not
    those of the first epoch again.
    """
    async with AsyncDataLoader[Any](Draws(), num_workers=1, persistent_workers=True) as loader:
        first = [float(batch) async for batch in loader]
        several = [aiter(loader), aiter(loader)]
        drawn = [[float(batch) async for batch in batches] for batches in reversed(several)]
        drawn.append([float(batch) async for batch in loader])
    assert len({number for epoch in (first, *drawn) for number in epoch}) == 20
