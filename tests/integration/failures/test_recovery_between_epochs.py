"""Persistent workers that exit or die at the end of an epoch, or after it: later batches do not repeat its draws."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader, Recovery
from asyncloader.workers import watchdog as watch
from tests.helpers.comparing import assert_same
from tests.helpers.faulty import Growing
from tests.helpers.running import BOTH, Deaths
from tests.helpers.seeded_runs import Stepwise

OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}

FORKED: dict[str, Any] = {**OPTIONS, "multiprocessing_context": "fork"}
"""For workers killed between two epochs: only its fork server is notified of a child's death, and may report it after
the next `iter()`."""


def epochs(kind: str, **options: Any) -> tuple[list[list[Any]], set[int]]:
    """Three epochs of a dataset that grows by 4 MB per worker and epoch, and the workers' pids."""
    torch.manual_seed(7)
    with Stepwise(kind, Growing(8), **OPTIONS, **options) as run:
        found = [run.epoch() for _ in range(3)]
    return found, {int(pid) for epoch in found for batch in epoch for pid in batch.pop("pid")}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("megabytes", [1, 3, 4, 7])
def test_workers_that_grow_go_on_with_their_random_numbers(kind: str, megabytes: int) -> None:
    """Any task of an epoch, also the last, may make a worker too large: it exits when another task exists that its
    successor can take with its random numbers. The batches of all epochs are those of workers that stayed.
    """
    expected, _ = epochs(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, pids = epochs(kind, recovery=Recovery(worker_memory_limit=(megabytes << 20) - (1 << 19)))
    assert len(pids) > 2
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("restarts", [None, 3])
def test_new_workers_do_not_draw_again(kind: str, restarts: int | None) -> None:
    """A worker is killed between two epochs, and all workers start again, with random numbers not drawn before."""
    torch.manual_seed(7)
    with Stepwise(kind, Growing(8), **FORKED, max_worker_restarts=restarts) as run:
        drawn: set[float] = set()
        for number in range(1, 4):
            batches = run.epoch()
            assert [int(index) for batch in batches for index in batch["index"]] == list(range(8))
            drawn |= {float(value) for batch in batches for value in batch["random"]}
            assert len(drawn) == 8 * number
            with Deaths([int(batches[0]["pid"][0])]) as deaths:
                os.kill(int(batches[0]["pid"][0]), signal.SIGKILL)
                deaths.wait()


class Slow(Dataset[Any]):
    """Each sample takes a fifth of a second, and is the pid of the process that made it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.2)  # eight samples take longer than `worker_timeout`, one sample does not
        return os.getpid()


@pytest.mark.thorough
def test_what_an_abandoned_epoch_left_to_do_is_no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in torch mode does the tasks of an abandoned epoch first. It is not killed because all of them together
    take longer than a start-up may.
    """
    monkeypatch.setattr(watch, "START_SECONDS", 0.0)
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 8, "persistent_workers": True}
    with Stepwise("sync", Slow(), **options, max_worker_restarts=3, recovery=Recovery(worker_timeout=1)) as run:
        firsts = []
        for _ in range(3):
            run.begin()
            firsts.append(int(run.step()))
    assert len(set(firsts)) == 1


@pytest.mark.filterwarnings("ignore:DataLoader worker . died and was replaced:RuntimeWarning")
def test_worker_that_dies_while_the_next_epoch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an abandoned epoch ends, the loop is still notified of deaths; a death makes all workers start again."""
    with DataLoader[Any](Growing(8), **OPTIONS, max_worker_restarts=1) as loader:
        batches: Any = iter(loader)
        next(batches)
        end_epoch, process = batches._end_epoch, batches._pool.processes[0]

        async def released() -> None:
            while not process.released:  # noqa: ASYNC110 - the loop must be notified
                await asyncio.sleep(0)

        def dies_then() -> None:
            monkeypatch.undo()
            os.kill(process.pid, signal.SIGKILL)
            loader._asyncloader_state.bridge.run(released())
            end_epoch()

        monkeypatch.setattr(batches, "_end_epoch", dies_then)
        assert len(list(loader)) == 4


class Epochs(IterableDataset[Any]):
    """Counts its epochs itself, as a dataset with a state may in persistent workers."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield {"epoch": self.epoch, "pid": os.getpid()}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]


@pytest.mark.parametrize("kind", BOTH)
def test_new_workers_begin_with_the_datasets_of_those_before(kind: str) -> None:
    """A dataset that has a state keeps it, also where the workers had to be started again between two epochs."""
    with Stepwise(kind, Epochs(), **FORKED) as run:
        found = []
        for number in range(4):
            batches = run.epoch()
            found.append([int(epoch) for batch in batches for epoch in batch["epoch"]])
            pid = int(batches[0]["pid"][0])
            if number == 1:
                with Deaths([pid]) as deaths:
                    os.kill(pid, signal.SIGKILL)
                    deaths.wait()
    assert found == [[1, 1], [2, 2], [3, 3], [4, 4]]
