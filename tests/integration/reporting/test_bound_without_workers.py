"""Without workers the verdict tells samples that compute from samples that wait, wherever they are made: in the
caller's thread, on the private event loop, on the user's, as a map dataset, as a stream, by an async sampler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.running import KINDS, run_async
from tests.verdicts.planted import AsyncPlanted, Planted, spin

SECONDS, LENGTH = 0.004, 96


class Stream(IterableDataset[int]):
    """A stream whose samples are awaited."""

    def __init__(self, waits: float, computes: float) -> None:
        self.waits, self.computes = waits, computes

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it has __aiter__")

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(LENGTH):
            await asyncio.sleep(self.waits)
            spin(self.computes)
            yield index


class AsyncBatches:
    """An async sampler."""

    def __len__(self) -> int:
        return LENGTH // 8

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        for first in range(0, LENGTH, 8):
            yield list(range(first, first + 8))


def planted(waits: float, computes: float) -> Any:
    return Planted(0, LENGTH, waits=waits, computes=computes)


def awaited(waits: float, computes: float) -> Any:
    return AsyncPlanted(0, LENGTH, waits=32 * waits, computes=computes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (planted, {"batch_size": 8}),
        (planted, {"batch_sampler": AsyncBatches()}),
        (awaited, {"batch_size": 8}),
        (Stream, {"batch_size": 8}),
    ],
    ids=["plain", "plain, async sampler", "async", "stream"],
)
@pytest.mark.parametrize(("bound", "waits", "computes"), [("fetch", SECONDS, 0.0), ("compute", 0.0, SECONDS)])
def test_the_verdict_without_workers(
    kind: str,
    dataset: Callable[[float, float], Any],
    options: dict[str, Any],
    bound: str,
    waits: float,
    computes: float,
) -> None:
    """Samples that wait are reads, samples that compute are computing."""
    loader: Any = (DataLoader if kind == "sync" else AsyncDataLoader)(dataset(waits, computes), **options)

    async def read() -> None:
        async for _ in loader:
            pass

    if kind == "sync":
        for _ in loader:
            pass
    else:
        run_async(read(), kind)
    found = loader.diagnose()
    assert found.bound == bound, found
