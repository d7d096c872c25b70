"""Samplers that are awaited: read ahead as far as credits allow, with their errors and lengths."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, Sampler

from asyncloader import AsyncDataLoader, AsyncSampler, DataLoader, LoaderClosed
from asyncloader.samplers.async_sampler import is_async_sampler
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Numbers
from tests.helpers.running import BOTH, KINDS, PATIENCE_S, Deaths, collect, outcomes, run_async


class Ticking:
    """Gives ``range(n)`` asynchronously; counts the values given and the runs of its `finally`."""

    def __init__(self, n: int, fails_at: int | None = None, groups: int | None = None) -> None:
        self.n = n
        self.fails_at = fails_at
        self.groups = groups
        self.given = 0
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            for i in range(self.n):
                await asyncio.sleep(0)
                if i == self.fails_at:
                    raise ConnectionResetError("the sampler's server is gone")
                self.given += 1
                yield i if self.groups is None else list(range(i * self.groups, (i + 1) * self.groups))
        finally:
            self.closed += 1


class Counted(Ticking):
    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dataset", [Numbers(10), AsyncNumbers(10)], ids=["blocking", "async"])
def test_async_sampler(kind: str, workers: int, dataset: Any) -> None:
    """An async iterable as `sampler` is batched like a plain iterable, with blocking and async datasets."""
    for options in ({"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}):
        sampler = Ticking(10)
        got = collect(kind, dataset, sampler=sampler, num_workers=workers, **options)
        assert_same(got, collect("torch", Numbers(10), **options))
        assert sampler.closed == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_async_batch_sampler(kind: str, workers: int) -> None:
    """An async iterable as `batch_sampler` gives whole batches, and is started again in each epoch."""
    sampler = Ticking(5, groups=2)
    expected = collect("torch", Numbers(10), batch_size=2)
    options: dict[str, Any] = {"batch_sampler": sampler, "num_workers": workers}
    assert_same(collect(kind, Numbers(10), **options), expected)
    assert_same(collect(kind, Numbers(10), persistent_workers=bool(workers), **options), expected)
    assert (sampler.given, sampler.closed) == (10, 2)


@pytest.mark.parametrize("kind", BOTH)
def test_async_sampler_inside_torchs_batch_sampler(kind: str) -> None:
    """An async sampler works inside torch's BatchSampler."""
    sampler: Any = BatchSampler(Ticking(7), 3, drop_last=False)  # type: ignore[arg-type]
    got = collect(kind, Numbers(7), batch_sampler=sampler, num_workers=1)
    assert_same(got, collect("torch", Numbers(7), batch_size=3))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_errors_come_after_the_batches_before_them(kind: str, workers: int) -> None:
    """The sampler's error reaches the consumer unchanged, after all batches that the sampler gave before."""
    got = outcomes(
        kind,
        Numbers(20),
        batch_sampler=Ticking(9, fails_at=5, groups=2),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    error = (ConnectionResetError, "the sampler's server is gone")
    assert_same(got[:5], collect("torch", Numbers(10), batch_size=2))
    assert got[5] == error


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
def test_lengths(make: Any) -> None:
    """`len(loader)` follows the sampler's length, if it has one."""
    assert len(make(Numbers(10), sampler=Counted(10), batch_size=4)) == 3
    assert len(make(Numbers(10), sampler=Counted(10), batch_size=4, drop_last=True)) == 2
    assert len(make(Numbers(10), sampler=Counted(10), batch_size=None)) == 10
    assert len(make(Numbers(10), batch_sampler=Counted(5, groups=2))) == 5
    for options in ({"sampler": Ticking(10)}, {"batch_sampler": Ticking(5)}):
        with pytest.raises(TypeError):
            len(make(Numbers(10), **options))


class Derived(Ticking, Sampler[int]):
    """Has the `__iter__` of torch's base class, which is not implemented."""


class Both(Ticking):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_only_what_cannot_be_read_plainly_is_async() -> None:
    """A sampler that can be iterated both ways is read plainly, as torch reads it; a list is no async sampler."""
    assert is_async_sampler(Ticking(1))
    assert is_async_sampler(Derived(1))
    assert not is_async_sampler(Both(1))
    assert not is_async_sampler([1, 2])
    assert not is_async_sampler(Ticking)
    assert isinstance(Ticking(1), AsyncSampler)
    assert not isinstance([1], AsyncSampler)


class Endless:
    """Never ends. `given` counts its batches; `closed` is set when its generator ends."""

    def __init__(self) -> None:
        self.given = 0
        self.closed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while True:
                self.given += 1
                yield [self.given % 10]
        finally:
            self.closed.set()


@pytest.mark.parametrize(("workers", "factor"), [(1, 1), (2, 3)])
async def test_read_ahead_is_bounded_by_credits(workers: int, factor: int) -> None:
    """An endless sampler is read at most ``prefetch_factor * num_workers`` batches ahead of the consumer."""
    sampler = Endless()
    async with AsyncDataLoader[Any](
        Numbers(10), batch_sampler=sampler, num_workers=workers, prefetch_factor=factor
    ) as loader:
        taken = 0
        batches = aiter(loader)
        async for _ in batches:
            taken += 1
            assert sampler.given <= taken + workers * factor
            if taken == 50:
                break
        await batches.aclose()
        await sampler.closed.wait()


async def test_sampler_that_waits_for_the_consumer() -> None:
    """A sampler may wait for feedback on its batches: they are delivered before the sampler is advanced again."""
    seen = asyncio.Semaphore(0)

    class Feedback:
        async def __aiter__(self) -> AsyncIterator[list[int]]:
            for i in range(5):
                yield [i]
                await seen.acquire()

    order = []
    async with AsyncDataLoader[Any](Numbers(5), batch_sampler=Feedback(), num_workers=2) as loader:
        async for batch in loader:
            order.append(float(batch[0, 0]))
            seen.release()
    assert order == [0.0, 100.0, 200.0, 300.0, 400.0]


@pytest.mark.parametrize("workers", [0, 1])
async def test_break_closes_the_sampler(workers: int) -> None:
    """Leaving the loop early and closing the iterator ends the sampler's generator: its `finally` has run."""
    sampler = Ticking(100)
    async with AsyncDataLoader[Any](Numbers(100), sampler=sampler, num_workers=workers) as loader:
        batches = aiter(loader)
        async for _ in batches:
            break
        await batches.aclose()
        assert sampler.closed == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_break_closes_the_sampler_of_the_facade(workers: int) -> None:
    """Closing the sync facade ends the sampler's generator, which runs in the facade's private loop."""
    sampler = Ticking(100)
    with DataLoader[Any](Numbers(100), sampler=sampler, num_workers=workers) as loader:
        for _ in loader:
            break
    assert sampler.closed == 1


def test_a_waiting_sampler_does_not_hold_up_the_end() -> None:
    """Closing cancels a sampler that waits for ever."""

    class Stuck:
        cancelled = False

        async def __aiter__(self) -> AsyncIterator[list[int]]:
            yield [0]
            try:
                await asyncio.Event().wait()
            finally:
                Stuck.cancelled = True

    async def run() -> None:
        async with AsyncDataLoader[Any](Numbers(3), batch_sampler=Stuck(), num_workers=1) as loader:
            async for _ in loader:
                break

    run_async(run())
    assert Stuck.cancelled
    Stuck.cancelled = False
    with DataLoader[Any](Numbers(3), batch_sampler=Stuck(), num_workers=1) as loader:
        next(iter(loader))
    assert Stuck.cancelled


class GivesFunction:
    """The third index cannot be sent to a worker. `ends` says how each clean-up ended, which takes longer than the
    workers' end.
    """

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            for index in (0, 1, lambda: 2, 3):
                yield index
                await asyncio.sleep(0)
        finally:
            try:
                await asyncio.sleep(0.2)
                self.ends.append("whole")
            except BaseException:
                self.ends.append("cut short")
                raise


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_cannot_be_sent_does_not_cut_the_clean_up_short(kind: str) -> None:
    """The loader waits for the sampler's clean-up also if an index of it has ended the epoch."""
    sampler = GivesFunction()
    # Python 3.14 raises the other one.
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        collect(kind, Numbers(4), sampler=sampler, batch_size=None, num_workers=1)
    assert sampler.ends == ["whole"]


@pytest.mark.parametrize("plainly", [True, False])
async def test_a_waiting_sampler_without_workers_does_not_hold_up_the_end(plainly: bool) -> None:
    """Closing cancels a sampler that waits for ever in a call of `anext`, also beside a blocking dataset."""
    reached = asyncio.Event()

    class Stuck:
        async def __aiter__(self) -> AsyncIterator[list[int]]:
            yield [0]
            reached.set()
            await asyncio.Event().wait()

    loader = AsyncDataLoader[Any](Numbers(3), batch_sampler=Stuck())
    batches: Any = aiter(loader)
    await anext(batches)
    waiting = asyncio.ensure_future(anext(batches))
    await reached.wait()
    async with asyncio.timeout(PATIENCE_S):
        if plainly:
            loader.close()
        else:
            await loader.aclose()
        with pytest.raises(LoaderClosed, match="was closed"):
            await waiting


async def test_cancelling_the_wait_for_a_sampler_cancels_the_caller() -> None:
    """`aclose` waits for the sampler's `finally`. Cancelling that wait raises CancelledError in the caller and cancels
    the `finally`; the workers have exited nevertheless.
    """
    reached, broken_off = asyncio.Event(), asyncio.Event()

    class Tidy:
        async def __aiter__(self) -> AsyncIterator[list[int]]:
            try:
                yield [0]
                await asyncio.Event().wait()
            finally:
                reached.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    broken_off.set()

    loader = AsyncDataLoader[Any](Numbers(3), batch_sampler=Tidy(), num_workers=1)
    batches: Any = aiter(loader)
    await anext(batches)
    with Deaths([process.pid for process in batches.pool.processes]) as deaths:
        closing = asyncio.ensure_future(batches.aclose())
        await reached.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert deaths.ended()
    await broken_off.wait()
