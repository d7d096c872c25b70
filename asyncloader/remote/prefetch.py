"""Opens the next shard ranges early, and buffers the bytes of a stream.

Data path: transport -> reading (`StreamBuffer`) -> [prefetch: `RangePrefetcher`, `RangeReading`] -> worker_stream.

Opening a shard takes a round trip or two. `RangePrefetcher` opens the ranges after the current range early, so that a
worker does not wait at the end of each range.

`StreamBuffer` is one task that fetches the bytes of one stream while the consumer parses, so that the network does not
wait for the CPU. The buffered bytes are bounded. The task ends with the stream or with `aclose`, never later.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from operator import itemgetter
from time import monotonic
from typing import Any

from asyncloader.base.shielding import retrieve_error, wait_until_done
from asyncloader.formats import Located, LocatedSamples, OnBad, Sample, ShardError
from asyncloader.remote.catalog import Shard
from asyncloader.remote.shard_splitting import CatalogRange, SegmentRange, bytes_left
from asyncloader.transports import TransportError

AnyRange = CatalogRange | SegmentRange

Open = Callable[[Shard, AnyRange, OnBad], AsyncGenerator[Sequence[Located], None]]
"""Opens a range for reading; the callback receives the bad samples that are skipped."""

MAX_PREFETCHED_RANGES = 16
"""Most ranges after the current range that are opened early. Many stores limit the rate of a connection: 48 shards of
256 KiB, with 2 MB/s per connection after 100 ms, take a worker 2.9 s with 4 ranges, and 1.4 s with 16."""


class RangeReading:
    """Reads one range.

    Args:
        open: opens the range.
        shard: the shard that the range belongs to.
        shard_range: the range.
    """

    def __init__(self, open: Open, shard: Shard, shard_range: AnyRange) -> None:
        self.shard_range = shard_range
        self._found: list[Located] | LocatedSamples = []  # what was read last
        self._further: Callable[[], LocatedSamples | None] | None = None  # makes the samples behind them
        self._taken = 0  # of them
        self.bad: deque[ShardError] = deque()
        """Bad samples before, between and after the samples that `take` returns next, with which they arrive."""
        self._reported: list[ShardError] = []
        self._stream = open(shard, shard_range, self._reported.append)
        self._begun: asyncio.Task[Sequence[Located]] | None = None
        self._running = False  # `more` is
        self._ran: asyncio.Future[None] | None = None  # `aclose` waits for the end of `more`
        self.outdated = False
        """The last error of `more` is a transport's error from before its call: the cause may have passed."""

    def begin(self) -> None:
        """Start to read the first samples, before they are needed."""
        self._begun = asyncio.ensure_future(anext(self._stream))
        self._begun.add_done_callback(retrieve_error)

    def take(self, most: int, limit: int | None) -> tuple[Sequence[Sample], Sequence[int]]:
        """Return up to `most` of the next samples, and the positions after them; none if `more` must read some.

        Args:
            most: at least 1.
            limit: only samples that end before this position. None: all.
        """
        found, at = self._found, self._taken
        end = min(at + most, len(found))
        if limit is not None and isinstance(found, LocatedSamples):
            end = bisect_left(found.resumes, limit, at, end)
        elif limit is not None:
            end = bisect_left(found, limit, at, end, key=itemgetter(1))
        taken = found[at:end]
        self._taken = end
        if end == len(found):
            self._found, self._taken = [], 0  # they are the caller's alone
        if isinstance(taken, LocatedSamples):
            return taken.samples, taken.resumes
        return [each[0] for each in taken], [each[1] for each in taken]

    async def more(self) -> None:
        """Read more samples, after `take` has returned those before, and extend `bad`.

        Raises:
            StopAsyncIteration: the range has no more samples.
            Exception: reading failed.
        """
        begun, self._begun = self._begun, None
        called = monotonic()
        self._running, self._further = True, None
        try:
            found = await (anext(self._stream) if begun is None else begun)
            if isinstance(found, LocatedSamples):
                self._found, self._further = found, found.further
            else:
                self._found = list(found)
            self._taken = 0
        except TransportError as error:
            self.outdated = error.made_at < called
            raise
        finally:
            self._running = False
            if self._ran is not None and not self._ran.done():
                self._ran.set_result(None)
            # Not earlier: the errors in a list that was read early must not be reported before its samples.
            self.bad.extend(self._reported)
            self._reported.clear()

    def more_at_once(self) -> bool:
        """Read more samples, like `more`, from bytes that have arrived. False: `more` must be called, which may raise
        an error.
        """
        found = None if self._further is None else self._further()
        if found is None:
            self._further = None
            return False
        self._found, self._taken = found, 0
        self.bad.extend(self._reported)
        self._reported.clear()
        return True

    async def aclose(self) -> None:
        """Stop reading. At the end of a loop, which cancels all tasks at once, another task may still be in `more`."""
        self._further = None
        begun, self._begun = self._begun, None
        running: list[asyncio.Future[Any]] = []
        if begun is not None:
            begun.cancel()
            running.append(begun)
        if self._running:
            self._ran = asyncio.get_running_loop().create_future()
            running.append(self._ran)
        try:
            # A generator that is running cannot be closed.
            await wait_until_done(running)
        finally:
            await self._stream.aclose()


