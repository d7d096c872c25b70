"""The way of a batch from a node's worker process over TCP to a loader's user is bounded: calls, and changes of file.

The node runs in a thread of this process, and its worker process counts its own calls. Between two batches the loader
waits until all tasks are answered, so that each round of the three parts, from a delivery or a task to the next, has
one batch. The bounds are the figures that were reached. A change that exceeds them has put calls on the way of each
served batch: the failed assertion lists the functions that were called, and how often.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import asyncloader
from asyncloader import AsyncDataLoader
from asyncloader.service.node.admission import Served
from asyncloader.service.node.server import Node
from tests.helpers.counting import Calls, Count

BATCHES = 80
SIZE = 4
OUTSTANDING = 3  # `prefetch_factor`, and two on the way


class CountedRows(Dataset[torch.Tensor]):
    """Small samples. The first sample starts a count of calls; the last writes the count of each task to a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._calls: Calls | None = None
        self._made = 0

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._calls is None:
            self._calls = Calls()
            sys.setprofile(self._calls)
        self._made += 1
        if self._made == len(self):
            sys.setprofile(None)
            self._path.write_bytes(pickle.dumps(self._calls.rounds("TaskRunner.task", threading.get_ident())))
        return torch.full((50,), float(index))


@asyncloader.definition
def counted_rows(path: str) -> Any:
    """The dataset that the node serves."""
    return CountedRows(path)


@contextmanager
def node_thread() -> Generator[tuple[str, int]]:
    """Run a node in a thread. Gives its address, and the thread's id."""
    begun: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        node = Node([Served(f"{__name__}:counted_rows", counted_rows, open=True)], 1)
        await node.start()
        ended = asyncio.Event()
        begun.set_result((await node.listen("tcp://127.0.0.1:0"), asyncio.get_running_loop(), ended))
        await ended.wait()
        await node.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, ended = begun.result()
    assert thread.ident is not None
    try:
        yield address, thread.ident
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


async def turn_of_the_loop() -> None:
    await asyncio.sleep(0)


async def read(address: str, path: Path, calls: Calls) -> None:
    """Read an epoch; take each batch when all tasks under way are answered."""
    options: dict[str, Any] = {"batch_size": SIZE, "seed": 1, "num_workers": 1, "prefetch_factor": 1}
    taken = 0
    async with AsyncDataLoader[Any](counted_rows(path=str(path)), **options, workers=address) as loader:
        async for _ in loader:
            taken += 1
            while calls.number("Pipeline.on_answer") < min(taken + OUTSTANDING, BATCHES):
                await turn_of_the_loop()


def least(rounds: list[Count]) -> Count:
    """Return the count of a steady batch: some rounds also have a ping, a figure for the statistics, or a closer
    look, and some steps are missing at the epoch's beginning and end.
    """
    return min(rounds[BATCHES // 8 : BATCHES // 2])


def test_the_way_of_a_served_batch_is_short(tmp_path: Path) -> None:
    """It needs no more calls of our code, changes of file, and files, than when the bounds were set."""
    calls, path = Calls(), tmp_path / "rounds"
    with calls.installed(), node_thread() as (address, node):
        asyncio.run(read(address, path, calls))
    parts = {
        "loader": least(calls.rounds("Consumer.deliver", threading.get_ident())),
        "node": least(calls.rounds("RelayedConnection._task", node)),
        "worker": least(pickle.loads(path.read_bytes())),
    }
    text = "\n\n".join(f"{name}: {count}" for name, count in parts.items())
    files = frozenset[str]().union(*(count.files for count in parts.values()))
    figures = sum(count.calls for count in parts.values()), sum(count.changes for count in parts.values()), len(files)
    assert all(figure <= bound for figure, bound in zip(figures, BOUNDS, strict=True)), f"{figures}\n\n{text}"


BOUNDS = 262, 168, 45
"""Calls, changes of file, and files, of the loader, the node and the worker process together. On an idle machine they
are 254, 161 and 44; on a busy one a step may be read in two parts, in every round."""
