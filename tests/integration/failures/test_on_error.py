"""Samples that raise are left out or replaced, the same way with and without workers, and all are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, RanksDisagree, Recovery, SkippedSample, TooManySkippedSamples
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH, run_async

WORKERS = [0, 1, 2]


class Rotten(Dataset[Any]):
    """`n` samples; those in `bad` raise."""

    def __init__(self, n: int, bad: set[int]) -> None:
        self.n = n
        self.bad = bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"bad jpeg {index}")
        return {"index": index, "draw": torch.rand(2)}


class AsyncRotten(Rotten):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        if index in self.bad:
            raise ValueError(f"bad jpeg {index}")
        return {"index": index}


class RottenStream(IterableDataset[Any]):
    """An iterator class, which can be read further after an exception."""

    def __init__(self, n: int, bad: set[int]) -> None:
        self.n = n
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        return _Counting(self.n, self.bad)


class _Counting:
    def __init__(self, n: int, bad: set[int]) -> None:
        self.place, self.n, self.bad = 0, n, bad

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.place == self.n:
            raise StopIteration
        self.place += 1
        if self.place - 1 in self.bad:
            raise ValueError(f"bad record {self.place - 1}")
        return self.place - 1


class BrokenGenerator(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 0
        raise ValueError("cannot be read any further")


def run(kind: str, dataset: Any, **options: Any) -> tuple[list[Any], list[SkippedSample], dict[str, float]]:
    """One epoch's batches, the recorded errors, and the statistics."""
    torch.manual_seed(7)
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            return list(loader), loader.skipped_samples, loader.stats()

    async def load() -> tuple[list[Any], list[SkippedSample], dict[str, float]]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            return [batch async for batch in loader], loader.skipped_samples, loader.stats()

    return run_async(load(), kind)


def indices(batches: list[Any]) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("dataset", [Rotten, AsyncRotten])
def test_skip_makes_short_batches(kind: str, workers: int, dataset: type[Rotten]) -> None:
    """Bad samples are left out, and so are batches of bad samples only; all are recorded, in order."""
    got, errors, stats = run(
        kind, dataset(12, {1, 4, 5, 6, 7}), batch_size=4, num_workers=workers, on_error="skip", seed=1
    )
    assert indices(got) == [[0, 2, 3], [8, 9, 10, 11]]
    assert [(bad.index, bad.error, bad.action) for bad in errors] == [
        (index, f"ValueError: bad jpeg {index}", "skipped") for index in (1, 4, 5, 6, 7)
    ]
    assert all("__getitem__" in bad.traceback for bad in errors)
    assert stats["data/skipped_samples"] == 5
    assert stats["data/samples"] == 7


@pytest.mark.parametrize("kind", BOTH)
def test_refill_is_a_function_of_the_seed(kind: str) -> None:
    """Substitutes are the same for every number of workers; batches are full; refills are counted."""
    options: dict[str, Any] = {"batch_size": 4, "seed": 3, "on_error": "refill"}
    runs = [run(kind, Rotten(40, {1, 9, 17, 30}), num_workers=workers, **options) for workers in WORKERS]
    for got, errors, stats in runs:
        assert_same(got, runs[0][0])
        assert [len(batch["index"]) for batch in got] == [4] * 10
        assert [(bad.index, bad.substitute) for bad in errors] == [(b.index, b.substitute) for b in runs[0][1]]
        assert stats["data/refilled_samples"] == 4


def replaced(index: int, error: Exception) -> Any:
    assert isinstance(error, ValueError)
    return {"index": -index, "draw": torch.zeros(2)}


def refuses(index: int, error: Exception) -> Any:
    raise LookupError(f"nothing for {index}") from error


@pytest.mark.parametrize("workers", WORKERS)
def test_function_may_raise(workers: int) -> None:
    """An error that `on_error` raises is raised instead of the batch, and is no batch of the statistics; the next batch
    is delivered.
    """
    loader = DataLoader[Any](Rotten(8, {2}), batch_size=4, num_workers=workers, on_error=refuses)
    batches = iter(loader)
    with pytest.raises(LookupError, match="nothing for 2"):
        next(batches)
    assert next(batches)["index"].tolist() == [4, 5, 6, 7]
    assert loader.stats()["data/batches"] == 1


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_dataset_of_bad_samples_is_stopped(kind: str, workers: int) -> None:
    """Beyond `max_skipped_samples` the epoch ends with an error, and cannot be read any further."""
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": workers,
        "on_error": "skip",
        "recovery": Recovery(max_skipped_samples=3),
    }
    dataset = Rotten(20, {0, 2, 4, 6, 8})
    if kind == "sync":
        loader = DataLoader[Any](dataset, **options)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        with pytest.raises(TooManySkippedSamples, match=r"max_skipped_samples=3.*index 6, ValueError: bad jpeg 6"):
            next(batches)
        assert next(batches, None) is None
        assert len(loader.skipped_samples) == 4
        return

    async def load() -> None:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            batches = aiter(loader)
            for _ in range(3):
                await anext(batches)
            with pytest.raises(TooManySkippedSamples):
                await anext(batches)
            with pytest.raises(StopAsyncIteration):
                await anext(batches)
            assert len(loader.skipped_samples) == 4

    run_async(load())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_stream_goes_on_after_an_exception(kind: str, workers: int) -> None:
    """An iterator that can be read further after an exception is read further."""
    got, errors, _ = run(kind, RottenStream(9, {0, 4, 8}), batch_size=3, num_workers=min(1, workers), on_error="skip")
    assert [batch.tolist() for batch in got] == [[1, 2], [3, 5], [6, 7]]
    assert [(bad.index, bad.position) for bad in errors] == [(None, 0), (None, 4), (None, 8)]


@pytest.mark.parametrize("workers", WORKERS)
def test_generator_that_raised_is_no_end(workers: int) -> None:
    """A generator is exhausted after an exception: this must not pass for the stream's end."""
    with pytest.raises(ValueError, match="cannot be read any further"):
        list(DataLoader[Any](BrokenGenerator(), batch_size=None, num_workers=min(1, workers), on_error="skip"))


@pytest.mark.thorough
@pytest.mark.parametrize("workers", WORKERS)
def test_state_counts_what_was_left_out(workers: int) -> None:
    """A run that is resumed after bad batches gives the batches that the run without interruption gives."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "on_error": "skip", "seed": 1}
    dataset = Rotten(16, {2, 3, 9, 12, 13})
    whole = list(DataLoader[Any](dataset, **options))
    for taken in range(len(whole) + 1):
        loader = DataLoader[Any](dataset, **options)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
        del batches
        loader.close()
        resumed = DataLoader[Any](dataset, **options)
        resumed.load_state_dict(state)
        assert_same(list(resumed), whole[taken:])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_rank_without_a_batch_does_not_hang_the_others(kind: str, workers: int) -> None:
    """No rank may have fewer batches: a rank that dropped all samples of a batch raises an error at once."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "seed": 1, "rank": 0, "world_size": 2}
    with pytest.raises(RanksDisagree, match="the other 1 ranks have theirs"):
        run(kind, Rotten(16, {8, 9}), on_error="skip", **options)
    got, _, _ = run(kind, Rotten(16, {8}), on_error="skip", **options)
    assert len(got) == 4
    got, _, _ = run(kind, Rotten(16, {8, 9}), on_error="refill", **options)
    assert [len(batch["index"]) for batch in got] == [2] * 4
