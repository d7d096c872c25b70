"""Loaders that are closed while workers are being replaced: old and new workers end, at any point of the epoch."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH, run_async
from tests.processes import own_children

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Mortal(Numbers):
    """Each process that reads it is killed by its third sample."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("kind", BOTH)
def test_close_while_workers_are_replaced(kind: str, method: str) -> None:
    """`close` ends old and new workers, at any point of the epoch and of a worker's replacement."""
    options: dict[str, Any] = {
        "num_workers": 2,
        "seed": 5,
        "max_worker_restarts": 1000,
        "multiprocessing_context": method,
    }
    before = set(own_children())

    def take(count: int) -> list[float]:
        with DataLoader[Any](Mortal(40), **options) as loader:
            return [float(batch[0, 0]) for batch, _ in zip(loader, range(count), strict=False)]

    async def take_async(count: int) -> list[float]:
        got: list[float] = []
        async with AsyncDataLoader[Any](Mortal(40), **options) as loader:
            async for batch in loader:
                got.append(float(batch[0, 0]))
                if len(got) == count:
                    break
        return got

    counts = [1, 2, 3, 4, 5, 6, 8, 13, 40] if method == "fork" else [1, 3, 7]
    for count in counts:
        got = take(count) if kind == "sync" else run_async(take_async(count))
        assert got == [100.0 * i for i in range(count)]
        assert set(own_children()) <= before
