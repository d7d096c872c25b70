"""Loaders with a fault each. The line to be named, if any, has the comment ``fault: <name>``: the function's name."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import asyncloader


class Rows(Dataset[Any]):
    """Thirty-two samples that follow from their indices."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index * index])


def loader(dataset: Any, **options: Any) -> Any:
    chosen: Any = {"batch_size": 4, "num_workers": 2} | options
    if chosen["num_workers"]:
        chosen = {"multiprocessing_context": "fork"} | chosen
    return torch.utils.data.DataLoader(dataset, **chosen)


# ------------------------------------------------------------------------------------------- no seed decides


class Urandom(Rows):
    def __getitem__(self, index: int) -> Any:
        noise = os.urandom(1)[0]
        return torch.tensor([index, noise])


def urandom() -> Any:
    return loader(Urandom())


class Unseeded(Rows):
    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng()
        return torch.tensor([index, rng.integers(1 << 30)])


def unseeded() -> Any:
    return loader(Unseeded())


class HashOrder(Rows):
    def __init__(self) -> None:
        names = {f"name-{number}" for number in range(32)}
        self.names = list(names)

    def __getitem__(self, index: int) -> Any:
        return self.names[index]


def hash_order() -> Any:
    return loader(HashOrder())


class Awaiting(Rows):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        flip = torch.rand(()).item()  # fault: asynchronous
        return torch.tensor([index, flip])


async def asynchronous() -> Any:
    return asyncloader.AsyncDataLoader(Awaiting(), batch_size=4, num_workers=2, seed=1)


# ------------------------------------------------------------------------------- kept from sample to sample


class Counting(Rows):
    def __init__(self) -> None:
        self.seen = 0

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return torch.tensor([index, self.seen])


def cursor() -> Any:
    return loader(Counting())


class Remembered(Rows):
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index) + torch.rand(2)
        return self.cache[index]


def augmented_cache() -> Any:
    return loader(Remembered())


class Buffered:
    def __init__(self) -> None:
        self.buffer = torch.zeros(4, 2, dtype=torch.int64)

    def __call__(self, samples: list[Any]) -> Any:
        torch.stack(samples, out=self.buffer)
        return self.buffer


def collate_aliases() -> Any:
    return loader(Rows(), collate_fn=Buffered())


# ------------------------------------------------------------------------------------- the workers' set-up


class Transformed(Rows):
    def __init__(self) -> None:
        self.transform = {"fn": lambda value: value + 1}  # fault: lambda_field

    def __getitem__(self, index: int) -> Any:
        return self.transform["fn"](super().__getitem__(index))


def lambda_field() -> Any:
    return loader(Transformed(), multiprocessing_context="spawn")


class OneFile(Rows):
    def __init__(self) -> None:
        path = Path(tempfile.gettempdir()) / "numbers"
        path.write_bytes(bytes(range(32)))
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)  # fault: open_file
        return torch.tensor([index, self.file.read(1)[0]])


def open_file() -> Any:
    return loader(OneFile())


class Socket(Rows):
    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    def __getitem__(self, index: int) -> Any:
        self.theirs.send(bytes([index]))  # fault: open_socket
        return torch.tensor([index, self.ours.recv(1)[0]])


def open_socket() -> Any:
    return loader(Socket())


class Database(Rows):
    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table t(a)")
        self.database.executemany("insert into t values (?)", [(number,) for number in range(32)])

    def __getitem__(self, index: int) -> Any:
        found = self.database.execute("select a from t where a = ?", (index,))  # fault: database
        return torch.tensor(found.fetchone())


def database() -> Any:
    return loader(Database())


# --------------------------------------------------------------------------------- order, positions


class FreshOrder(Sampler[int]):
    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(secrets.randbits(32))
        return iter(torch.randperm(32, generator=generator).tolist())


def fresh_order() -> Any:
    return loader(Rows(), sampler=FreshOrder())


class Forgetting(IterableDataset[Any]):
    def __init__(self) -> None:
        self.at = 0
        self.total = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 32:
            self.at += 1
            self.total += self.at
            yield torch.tensor([self.at, self.total])
        self.at = self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def forgetting() -> Any:
    return loader(Forgetting(), num_workers=1)


class Ending(Forgetting):
    end = 32

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.end:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.end = state["at"], 28


def ending() -> Any:
    return loader(Ending(), num_workers=1)


STARTED: list[int] = []


class ByWorker(Rows):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return torch.tensor([index, 0])
        return torch.tensor([index, 1 + STARTED[0]])  # fails where worker_init_fn was not called


def by_worker() -> Any:
    return loader(ByWorker(), worker_init_fn=STARTED.append)


class Undivided(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(64).reshape(32, 2))


def undivided() -> Any:
    return loader(Undivided())


class Lengthening(IterableDataset[Any]):
    """Has a sample more in each epoch that begins after another has ended."""

    def __init__(self) -> None:
        self.end = 32

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(self.end)
        self.end += 4


def lengthening() -> Any:
    return loader(Lengthening(), num_workers=0)


# ------------------------------------------------- drawn at import, in an async generator, in worker threads

OFFSET = random.random()


class Imported(Rows):
    """Has a value of its module in each sample."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, index: int) -> Any:
        return f"{index} {self.value}"


def at_import() -> Any:
    return loader(Imported(OFFSET))


class Streaming:
    async def __aiter__(self) -> AsyncIterator[Any]:
        for index in range(32):
            yield torch.tensor([index, torch.rand(())])  # fault: yielded


def yielded() -> Any:
    return asyncloader.DataLoader(Streaming(), batch_size=4, seed=1)


class Noisy(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, np.random.rand()])  # fault: in_threads


def in_threads() -> Any:
    return asyncloader.DataLoader(Noisy(), batch_size=4, num_workers=2, workers="threads", seed=1)


class Refused(Rows):
    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(2)  # fault: refused_in_threads


def refused_in_threads() -> Any:
    return asyncloader.DataLoader(Refused(), batch_size=4, num_workers=2, workers="threads", seed=1)
