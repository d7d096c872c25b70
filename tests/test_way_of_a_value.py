"""The way of a value through our code is bounded: calls, and changes from one file to another.

The bounds are the figures that were reached, rounded up. A change that exceeds a bound has put calls on the way of each
batch, or each epoch: the failed assertion lists the functions that were called, and how often.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from tests.helpers.counting import Calls, Count, counted

BATCHES = 40


class Rows(Dataset[dict[str, Any]]):
    """A dataset of small samples, as dictionaries."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)]), "label": index}


def loader_of(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork", **options)


def loop_of(loader: DataLoader[Any]) -> Any:
    return loader._asyncloader_state.bridge._loop


def settle(loop: Any, iterator: Any) -> None:
    """Wait until all batches that the worker may have ready are ready, and the loop's thread rests."""
    full = False
    while True:
        # This runs after the callbacks that are queued: the last batch becomes ready within a callback.
        reached = threading.Event()
        loop.call_soon_threadsafe(reached.set)
        reached.wait()
        if full:
            return
        full = len(iterator._queue) == 2


def steady_batch() -> Count:
    """Count the calls of a batch of many, in the main process: from taking it until the next batch is ready. Returns
    the least count, as now and then a batch that took long is examined more closely.
    """
    calls, counts = Calls(), list[Count]()
    with calls.installed(), loader_of() as loader:
        iterator = iter(loader)
        loop = loop_of(loader)
        for _ in range(BATCHES):
            settle(loop, iterator)
            calls.forget()
            next(iterator)
            settle(loop, iterator)
            counts.append(calls.count())
        del iterator
    return min(counts[10:])


def inline_batch() -> Count:
    """Count the calls of a batch of many without workers. Returns the least count: now and then a batch is measured
    more closely.
    """
    calls, counts = Calls(), list[Count]()
    with DataLoader(Rows(), batch_size=4) as loader, calls.installed():
        for _ in loader:
            counts.append(calls.count())
            calls.forget()
    return min(counts[10:])


def second_iter(**options: Any) -> Count:
    """Count the calls of `iter()` of a loader with persistent workers, from a state of the middle of its first
    epoch: those of the caller's thread until it has the iterator, the start of a worker included.
    """
    with loader_of(persistent_workers=True, shuffle=True, **options) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        loader.load_state_dict(loader.state_dict())
        del iterator
        calls = Calls()
        with calls.installed():
            iterator = iter(loader)
            count = calls.count(threading.get_ident())
            settle(loop_of(loader), iterator)
        del iterator
    return count


def constructor() -> Count:
    """Count the calls of the constructor of a loader with few options."""
    made: list[Any] = []  # keeps the loader: its finalizer does not count
    return counted(lambda: made.append(loader_of()))


@pytest.mark.parametrize(
    ("way", "calls", "changes"),
    [
        (steady_batch, 55, 40),
        (inline_batch, 43, 31),
        # Of these, 7 calls keep Ctrl-C from leaving the worker behind that is just being started.
        (second_iter, 220, 147),
        (partial(second_iter, seed=1), 378, 268),
        (constructor, 80, 21),
    ],
    ids=["batch", "batch without workers", "second iter", "second iter, seeded", "constructor"],
)
def test_the_way_is_short(way: Callable[[], Count], calls: int, changes: int) -> None:
    """It needs no more calls of our code, and changes of file, than when the bound was set."""
    with DataLoader[Any](Rows(), batch_size=4, num_workers=1, workers="threads") as threads:
        next(iter(threads))  # from the first worker thread on `get_worker_info` has two calls more
    way()  # some of this happens once per process
    count = way()
    assert count.calls <= calls, str(count)
    assert count.changes <= changes, str(count)
