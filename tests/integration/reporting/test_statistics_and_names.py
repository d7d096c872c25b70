"""Statistics, explanations and names of a loader; and pinning without a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.datasets import AsyncNumbers, Custom, Images, Numbers, UnevenStream
from tests.helpers.running import BOTH, collect, run_async
from tests.torch_versions import needs_torch
from tests.unit.telemetry.figures import FIGURES

KEYS = [*FIGURES, "data/dropped_samples", "data/repeated_samples"]
LOADERS: dict[str, Any] = {"sync": DataLoader, "asyncio": AsyncDataLoader}


def exhaust(loader: Any, epochs: int = 1) -> None:
    """Use up epochs of either loader, keeping no batch."""
    if isinstance(loader, DataLoader):
        for _ in range(epochs):
            for _ in loader:
                pass
        return

    async def run() -> None:
        for _ in range(epochs):
            async for _ in loader:
                pass

    run_async(run())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_stats(kind: str, workers: int) -> None:
    """A new flat dict of floats with exactly the promised keys, whose numbers add up over epochs."""
    loader = LOADERS[kind](Numbers(10), batch_size=4, num_workers=workers)
    empty = loader.stats()
    assert sorted(empty) == sorted(KEYS)
    assert all(type(value) is float for value in empty.values())
    assert not any(empty.values())
    exhaust(loader, 3)
    stats = loader.stats()
    assert stats is not loader.stats()
    assert all(type(value) is float for value in stats.values())
    assert (stats["data/batches"], stats["data/samples"]) == (9, 30)
    assert stats["data/bytes"] >= 30 * 3 * 4
    assert stats["data/wait_s"] > 0
    assert 0 < stats["data/wait_frac"] <= 1
    assert 0 < stats["data/worker_busy_frac"] <= 1
    assert stats["data/time_to_first_batch_s"] > 0
    assert stats["data/samples_per_sec"] == pytest.approx(stats["data/batches_per_sec"] * 30 / 9)
    assert stats["data/queue_depth"] == stats["data/worker_restarts"] == 0


class Choosing(Sampler[int]):
    """Each index takes a while to choose; `seconds` is the sum of these times."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __iter__(self) -> Iterator[int]:
        for index in range(200):
            began = perf_counter()
            while perf_counter() < began + 0.002:
                pass
            self.seconds += perf_counter() - began
            yield index


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_waiting_for_the_sampler_is_waiting(kind: str, workers: int) -> None:
    """All time in which the consumer does not compute counts, whatever it waits for."""
    sampler = Choosing()
    loader = LOADERS[kind](Numbers(200), batch_size=4, num_workers=workers, sampler=sampler)
    exhaust(loader)
    assert loader.stats()["data/wait_s"] > 0.95 * sampler.seconds


@pytest.mark.parametrize("kind", BOTH)
def test_stats_of_a_short_stream(kind: str) -> None:
    """Samples of short batches are counted by their number."""
    loader = LOADERS[kind](UnevenStream([3, 6]), batch_size=4, num_workers=2)
    exhaust(loader)
    assert loader.stats()["data/samples"] == 9
    assert loader.stats()["data/batches"] == 3


def test_bytes_are_those_of_the_batch() -> None:
    """`data/bytes` counts the batches' bytes, with at most some padding of each tensor."""
    loader = DataLoader[Any](Numbers(64, 1000), batch_size=8, num_workers=1)
    exhaust(loader)
    assert 64 * 4000 <= loader.stats()["data/bytes"] < 64 * 4000 + 8 * 64


def test_queue_depth_counts_what_is_ready() -> None:
    """Batches that are ready and not taken are counted: never more than the credits."""
    loader = DataLoader[Any](Numbers(50), num_workers=2, prefetch_factor=3)
    depths = [loader.stats()["data/queue_depth"] for _ in loader]
    assert 0 < max(depths) <= 6
    assert loader.stats()["data/queue_depth"] == 0


@pytest.mark.parametrize("kind", BOTH)
def test_explain(kind: str) -> None:
    """The text has the effective configuration, and ends with a sentence on the limit of the run."""
    name = LOADERS[kind].__name__
    loader = LOADERS[kind](
        Images(20),
        num_workers=2,
        prefetch_factor=3,
        multiprocessing_context="fork",
        tuning=Tuning(ring_bytes=1 << 20),
        in_order=False,
    )
    text = loader.explain()
    assert text.startswith(f"{name}: 2 workers by fork")
    for words in (
        "3 batches ahead",
        "1,048,576",
        "default, straight into the ring",
        "as batches complete",
    ):
        assert words in text
    assert text.splitlines()[-1] == "Nothing was loaded yet."
    exhaust(loader)
    last = loader.explain().splitlines()[-1]
    # The sentence depends on the machine: a quick machine loads 20 batches in less time than a verdict needs.
    assert last.startswith(("Consumer-bound", "Input-bound", "20 batches in "))
    assert last.endswith(".")

    custom = LOADERS[kind](AsyncNumbers(5), num_workers=1, persistent_workers=True, collate_fn=list)
    assert "async dataset" in custom.explain()
    assert "persistent" in custom.explain()
    assert "list makes the batch in private memory" in custom.explain()
    assert "no workers" in LOADERS[kind](Numbers(5)).explain()


async def test_repr_of_an_iterator() -> None:
    """An iterator's repr has its state."""
    async with AsyncDataLoader[Any](Numbers(3), num_workers=1) as loader:
        batches = aiter(loader)
        assert "new" in repr(batches)
        async for _ in batches:
            assert "running" in repr(batches)
        assert "over" in repr(batches)


@needs_torch("2.13", "warns that nothing can be pinned")
@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_without_an_accelerator(kind: str, workers: int) -> None:
    """torch's warning at `iter()`, then plain memory; custom types are left alone, as in torch."""

    def messages(make: str) -> tuple[list[str], list[Any]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = collect(make, Numbers(3), num_workers=workers, pin_memory=True, collate_fn=_custom)
        return [str(w.message) for w in caught], got

    expected, _ = messages("torch")
    texts, got = messages(kind)
    assert texts == expected
    assert "no accelerator is found" in texts[0]
    assert not got[0].x.is_pinned()
    assert got[0].pinned_by is None


def _custom(samples: list[Any]) -> Custom:
    return Custom(torch.stack(samples), None)


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("kind", BOTH)
def test_explain_says_why_nothing_is_pinned(kind: str) -> None:
    """`explain()` shows that pin_memory has no accelerator."""
    assert "no accelerator" in LOADERS[kind](Numbers(3), pin_memory=True).explain()
