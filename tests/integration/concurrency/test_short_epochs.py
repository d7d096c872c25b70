"""Without workers an `AsyncDataLoader` remembers from epoch to epoch where a blocking dataset is best called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.epoch import thread_or_loop
from asyncloader.epoch.thread_or_loop import HOLD_SECONDS
from tests.helpers.running import run_async


class Calls(Dataset[Any]):
    """Two samples, made by a function of their index. Records the thread of each call."""

    def __init__(self, function: Callable[[int], int]) -> None:
        self.function = function
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.threads.append(threading.current_thread())
        return self.function(index)


@pytest.mark.parametrize("slow_first", [False, True])
def test_epochs_of_few_batches_are_made_on_the_loop(slow_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader remembers what the epochs before have shown; where their first batches took long, each first batch is
    made in a thread. Also the first batch on the loop is of the epoch that was set after `aiter`.
    """
    worked = 0.0

    def make(index: int) -> int:
        nonlocal worked
        worked += 2 * HOLD_SECONDS * (slow_first and len(dataset.threads) == 1)
        return index

    # The thread's clock is the dataset's, and no batch seems to wait.
    monkeypatch.setattr(thread_or_loop, "thread_time", lambda: worked)
    monkeypatch.setattr(thread_or_loop, "_waits", lambda: 0)
    dataset = Calls(make)
    options: dict[str, Any] = {"batch_size": None, "shuffle": True, "seed": 1}
    places: list[list[bool]] = []

    async def run() -> None:
        loader, same = AsyncDataLoader[Any](dataset, **options), DataLoader[Any](Calls(int), **options)
        for epoch in range(16, 8, -1):
            batches = aiter(loader)
            loader.set_epoch(epoch)
            same.set_epoch(epoch)
            dataset.threads.clear()
            assert [int(batch) async for batch in batches] == list(same)
            places.append([thread is threading.main_thread() for thread in dataset.threads])

    run_async(run())
    here = [True, True]
    assert places[0] == [False, False]
    assert places[-1] == ([False, True] if slow_first else here)
    assert (here in places) is not slow_first
