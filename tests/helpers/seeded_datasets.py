"""Datasets, samplers and collations of the tests of seeded mode, at module level: spawned workers import them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from asyncloader import sample_rng


def every_draw() -> list[float]:
    """Draw a number from each generator that a sample can use: the global generators and its own."""
    rng = sample_rng()
    return [
        float(torch.rand(())),
        random.random(),
        float(np.random.random()),
        float(torch.rand((), generator=rng.torch)),
        float(rng.numpy.random()),
        rng.random.random(),
    ]


def own_draws() -> list[float]:
    rng = sample_rng()
    return [float(torch.rand((), generator=rng.torch)), float(rng.numpy.random()), rng.random.random()]


class Rows(Dataset[Any]):
    """A dataset of float64 scalars: the index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index, dtype=torch.float64)


class AllDraws(Rows):
    """Rows of float64: the index and six random numbers. Then ``index % 3`` times further numbers are drawn."""

    def __getitem__(self, index: int) -> torch.Tensor:
        row = [index, *every_draw()]
        for _ in range(index % 3):  # one sample's draws must not affect the next
            every_draw()
        return torch.tensor(row, dtype=torch.float64)


class AwaitedDraws(Rows):
    """Coroutines that interleave while they draw from their own generators."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        row: list[float] = [index]
        for turn in range(3):
            row += own_draws()
            for _ in range((index + turn) % 4):
                await asyncio.sleep(0)
        return torch.tensor(row, dtype=torch.float64)


class Threaded(Rows):
    """Samples that are made in threads, several at a time."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        row = await asyncio.to_thread(own_draws)
        return torch.tensor([index, *row, *await asyncio.to_thread(own_draws)], dtype=torch.float64)


class GlobalAwaited(Rows):
    """Coroutines that draw from the process-global generators."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.sleep(0)
        return torch.tensor([index, random.random()], dtype=torch.float64)


class WholeDraws(AllDraws):
    """A dataset that makes a batch's samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        noise = torch.rand(len(indices), 1, dtype=torch.float64)
        return [torch.cat([self[i], noise[place]]) for place, i in enumerate(indices)]


class Lists:
    """A user's batch sampler."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists

    def __len__(self) -> int:
        return len(self.lists)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)


def draw_and_collate(samples: list[Any]) -> Any:
    """Collate, and add random numbers from the global generators and the batch's own."""
    return default_collate(samples), torch.tensor(every_draw(), dtype=torch.float64)
