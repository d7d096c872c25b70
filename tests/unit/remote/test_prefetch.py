"""`StreamBuffer`: bytes in order, bounded memory, and no task left. `RangeReading`: closed while it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from asyncloader.formats import Located, OnBad, ShardFormat
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import AnyRange, RangeReading, StreamBuffer
from asyncloader.remote.shard_splitting import CatalogRange


class Source:
    """A stream that counts the bytes taken from it."""

    def __init__(self, chunks: list[bytes], error: Exception | None = None) -> None:
        self.chunks = chunks
        self.error = error
        self.given = 0
        self.closed = asyncio.Event()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in self.chunks:
                await asyncio.sleep(0)
                self.given += len(chunk)
                yield chunk
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()


async def settle() -> None:
    """Run the event loop until no task can continue."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_gives_all_chunks_in_order_then_none() -> None:
    """After the last chunk `next` returns None each time."""
    ahead = StreamBuffer(Source([b"%d" % number for number in range(50)]).stream(), most=3)
    got = []
    while (chunk := await ahead.next()) is not None:
        got.append(int(chunk))
    assert got == list(range(50))
    assert await ahead.next() is None
    await ahead.aclose()


async def test_reads_ahead_so_far_and_no_further() -> None:
    """At most `most` bytes and the chunk that reaches `most` are held; a chunk that is taken makes room."""
    source = Source([bytes(10)] * 20)
    ahead = StreamBuffer(source.stream(), most=35)
    await settle()
    assert source.given == ahead.held == 40
    await ahead.next()
    await settle()
    assert (source.given, ahead.held) == (50, 40)
    await ahead.aclose()
    assert ahead.held == 0


async def test_beyond_what_is_wanted_it_reads_only_when_asked() -> None:
    """A range that ends inside the stream does not download bytes of other ranges."""
    source = Source([bytes(10)] * 20)
    ahead = StreamBuffer(source.stream(), most=1000, wanted=25)
    await settle()
    assert source.given == 30
    for _ in range(3):
        await ahead.next()
    await settle()
    assert source.given == 30
    assert await ahead.next() is not None
    await settle()
    assert source.given == 40
    await ahead.aclose()


async def test_an_error_comes_after_the_chunks_before_it() -> None:
    """Chunks before the error are returned first."""
    ahead = StreamBuffer(Source([b"a", b"b"], OSError("broken")).stream(), most=100)
    await settle()
    assert [await ahead.next(), await ahead.next()] == [b"a", b"b"]
    with pytest.raises(OSError, match="broken"):
        await ahead.next()
    await ahead.aclose()


async def test_closing_ends_the_stream() -> None:
    """The stream may be before its first chunk, in the middle, or waiting for room; an unseen error is not logged."""
    for steps in (0, 1, 3, 200):
        source = Source([bytes(10)] * 20, OSError("unseen"))
        ahead = StreamBuffer(source.stream(), most=25 if steps != 200 else 10_000)
        for _ in range(steps):
            await asyncio.sleep(0)
        started = source.given > 0
        await ahead.aclose()
        assert source.closed.is_set() or not started
        assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_close_still_closes() -> None:
    """The cancellation is raised once the stream is closed."""
    release = asyncio.Event()
    closing = asyncio.Event()

    async def stubborn() -> AsyncGenerator[bytes, None]:
        try:
            yield b"x"
            await asyncio.Event().wait()
        finally:
            closing.set()
            await release.wait()

    ahead = StreamBuffer(stubborn(), most=10)
    assert await ahead.next() == b"x"
    close = asyncio.create_task(ahead.aclose())
    await closing.wait()
    close.cancel()
    await settle()
    assert not close.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await close
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("early", [True, False])
async def test_closed_while_another_task_reads(early: bool) -> None:
    """The end of a loop cancels the task that reads and the task that closes in the same turn: the range is closed once
    it is not read any more.
    """
    closed = asyncio.Event()

    async def opened(shard: Shard, shard_range: AnyRange, on_bad: OnBad) -> AsyncGenerator[list[Located], None]:
        try:
            await asyncio.Event().wait()
            yield []
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            closed.set()

    reading = RangeReading(opened, Shard("file:///a.tar", ShardFormat("tar", None), None), CatalogRange(0, 0, None))
    if early:
        reading.begin()
    read = asyncio.create_task(reading.more())
    await settle()
    close = asyncio.create_task(reading.aclose())
    await settle()
    assert not close.done()
    # The task that closes is the first that runs.
    close.cancel()
    read.cancel()
    ended = await asyncio.gather(close, read, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
    assert closed.is_set()
    assert len(asyncio.all_tasks()) == 1
