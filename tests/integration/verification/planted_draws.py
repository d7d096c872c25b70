"""Loaders with random numbers that no seed decides: drawn while this module is imported, in an async generator, or in
worker threads. The lines to be named are marked as in `planted`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

import asyncloader
from tests.integration.verification.planted import Rows, loader

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
