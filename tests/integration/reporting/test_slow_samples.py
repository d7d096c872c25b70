"""The slowest sample of a run is known by name, however samples are made, and the verdict has it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader
from asyncloader.epoch import run_reading
from asyncloader.telemetry import statistics

LENGTH, SLOW, SLOW_S = 48, 29, 0.3


def wait(index: int) -> torch.Tensor:
    time.sleep(SLOW_S if index == SLOW else 1e-3)
    return torch.tensor(index)


class Waiting(Dataset[Any]):
    """One sample of many takes long."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return wait(index)


class Awaited(Waiting):
    """The same, of samples that are awaited."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(SLOW_S if index == SLOW else 1e-3)
        return torch.tensor(index)


class Indices(Waiting):
    """The index of each sample: `wait` decodes it."""

    def __getitem__(self, index: int) -> Any:
        return index


class Batched(Indices):
    """A batch is made as a whole."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(wait, indices))


class Stream(IterableDataset[Any]):
    """A stream of all samples in each worker."""

    def __iter__(self) -> Iterator[Any]:
        return map(wait, range(LENGTH))


class Numbers(IterableDataset[Any]):
    """The same, not yet decoded."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "as in torch": (Waiting(), {}),
    "seeded": (Waiting(), {"seed": 1}),
    "with an error policy": (Waiting(), {"on_error": "skip"}),
    "decoded": (Indices(), {"decode": wait}),
    "by threads": (Waiting(), {"concurrency": 2}),
    "awaited": (Awaited(), {}),
    "one by one": (Waiting(), {"batch_size": None}),
    "a stream": (Stream(), {}),
    "a stream that is decoded": (Numbers(), {"decode": wait}),
}


def slowest_of(dataset: Any, **options: Any) -> str:
    """The name of the sample that took longest."""
    given: dict[str, Any] = {"batch_size": 4, **options}
    with DataLoader[Any](dataset, **given) as loader:
        for _ in loader:
            pass
        named = loader._asyncloader_state.statistics.slow_samples().named
    return max(named, key=lambda name: named[name][0], default="")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_the_slowest_sample_is_known_by_name(way: str, workers: int) -> None:
    """By its index, or its number in its worker's stream."""
    dataset, options = WAYS[way]
    if isinstance(dataset, IterableDataset):
        name = f"sample {SLOW}" + (" of worker 0's stream" if workers else "")
    else:
        name = f"index {SLOW}"
    assert slowest_of(dataset, num_workers=workers, **options) == name


def test_of_worker_threads_too() -> None:
    """Which share the process."""
    assert slowest_of(Waiting(), num_workers=2, workers="threads") == f"index {SLOW}"


def test_a_batch_that_is_made_as_a_whole_names_no_sample() -> None:
    """Which of its samples took long is unknown."""
    assert slowest_of(Batched(), num_workers=1) == ""


def test_the_verdict_has_the_name() -> None:
    """Of all epochs together, and `explain` ends with it."""
    with DataLoader[Any](Waiting(), batch_size=4) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        found, text = loader.diagnose(), loader.explain()
    assert f" of {2 * LENGTH} take" in found.text
    assert f"index {SLOW} (0.3 s)" in found.text
    assert found.evidence["slow_samples"] >= 2
    assert found.text in text


def test_what_ended_workers_have_counted_stays() -> None:
    """Those of the next epoch add to it."""
    with DataLoader[Any](Waiting(), batch_size=4, num_workers=1) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        found = loader._asyncloader_state.statistics.slow_samples()
    assert sum(found.times) == 3 * LENGTH
    assert found.named[f"index {SLOW}"][1] == 3


def test_a_run_that_waits_is_told_so_unasked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After the first minute of iterating, with the verdict; once in a process."""
    monkeypatch.setattr(statistics, "_FIRST_S", 0.4)
    monkeypatch.setattr(run_reading, "_untold", [True])
    caplog.set_level(logging.WARNING, "asyncloader")
    for dataset in (Waiting(), Stream()):
        with DataLoader[Any](dataset, batch_size=1) as loader:
            for _ in range(2):
                for _ in loader:
                    pass
    (line,) = caplog.messages
    assert line.startswith("training has waited for data for ")
    assert " in a loader of Waiting. Input-bound: the consumer waited " in line


def test_a_run_that_waits_little_is_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Less than half of the time."""
    monkeypatch.setattr(statistics, "_FIRST_S", 0.2)
    monkeypatch.setattr(run_reading, "_untold", [True])
    with DataLoader[Any](Indices(), batch_size=4) as loader:
        for _ in loader:
            time.sleep(0.05)
    assert not caplog.messages