class RangePrefetcher:
    """Opens the ranges after the current range early, in order.

    Args:
        shards: the catalog that the ranges refer to.
        open: opens a range.
        enough: no further range is opened while this number of bytes after the current position is open. A range of
            unknown size counts as that number.
    """

    def __init__(self, shards: Sequence[Shard], open: Open, enough: int) -> None:
        self._shards = shards
        self._open = open
        self._enough = enough
        self._readings: deque[RangeReading] = deque()

    def look(self, present: AnyRange, behind: Iterable[AnyRange]) -> None:
        """Open the ranges in `behind`, which follow the range `present`, as far as the limits allow. The ranges that
        are already open must be the first in `behind`.
        """
        near = self._bytes(present) or 0
        for number, shard_range in enumerate(behind):
            if number == MAX_PREFETCHED_RANGES or near >= self._enough:
                return
            size = self._bytes(shard_range)
            near += self._enough if size is None else size
            if number == len(self._readings):
                reading = RangeReading(self._open, self._shards[shard_range.shard], shard_range)
                reading.begin()
                self._readings.append(reading)

    def open(self, shard_range: AnyRange) -> RangeReading:
        """Return the reading of the next range, which may have been opened early."""
        # Not equal when a range is opened a second time, after an error.
        if self._readings and self._readings[0].shard_range == shard_range:
            return self._readings.popleft()
        return RangeReading(self._open, self._shards[shard_range.shard], shard_range)

    async def aclose(self) -> None:
        """Stop reading."""
        async with contextlib.AsyncExitStack() as stack:  # closes all, even if one raises
            while self._readings:
                stack.push_async_callback(self._readings.pop().aclose)

    def _bytes(self, shard_range: AnyRange) -> int | None:
        return bytes_left(self._shards[shard_range.shard], shard_range)


class StreamBuffer:
    """Starts to read `stream` at once, on the running loop. For one consumer, which must call `aclose`.

    Args:
        stream: the bytes; `aclose` closes it.
        most: limit of the buffered bytes, at least 1; the last chunk may exceed it.
        wanted: bytes that the consumer needs. After them a chunk is fetched only on demand. None: the consumer needs
            the whole stream.
    """

    def __init__(self, stream: AsyncGenerator[bytes, None], *, most: int, wanted: int | None = None) -> None:
        if most < 1:
            raise ValueError(f"read_ahead must be at least 1 byte, got {most}")
        self._most = most
        self._wanted = wanted
        self._chunks: deque[bytes] = deque()
        self.held = 0
        """Bytes in the buffer."""
        self._read = 0
        self._asked = False  # the consumer waits for a chunk
        self._room = asyncio.Event()
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run(stream), name="asyncloader-read-ahead")
        # The end of the task is news, too: `next` may be waiting for a chunk that never comes.
        self._task.add_done_callback(lambda _: self._news.set())

    async def next(self) -> bytes | None:
        """Return the next chunk, None at the end of the stream.

        Raises:
            Exception: the stream's error, after all chunks before it.
        """
        while (chunk := self.pop()) is None:
            if self._task.done():
                self._task.result()
                return None
            # Set before the wait: a chunk beyond `wanted` is fetched only for a consumer that waits. No chunk can come
            # between the check above and `clear`, because nothing in between lets the loop run.
            self._asked = True
            self._room.set()
            self._news.clear()
            await self._news.wait()
        return chunk

    def pop(self) -> bytes | None:
        """Return the next chunk, None if it has not arrived."""
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        self.held -= len(chunk)
        self._room.set()
        return chunk

    async def aclose(self) -> None:
        """Cancel the task, and wait until it has closed the stream, also if the caller is cancelled."""
        self._task.cancel()
        try:
            await wait_until_done([self._task])
        finally:
            if not self._task.cancelled():
                self._task.exception()  # retrieved, so that asyncio does not log it
            self._chunks.clear()
            self.held = 0

    async def _run(self, stream: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                self._chunks.append(chunk)
                self.held += len(chunk)
                self._read += len(chunk)
                # The consumer's request is answered: a chunk beyond `wanted` needs another request.
                self._asked = False
                self._news.set()
                while not self._may_read():
                    self._room.clear()
                    await self._room.wait()

    def _may_read(self) -> bool:
        if self._asked:
            return True
        return self.held < self._most and (self._wanted is None or self._read < self._wanted)
