"""Samples in flight across batches: `concurrency` in each worker, and in a process without workers.

The datasets here would wait for ever if fewer samples were in flight than is promised.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, Tuning, sample_rng
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Numbers
from tests.helpers.faulty import AsyncFaulty, Faults
from tests.helpers.meeting import Meeting, MeetingBatches
from tests.helpers.running import (
    BOTH,
    KINDS,
    await_our_threads,
    cancelled_after,
    outcomes,
    run_async,
)

WORKERS = [0, 1, 2]


def collect(kind: str, dataset: Any, state: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """All batches of an epoch, beginning at this state."""
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            loader.load_state_dict(state or {})
            return list(loader)

    async def run() -> list[Any]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            loader.load_state_dict(state or {})
            return [batch async for batch in loader]

    return run_async(run(), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("size", [1, 16, 64, None])
def test_so_many_samples_are_in_flight(kind: str, workers: int, size: int | None) -> None:
    """`concurrency` samples of several batches wait for one another; the order is the sampler's."""
    each = 128
    n = each * max(1, workers) * 2
    got = collect(kind, Meeting(n, each), batch_size=size, num_workers=workers, concurrency=each)
    assert torch.tensor([int(i) for batch in got for i in torch.as_tensor(batch).reshape(-1)]).tolist() == list(
        range(n)
    )


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_whole_batches_are_in_flight(kind: str, workers: int) -> None:
    """`async def __getitems__`: the batches that hold `concurrency` samples are in flight, and one batch more."""
    got = collect(kind, MeetingBatches(80, 5), batch_size=4, num_workers=workers, concurrency=16)
    assert torch.cat(got).tolist() == list(range(80))


@pytest.mark.parametrize("kind", BOTH)
def test_seeded_and_shuffled(kind: str) -> None:
    """Seeded mode has the same number in flight, with workers and without, and gives the same batches."""
    options: dict[str, Any] = {"batch_size": 8, "concurrency": 64, "seed": 3, "shuffle": True}
    expected = collect(kind, Numbers(256), batch_size=8, seed=3, shuffle=True)
    indices = [(batch[:, 0] / 100).tolist() for batch in expected]
    for workers in (0, 1):
        got = collect(kind, Meeting(256, 64), num_workers=workers, **options)
        assert [batch.tolist() for batch in got] == indices


