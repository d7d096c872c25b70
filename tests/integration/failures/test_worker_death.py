"""A worker that is killed: torch's RuntimeError with its pid and signal, at once, and nothing is left behind."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import DataLoader, LoaderError, WorkerDied
from tests.helpers.datasets import Numbers, Pids
from tests.helpers.running import BOTH, KINDS, Deaths, outcomes
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.chaos


class SharedInt:
    """A number that a forked process can write and its parent read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    @value.setter
    def value(self, value: int) -> None:
        self._memory[:8] = value.to_bytes(8, "little")


def crash() -> None:
    faulthandler.disable()  # pytest's would fill the terminal
    ctypes.string_at(0)


WAYS: dict[str, tuple[Any, str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "is killed by signal: Killed. "),
    "SIGSEGV": (crash, "is killed by signal: Segmentation fault. "),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "is killed by signal: Terminated. "),
    "exit 7": (lambda: os._exit(7), "exited unexpectedly"),
    "exit 0": (lambda: os._exit(0), "exited unexpectedly"),
}


class Dying(Dataset[Any]):
    """Dies in the given way at index 5, after noting its pid."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.pid = SharedInt()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.pid.value = os.getpid()
            WAYS[self.way][0]()
        return index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_killed_worker(kind: str, way: str) -> None:
    """The batches before the death are delivered, then torch's error with pid and signal; the iterator has ended."""
    dataset = Dying(way)
    got = outcomes(kind, dataset, num_workers=2)
    batches = [int(o) for o in got if not isinstance(o, tuple)]
    assert batches == list(range(len(batches)))
    assert batches in (
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3],
        [0, 1, 2],
    )  # a death is reported before batches that wait for an earlier batch
    error, text = got[len(batches)]
    assert len(got) == len(batches) + 1
    assert issubclass(error, RuntimeError)
    assert issubclass(error, LoaderError)
    assert WAYS[way][1] in text
    assert f"{dataset.pid.value}" in text
    if way == "exit 7":
        assert "exit code 7" in text


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_killed_from_outside(method: str) -> None:
    """A spawned worker, and a child of the fork server, may be killed while they are idle."""
    batches = iter(DataLoader[Any](Pids(100), num_workers=1, multiprocessing_context=method))
    pid = int(next(batches)[0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"pid {pid}. is killed by signal: Killed"):
        list(batches)


class WithGrandchild(Dying):
    """Starts a child process, which inherits the worker's open descriptors, and dies."""

    def __init__(self) -> None:
        super().__init__("SIGKILL")
        self.grandchild = SharedInt()

    def __getitem__(self, index: int) -> int:
        if index == 5:
            pid = os.fork()
            if pid == 0:
                signal.pause()
            self.grandchild.value = pid
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grandchild_that_holds_the_socket_hides_nothing(kind: str) -> None:
    """The death is noticed although the worker's own child lives on and holds its sockets and pipes."""
    dataset = WithGrandchild()
    try:
        *_, (error, text) = outcomes(kind, dataset, num_workers=2)
        assert error is WorkerDied
        assert f"pid {dataset.pid.value}" in text
    finally:
        with Deaths([dataset.grandchild.value]) as deaths:
            os.kill(dataset.grandchild.value, signal.SIGKILL)
            deaths.wait()


def test_killed_in_worker_init() -> None:
    """A worker that dies before its first batch is an error with its exit code."""
    for kind in BOTH:
        ((error, text),) = outcomes(kind, Numbers(5), num_workers=1, worker_init_fn=lambda _: os._exit(3))
        assert error is WorkerDied
        assert "exit code 3" in text


@pytest.mark.parametrize("kind", BOTH)
def test_the_next_epoch_works(kind: str) -> None:
    """With persistent workers a death ends its epoch only: the next epoch starts new workers."""
    with Stepwise(kind, Pids(30), num_workers=2, persistent_workers=True) as run:
        run.begin()
        os.kill(int(run.step()[0]), signal.SIGKILL)
        with pytest.raises(WorkerDied):
            run.rest()
        epochs = [{int(batch[0]) for batch in run.epoch()} for _ in range(2)]
    assert len(epochs[0]) == 2
    assert epochs[0] == epochs[1]
