"""Samples that raise are left out or replaced, the same way with and without workers, and all are recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader, RanksDisagree, Recovery, SkippedSample, TooManySkippedSamples
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH
from tests.helpers.seeded_runs import Stepwise

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


def run(kind: str, dataset: Any, **options: Any) -> tuple[list[Any], list[SkippedSample], dict[str, float]]:
    """One epoch's batches, the recorded errors, and the statistics."""
    torch.manual_seed(7)
    with Stepwise(kind, dataset, **options) as run:
        return run.epoch(), run.loader.skipped_samples, run.loader.stats()


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
    with Stepwise(kind, Rotten(20, {0, 2, 4, 6, 8}), **options) as run:
        run.begin()
        run.take(3)
        with pytest.raises(TooManySkippedSamples, match=r"max_skipped_samples=3.*index 6, ValueError: bad jpeg 6"):
            run.step()
        assert run.rest() == []
        assert len(run.loader.skipped_samples) == 4


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
