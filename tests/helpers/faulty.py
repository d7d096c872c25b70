"""Datasets whose samples kill, hang or grow their worker, a given number of times. At module level, for spawn."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import sample_rng


def _crash() -> None:
    ctypes.string_at(0)


def _hang_in_c() -> None:
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)  # keeps the GIL; returns after a signal


WAYS: dict[str, Any] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSEGV": _crash,
    "SIGABRT": os.abort,
    "exit": lambda: os._exit(3),
    "exit 0": lambda: os._exit(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: threading.Event().wait(),
    "hang in C": _hang_in_c,
}


class Faults:
    """Fault kinds by place, and how often each strikes; files in a folder record the faults that have struck."""

    def __init__(self, folder: Path, places: dict[int, str], times: int = 1) -> None:
        self.folder = str(folder)
        self.places = places
        self.times = times

    def strike(self, place: int) -> None:
        way = self.places.get(place)
        for time in range(self.times if way is not None else 0):
            try:
                os.close(os.open(f"{self.folder}/{place}.{time}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            assert way is not None
            WAYS[way]()


def _sample(index: int) -> Any:
    """Return a sample with random numbers of all three generators."""
    return {
        "index": index,
        "torch": torch.rand(3),
        "numpy": np.random.random(2),
        "random": random.random(),
    }


class Faulty(Dataset[Any]):
    """`n` samples with random numbers; at some of them a fault strikes."""

    def __init__(self, n: int, faults: Faults) -> None:
        self.n = n
        self.faults = faults

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.faults.strike(index)
        return _sample(index)


class AsyncFaulty(Dataset[Any]):
    """Asynchronous `Faulty`; random numbers are from the sample's own generators."""

    def __init__(self, n: int, faults: Faults) -> None:
        self.n = n
        self.faults = faults

    def __len__(self) -> int:
        return self.n

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        self.faults.strike(index)
        return {"index": index, "torch": torch.rand(3, generator=sample_rng().torch)}


class FaultyStream(IterableDataset[Any]):
    """Each worker's copy counts to `n`; faults strike at some samples of worker 0. It has no state."""

    def __init__(self, n: int, faults: Faults) -> None:
        self.n = n
        self.faults = faults

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        for place in range(self.n):
            if worker == 0:
                self.faults.strike(place)
            yield {**_sample(place), "worker": worker}


class StatefulFaultyStream(IterableDataset[Any]):
    """`FaultyStream` with a state: its place."""

    def __init__(self, n: int, faults: Faults) -> None:
        self.n = n
        self.faults = faults
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        while self.place < self.n:
            if worker == 0:
                self.faults.strike(self.place)
            self.place += 1
            yield {**_sample(self.place - 1), "worker": worker}
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class RaisingStream(IterableDataset[Any]):
    """An iterator that counts to `n` and can continue after an exception; raises at the places of `bad`."""

    def __init__(self, n: int, faults: Faults, bad: set[int]) -> None:
        self.n = n
        self.faults = faults
        self.bad = bad
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        self.place = 0
        return self

    def __next__(self) -> Any:
        if self.place == self.n:
            raise StopIteration
        self.faults.strike(self.place)
        self.place += 1
        if self.place - 1 in self.bad:
            raise ValueError(f"bad record {self.place - 1}")
        return {"index": self.place - 1}


class StatefulRaisingStream(RaisingStream):
    """`RaisingStream` with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def grown(size: int) -> mmap.mmap:
    """Return memory that is new to this process, and not taken from the heap that its parent had freed."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * size)
    return memory


class Growing(Dataset[Any]):
    """Keeps a megabyte for each sample; a sample has the pid of the process that made it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.kept: list[mmap.mmap] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.kept.append(grown(1 << 20))
        return {**_sample(index), "pid": os.getpid()}
