"""The settings of a worker process: init function, seeds, threads, signals, names, environment."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from asyncloader import DataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH, assert_like_torch, collect


class Facts(Dataset[Any]):
    """Settings of the process that fetches."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {
            "threads": torch.get_num_threads(),
            "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "name": Path("/proc/self/comm").read_text().strip(),
            "main thread": threading.current_thread() is threading.main_thread(),
            "default collate": torch.utils.data.default_collate([index]).tolist(),
            "daemon": __import__("multiprocessing").current_process().daemon,
        }


@pytest.mark.thorough
@pytest.mark.spawns
@pytest.mark.parametrize(("kind", "method"), [("sync", "fork"), ("sync", "spawn"), ("asyncio", "fork")])
def test_worker_is_set_up_as_torchs(kind: str, method: str) -> None:
    """One torch thread, SIGINT ignored, torch's thread name, datasets run in the main thread of a daemon process."""
    batches = collect(kind, Facts(), num_workers=1, collate_fn=list, multiprocessing_context=method)
    assert batches[0][0] == {
        "threads": 1,
        "sigint": True,
        "sigterm": True,
        "name": "pt_data_worker",
        "main thread": True,
        "default collate": [0],
        "daemon": True,
    }


class Log:
    """An init function that marks the dataset, after seeding and worker info, before any fetch."""

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        dataset.marks = [worker, info.id, info.seed, torch.initial_seed(), random.random()]


class Marked(Dataset[Any]):
    marks: list[Any]

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return [index, *self.marks]


@pytest.mark.parametrize("kind", BOTH)
def test_worker_init_fn_comes_first(kind: str) -> None:
    """`worker_init_fn` runs once per worker, after seeding; every fetch sees its changes to the dataset."""
    run = assert_like_torch(
        kind,
        Marked(),
        epochs=2,
        num_workers=2,
        worker_init_fn=Log(),
        collate_fn=list,
        persistent_workers=True,
    )
    assert [batch[0][:3] for batch in run.epochs[0]] == [[i, i % 2, i % 2] for i in range(5)]
    assert not hasattr(Marked(), "marks")


def test_main_process_keeps_its_state() -> None:
    """Iterating changes neither torch's thread number, nor signal handlers, nor worker information in this process."""

    def state() -> Any:
        return (
            torch.get_num_threads(),
            {n: signal.getsignal(n) for n in signal.valid_signals() if n not in (9, 19)},
            get_worker_info(),
            threading.current_thread().name,
            Path("/proc/self/comm").read_text(),
        )

    before = state()
    iterator = iter(DataLoader[Any](Numbers(9), num_workers=2))
    next(iterator)
    assert state() == before
    del iterator
    assert state() == before
