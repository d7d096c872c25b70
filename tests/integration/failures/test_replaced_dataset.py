"""A worker that replaces another has the dataset of the other workers, without the program's later changes to it."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import WorkerDied
from tests.helpers.running import BOTH
from tests.helpers.seeded_runs import Stepwise

OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}


class Levels(Dataset[Any]):
    """Each sample is the worker's pid, two levels and the epoch. Sample 9 kills the worker, once `stop` is set."""

    def __init__(self, stop: Any) -> None:
        self.level = 0
        self.epoch = 0
        self.levels = [0, 0]
        self.stop = stop

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        if index == 9 and self.stop.numel() and int(self.stop[0]):
            self.stop[0] = 0  # in memory that all processes share
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), self.level, self.levels[1], self.epoch


def two_epochs(kind: str, change: Any, *, set_epoch: bool, **options: Any) -> list[list[Any]]:
    """The samples of an epoch, and of an epoch in which a worker dies, after a change in the main process."""
    stop = torch.zeros(1, dtype=torch.int64).share_memory_()
    dataset = Levels(stop)

    def samples(batches: list[Any]) -> list[Any]:
        return [tuple(map(int, sample)) for batch in batches for sample in zip(*batch, strict=True)]

    with Stepwise(kind, dataset, **OPTIONS, **options) as run:
        first = samples(run.epoch())
        change(dataset)
        stop[0] = 1
        if set_epoch:
            run.loader.set_epoch(5)
        return [first, samples(run.epoch())]


def raise_level(dataset: Levels) -> None:
    dataset.level = 2
    dataset.levels[1] = 3


@pytest.mark.parametrize(("kind", "method"), [("sync", "spawn"), ("asyncio", "forkserver")])
def test_replacement_has_the_dataset_of_the_others(kind: str, method: str) -> None:
    """Where the dataset was pickled, a replacement gets the same bytes, and the epochs set by `set_epoch` since."""
    first, second = two_epochs(kind, raise_level, set_epoch=True, seed=1, multiprocessing_context=method)
    assert len({pid for pid, *_ in first} | {pid for pid, *_ in second}) == 3
    assert {sample[1:] for sample in second} == {(0, 0, 5)}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("set_epoch", "epoch"), [(True, 5), (False, 1)])
def test_forked_replacement_of_an_unchanged_dataset(kind: str, set_epoch: bool, epoch: int) -> None:
    """A change that `set_epoch` makes in the main process is no obstacle: every worker gets it."""
    first, second = two_epochs(kind, lambda _: None, set_epoch=set_epoch, seed=1, multiprocessing_context="fork")
    assert len({pid for pid, *_ in first} | {pid for pid, *_ in second}) == 3
    assert {sample[1:] for sample in second} == {(0, 0, epoch)}


def in_place(dataset: Levels) -> None:
    dataset.levels[1] = 3


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("change", "named"), [(raise_level, "dataset.level"), (in_place, "dataset.levels")])
def test_forked_replacement_of_a_changed_dataset_is_refused(kind: str, change: Any, named: str) -> None:
    """The replacement would be forked with the dataset in its present state: the error names the changed attribute."""
    refused = f"No new worker was forked, because {re.escape(named)} has changed in the main process.*forkserver"
    with pytest.raises(WorkerDied, match=refused):
        two_epochs(kind, change, set_epoch=True, seed=1, multiprocessing_context="fork")
