"""Loaders whose best setting is known; `make` makes the loader whose function's name a file contains."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader

_WAIT_S = 0.02


class Waiting(Dataset[torch.Tensor]):
    """Samples that wait long enough for two workers to be twice as fast, even on a busy machine."""

    def __init__(self, samples: int = 100_000) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.samples:
            raise IndexError(index)
        time.sleep(_WAIT_S)
        return torch.tensor(index)


class ForOneThread(Waiting):
    """Samples that can be read only in a process's main thread."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not in this thread")
        return super().__getitem__(index)


class Failing(Waiting):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError(f"sample {index} is damaged")  # the line that the finding names


class Awaited(Waiting):
    async def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        await asyncio.sleep(_WAIT_S)
        return torch.tensor(index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100_000))


def waiting() -> Any:
    return DataLoader(Waiting())


def torchs() -> Any:
    return torch.utils.data.DataLoader(Waiting(), num_workers=1, shuffle=True)


def one_thread() -> Any:
    return DataLoader(ForOneThread(), num_workers=2, seed=1)


def failing() -> Any:
    return DataLoader(Failing(), batch_size=2, num_workers=1)


def awaited() -> Any:
    return AsyncDataLoader(Awaited(), batch_size=16, concurrency=2)


def stream() -> Any:
    return DataLoader(Stream(), batch_size=64, num_workers=2)


def short() -> Any:
    return DataLoader(Waiting(8), batch_size=4, num_workers=2)


def automatic() -> Any:
    return DataLoader(Waiting(), num_workers="auto", seed=3)


def empty() -> Any:
    return DataLoader(Waiting(2), batch_size=4, drop_last=True)


def make() -> Any:
    return globals()[Path(os.environ["BENCH_CHOICE"]).read_text()]()