class SlowHead(Dataset[Any]):
    """The first sample is done when all other samples are done."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.done = 0
        self.last: asyncio.Event | None = None

    def __len__(self) -> int:
        return self.n

    async def __getitem__(self, index: int) -> int:
        if self.last is None:
            self.last = asyncio.Event()
        if index == 0:
            await self.last.wait()
        self.done += 1
        if self.done == self.n - 1:
            self.last.set()
        return index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_slowest_sample_stops_no_other_batch(kind: str, workers: int) -> None:
    """The first sample of the first batch waits for all samples of all other batches: they are read during that."""
    got = collect(kind, SlowHead(20), batch_size=4, concurrency=16, num_workers=workers)
    assert torch.cat(got).tolist() == list(range(20))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("options", [{}, {"seed": 5}], ids=["torch", "seeded"])
def test_a_state_is_of_what_was_delivered(kind: str, workers: int, options: dict[str, Any]) -> None:
    """However much was read ahead, a resumed loader continues behind the last batch taken."""
    options = {"batch_size": 4, "shuffle": "seed" in options, "num_workers": workers, **options}
    expected = collect(kind, AsyncNumbers(60), **options)
    for stop in (1, 6, 14):
        state = _state_after(kind, AsyncNumbers(60), stop, options)
        got = collect(kind, AsyncNumbers(60), state, **options)
        assert_same(got, expected[stop:])


def _state_after(kind: str, dataset: Any, stop: int, options: dict[str, Any]) -> dict[str, Any]:
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            batches = iter(loader)
            for _ in range(stop):
                next(batches)
            return loader.state_dict()

    async def run() -> dict[str, Any]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            batches = aiter(loader)
            for _ in range(stop):
                await anext(batches)
            return loader.state_dict()

    return run_async(run(), kind)


class Fails(AsyncNumbers):
    """Some samples raise, before earlier samples are done."""

    def __init__(self, n: int, bad: set[int]) -> None:
        super().__init__(n)
        self.bad = bad

    async def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise FileNotFoundError(f"sample {index}")
        await asyncio.sleep(0)
        return index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_comes_in_its_place(kind: str, workers: int) -> None:
    """Batches before a failing batch are delivered before it, later batches when the user goes on."""
    got = outcomes(kind, Fails(24, {9, 10, 20}), batch_size=4, num_workers=workers)
    kinds = [each[0] if isinstance(each, tuple) else each.tolist() for each in got]
    good = [[i, i + 1, i + 2, i + 3] for i in range(0, 24, 4)]
    assert kinds == [*good[:2], FileNotFoundError, *good[3:5], FileNotFoundError]


async def _indices(n: int) -> Any:
    for index in range(n):
        await asyncio.sleep(0)
        yield index


class AsyncSampler:
    def __aiter__(self) -> Any:
        return _indices(96)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_async_samplers_batches_are_in_flight(kind: str, workers: int) -> None:
    """The sampler is awaited in order, while the samples that it gave before are fetched."""
    got = collect(kind, Meeting(96, 32), sampler=AsyncSampler(), batch_size=4, concurrency=32, num_workers=workers)
    assert torch.cat(got).tolist() == list(range(96))


class Large(Dataset[Any]):
    """Samples of four megabytes."""

    def __len__(self) -> int:
        return 90

    async def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 20,), index, dtype=torch.int32)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 1])
def test_large_batches_lower_the_credits(workers: int) -> None:
    """Batches of 16 MB: the number in hand is limited to 256 MB; `stats` and `explain` report the number."""
    with DataLoader[Any](Large(), batch_size=4, num_workers=workers, concurrency=200) as loader:
        seen = []
        for number, batch in enumerate(loader):
            assert int(batch[0, 0]) == 4 * number
            seen.append(loader.stats()["data/prefetch_depth"])
        assert seen[-1] == (14 if workers else 16)
        assert f"51 batches in hand ({seen[-1]:.0f} now" in loader.explain()


@pytest.mark.thorough
def test_ring_bytes_bounds_the_credits() -> None:
    """The ring stays within `ring_bytes`, with fewer batches in hand, never fewer than `prefetch_factor`."""
    with DataLoader[Any](
        Large(), batch_size=2, num_workers=1, tuning=Tuning(ring_bytes=100 << 20), concurrency=90
    ) as loader:
        batches: Any = iter(loader)
        assert len(list(batches)) == 45
        (ring,) = batches._pool.rings
        assert 0 < ring.nbytes <= 100 << 20
        assert loader.stats()["data/prefetch_depth"] == 5


@pytest.mark.parametrize("kind", BOTH)
def test_a_worker_dies_with_many_batches_in_hand(kind: str, tmp_path: Path) -> None:
    """All its batches are done again, each alone; two samples that kill once each change no batch."""
    options: dict[str, Any] = {"batch_size": 2, "seed": 3, "num_workers": 1}
    expected = collect(kind, AsyncFaulty(60, Faults(Path("/"), {})), **options)
    got = collect(kind, AsyncFaulty(60, Faults(tmp_path, {7: "SIGKILL", 28: "exit"})), **options)
    assert_same(got, expected)
    assert len(list(tmp_path.iterdir())) == 2


class Waits(Dataset[Any]):
    """All samples but the first of an epoch wait for ever; counts the samples begun and ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    def __len__(self) -> int:
        return 200

    async def __getitem__(self, index: int) -> int:
        self.begun += 1
        try:
            if index:
                await asyncio.Event().wait()
        finally:
            self.ended += 1
        return index


async def test_closing_ends_all_that_was_read_ahead() -> None:
    """Without workers no sample is in flight after `aclose`, nor after a cancelled `anext`."""
    dataset = Waits()
    loader = AsyncDataLoader[Any](dataset, concurrency=50)
    batches = aiter(loader)
    assert (await anext(batches)).tolist() == [0]
    await cancelled_after(5, anext(batches))
    assert dataset.begun > dataset.ended
    await loader.aclose()
    assert dataset.begun == dataset.ended >= 50
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_dropping_the_iterator_ends_all_that_was_read_ahead() -> None:
    """After a `break` all samples in flight of the sync facade end, and a new epoch may begin."""
    dataset = Waits()
    with DataLoader[Any](dataset, concurrency=50) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch.tolist() == [0]
                break
            await_our_threads()
            assert dataset.begun == dataset.ended >= 50


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return torch.rand((), generator=sample_rng().torch)


def _noisy(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


@pytest.mark.parametrize("kind", BOTH)
def test_the_trainers_generators_are_left_alone(kind: str) -> None:
    """Seeded mode without workers: samples that use `sample_rng`, and a collation that draws, read ahead or not, leave
    the trainer's global generators untouched; the batches are equal with and without reading ahead.
    """
    torch.manual_seed(1)
    undisturbed = [float(torch.rand(())) for _ in range(10)]
    found = []
    for concurrency in (1, 256):
        torch.manual_seed(1)
        options: dict[str, Any] = {"batch_size": 4, "seed": 2, "collate_fn": _noisy, "concurrency": concurrency}
        drawn, batches = [], []
        if kind == "sync":
            with DataLoader[Any](Draws(), **options) as loader:
                for batch in loader:
                    drawn.append(float(torch.rand(())))
                    batches.append(batch)
        else:

            async def run() -> None:
                async with AsyncDataLoader[Any](Draws(), **options) as loader:  # noqa: B023
                    async for batch in loader:
                        drawn.append(float(torch.rand(())))  # noqa: B023
                        batches.append(batch)  # noqa: B023

            run_async(run())
        assert drawn == undisturbed
        found.append(batches)
    assert_same(found[0], found[1])
