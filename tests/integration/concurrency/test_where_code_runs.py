"""In which thread and when the user's own code runs in the main process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.running import KINDS, run_async


class Recording:
    """A plain sampler that notes in which thread, and after how many deliveries, it was advanced."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.delivered = -1  # `iter` has not returned yet
        self.notes: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[int]:
        for i in range(self.n):
            self.notes.append((threading.get_ident(), self.delivered))
            yield i


def _advance(kind: str, workers: int) -> list[tuple[int, int]]:
    sampler = Recording(12)
    options: dict[str, Any] = {"sampler": sampler, "num_workers": workers}
    if workers:
        options["prefetch_factor"] = 2
    if kind in ("torch", "sync"):
        make = torch.utils.data.DataLoader if kind == "torch" else DataLoader
        batches: Any = iter(make(Numbers(12), **options))
        sampler.delivered = 0
        for _ in batches:
            sampler.delivered += 1
        return sampler.notes

    async def run() -> None:
        async with AsyncDataLoader[Any](Numbers(12), **options) as loader:
            batches = aiter(loader)
            sampler.delivered = 0
            async for _ in batches:
                sampler.delivered += 1

    run_async(run(), kind)
    return sampler.notes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_plain_samplers_are_advanced_as_torch_does(kind: str, workers: int) -> None:
    """In the caller's thread: at `iter` for the batches read ahead, then once in each `next`, never in between."""
    assert _advance(kind, workers) == _advance("torch", workers)
    assert {thread for thread, _ in _advance(kind, workers)} == {threading.get_ident()}


class Threads(Dataset[Any]):
    """Each sample is the thread that fetched it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return threading.get_ident()


def test_without_workers_the_facade_fetches_in_the_callers_thread() -> None:
    """Thread-bound handles of a dataset keep working, as in torch's loader."""
    assert {int(batch[0]) for batch in DataLoader[Any](Threads())} == {threading.get_ident()}
