"""The lines that the loader writes to the log `asyncloader`: few, and none in a healthy run."""

from __future__ import annotations

import logging
import os
import re
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from asyncloader import DataLoader, Tuning
from tests.helpers.datasets import Numbers
from tests.helpers.running import KINDS, collect, run_loader


class Odd(Dataset[int]):
    """Samples from number `first` on raise."""

    def __init__(self, length: int, first: int) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.first:
            raise ValueError(f"no {index}")
        return index


class Killed(Numbers):
    """Its worker is killed at sample 5, once."""

    def __init__(self, length: int, path: Any) -> None:
        super().__init__(length)
        self.path = path

    def __getitem__(self, index: int) -> Any:
        if index == 5 and get_worker_info() is not None and not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{each.levelname} {each.getMessage()}" for each in caplog.records if each.name == "asyncloader"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_in_a_healthy_run(kind: str, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """No line is logged, not even for debugging."""
    with caplog.at_level(logging.DEBUG):
        assert len(collect(kind, Numbers(20), batch_size=5, num_workers=workers, seed=1)) == 4
    assert lines(caplog) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first is logged with its error, then their number at each power of ten; over epochs, too."""
    loader = DataLoader(Odd(70, 3), batch_size=7, num_workers=workers, on_error="skip")
    list(loader)
    first = "WARNING the sample at index 3 raised and was skipped (on_error): ValueError: no 3"
    tens = "WARNING {} samples have raised; loader.skipped_samples has the newest iterator's"
    assert lines(caplog) == [first, tens.format(10)]
    list(loader)
    assert lines(caplog) == [first, tens.format(10), tens.format(100)]


def test_a_slow_start(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the parts of the time to the first batch, once."""
    monkeypatch.setattr("asyncloader.telemetry.statistics._SLOW_S", 0.0)
    loader = DataLoader(Numbers(8), batch_size=4, num_workers=2)
    list(loader)
    list(loader)
    (line,) = lines(caplog)
    seconds = r"\d+\.\d s"
    assert re.fullmatch(
        rf"WARNING the first batch came after {seconds}: {seconds} to create a worker's process, {seconds} in imports, "
        rf"{seconds} for the dataset, {seconds} for its first samples, {seconds} for all else; diagnose\(\) says "
        "whether each epoch pays that",
        line,
    )


def test_a_worker_that_is_replaced(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The line has the worker, and the reason."""
    with DataLoader[Any](Killed(20, tmp_path / "killed"), batch_size=4, num_workers=1, seed=1) as loader:
        assert len(list(loader)) == 5
    (line,) = lines(caplog)
    assert re.fullmatch(r"WARNING worker 0 \(pid \d+\) is replaced: killed by signal: Killed(\. .+)?", line)


def test_batches_that_do_not_fit_into_the_ring(caplog: pytest.LogCaptureFixture) -> None:
    """The first such batch is logged, with the smallest ring that holds it: with that ring no such batch is counted."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "tuning": Tuning(ring_bytes=8192)}
    loader = DataLoader[Any](Wide(12), **options)
    list(loader)
    assert loader.stats()["data/oversize_batches"] == 3
    (line,) = lines(caplog)
    found = re.fullmatch(
        r"WARNING a batch of 16,000 bytes does not fit into a ring of ring_bytes=8192 and was given memory of its own, "
        r"which is slower; Tuning\(ring_bytes=(\d+)\) would hold such batches",
        line,
    )
    assert found is not None
    for needed, oversize in ((int(found[1]), 0), (int(found[1]) - 4096, 3)):
        loader = loader.clone(ring_bytes=needed)
        list(loader)
        assert loader.stats()["data/oversize_batches"] == oversize


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_bytes", [1, 8192])
def test_a_ring_below_a_batch_is_logged_once(kind: str, ring_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """The line is logged with the first such batch, of any worker, by either loader; all batches are delivered."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    epochs = run_loader(kind, Wide(24), epochs=2, **options, tuning=Tuning(ring_bytes=ring_bytes)).epochs
    assert [batch.shape for epoch in epochs for batch in epoch] == [(4, 1000)] * 12
    (line,) = lines(caplog)
    assert line.startswith(
        f"WARNING a batch of 16,000 bytes does not fit into a ring of ring_bytes={ring_bytes} and was"
    )
    assert re.search(r"; Tuning\(ring_bytes=\d+\) would hold such batches$", line)


class Wide(Numbers):
    """Samples of 4,000 bytes."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1000)
