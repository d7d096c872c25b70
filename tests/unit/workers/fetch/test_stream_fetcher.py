"""Streams in batches: the end, several tasks at a time, and the numbers by which samples are seeded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.sample import SampleMaker
from asyncloader.workers.fetch.seeding import EpochSeeding, SampleSeeder
from asyncloader.workers.fetch.stream_fetcher import StreamFetcher
from tests.unit.workers.fetch.drawing import at_sample, drawn


class AsyncStream(IterableDataset[int]):
    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error

    def __iter__(self) -> Iterator[int]:
        raise TypeError("read it with async for")

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self.count):
            await asyncio.sleep(0)
            yield index
        if self.error is not None:
            raise self.error


def fetcher(dataset: Any, *, auto: bool = True, drop_last: bool = False) -> StreamFetcher:
    return StreamFetcher(aiter(dataset), SampleMaker(None, asynchronous=True), auto, lambda data: data, drop_last)


async def test_concurrent_tasks_share_a_stream_in_their_order() -> None:
    """Several tasks in hand read the stream one after the other."""
    f = fetcher(AsyncStream(5))
    got = await asyncio.gather(*(f.fetch_async([0, 1]) for _ in range(4)), return_exceptions=True)
    assert got[:3] == [[0, 1], [2, 3], [4]]
    assert isinstance(got[3], EndOfData)


# --------------------------------------------------------------------------------------------------- seeded mode


def numbers(start: int, count: int) -> Iterator[Any]:
    for value in range(start, start + count):
        yield value, drawn()


def seeded(stream: Any, read: int = 0, *, asynchronous: bool = False) -> StreamFetcher:
    maker = SampleMaker(None, EpochSeeding(SampleSeeder(1, 0, 4), None, 1), asynchronous=asynchronous)
    return StreamFetcher(stream, maker, False, lambda sample: sample, read=read)


def test_an_error_in_a_stream_is_not_a_sample() -> None:
    """A sample that failed has no number; the next sample, if there is one, has it."""

    class Stumbling:
        tries = 0

        def __next__(self) -> Any:
            self.tries += 1
            if self.tries == 2:
                raise OSError("once")
            return drawn()

    stream = seeded(Stumbling())
    assert stream.fetch(None) == at_sample(0, 4)
    with pytest.raises(OSError, match="once"):
        stream.fetch(None)
    assert stream.fetch(None) == at_sample(1, 4)
