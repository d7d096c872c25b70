"""Functions that make it hard to verify their loaders, and loaders without a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler, get_worker_info

import asyncloader
from tests.integration.verification.planted import Rows, loader


class Sound(Rows):
    """Draws from the generators that are seeded for each sample, and keeps a cache, a file and a count to itself."""

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}
        self.reads = 0
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.file = self.file or Path(__file__).open("rb")  # noqa: SIM115 - it is kept, in each worker
        self.file.seek(index)
        if index not in self.cache:
            self.cache[index] = torch.tensor([index, index])
        return {"rows": self.cache[index] + torch.rand(2), "name": f"{index}"}


def sound() -> Any:
    return loader(Sound(), shuffle=True)


def weighted() -> Any:
    generator = torch.Generator().manual_seed(7)  # goes on from epoch to epoch
    return loader(Rows(), sampler=WeightedRandomSampler([1.0] * 32, 32, generator=generator))


class Divided(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor([number, torch.rand(()).item()]) for number in range(first, 32, step))


def divided() -> Any:
    return asyncloader.DataLoader(Divided(), batch_size=4, num_workers=2, seed=3)


def local_class() -> Any:
    class Local(Rows):
        pass

    return loader(Local())


class Unspeakable(BaseException):
    """Cannot be shown, and is its own cause."""

    def __init__(self) -> None:
        self.__cause__ = self
        vars(self)["__notes__"] = 1

    def __str__(self) -> str:
        raise Unspeakable

    def __bool__(self) -> bool:
        raise Unspeakable


def unspeakable() -> Any:
    raise Unspeakable  # fault: unspeakable


def unparsed() -> Any:
    error = SyntaxError("\udcff\0\x1b[2J" * 9999)
    error.filename, error.lineno = "a\0.py", 10**5000
    raise error  # fault: unparsed


def strange() -> Any:
    """Forks, and both come back; moves away, closes what is printed to, and makes warnings errors."""
    os.fork()
    os.chdir("/")
    sys.stdout.close()
    warnings.simplefilter("error")
    return loader(Sound(), shuffle=True, num_workers=0)


def raising() -> Any:
    raise RuntimeError("no data here")  # fault: raising


def iterator() -> Any:
    return iter(loader(Rows(), num_workers=0))


def nothing() -> Any:
    loader(Rows(), num_workers=0)


class Chatty(Rows):
    def __getitem__(self, index: int) -> Any:
        sys.stdout.write("x" * 100_000 + "\n")
        return super().__getitem__(index)


def chatty() -> Any:
    child = subprocess.Popen(["/bin/sleep", "600"])
    Path(os.environ["VERIFY_MARKS"], str(child.pid)).touch()
    return loader(Chatty())


class Deadly(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            os.kill(os.getpid(), signal.SIGKILL)  # fault: deadly
        return super().__getitem__(index)


def deadly() -> Any:
    return loader(Deadly())


class Endless(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            threading.Event().wait()  # fault: endless
        return super().__getitem__(index)


def endless() -> Any:
    return loader(Endless())
