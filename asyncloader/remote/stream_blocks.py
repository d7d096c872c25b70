"""Reads one stream, block by block, each in its own order.

Data path: stream_order -> [stream_blocks: prefetch -> segments -> blocks] -> fixed_streams.

`read_segments` reads the samples of a stream from any of its samples on. `StreamBlocks` collects them in blocks: the
blocks are read one after the other, and the block after the one that was asked for last is read ahead.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice, repeat, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.errors import is_about_sample
from asyncloader.formats import Sample, ShardError
from asyncloader.formats.rows import Rows, RowTable
from asyncloader.remote.catalog import CUSTOM, PARQUET, Shard
from asyncloader.remote.prefetch import Open, RangePrefetcher, RangeReading
from asyncloader.remote.sample_counts import Counted
from asyncloader.remote.sample_offsets import SampleOffsets
from asyncloader.remote.shard_splitting import SampleEdges, SegmentRange
from asyncloader.remote.stream_order import Block, Segment, StreamOrder
from asyncloader.shielding import shielded, wait_until_done


class TableRow(NamedTuple):
    """A sample that is a row of a table, and is made when it is needed."""

    table: RowTable
    row: int


_as_row = partial(tuple.__new__, TableRow)
"""`TableRow._make`, without a call in Python for each row."""

Element = Sample | TableRow | Exception
"""A sample, or the error by which it could not be read."""

OPEN_AHEAD = 2 << 20
"""The next shard of a stream is opened when at most this number of bytes of the current one is left. A worker reads
many streams: each round trip is one of many."""

_ERRORS = 1024  # in a list

_KEPT = 2  # as many times the samples of a call, before it, are kept

_DROPPED = 32  # samples that are dropped together, at least


class Shards:
    """The shards of an epoch, and how they are read.

    Args:
        shards: the catalog.
        counted: the count of each shard's samples.
        open: opens a range of a shard.
        offsets: finds where samples begin.
    """

    def __init__(self, shards: Sequence[Shard], counted: Sequence[Counted], open: Open, offsets: SampleOffsets) -> None:
        self.shards = shards
        self.open = open
        self._counted = counted
        self._offsets = offsets

    async def range_of(self, segment: Segment) -> SegmentRange:
        """Return the range to read for a segment.

        Raises:
            ShardError: the table of an MDS shard is damaged.
            TransportError: the table or the index of the shard cannot be read.
        """
        shard, counted = self.shards[segment.shard], self._counted[segment.shard]
        return self._range(segment, await self._offsets.find(shard, counted) if self._is_cut(segment) else None)

    def range_known(self, segment: Segment) -> SegmentRange | None:
        """Return the range to read for a segment; None: something must be read to know it."""
        shard, counted = self.shards[segment.shard], self._counted[segment.shard]
        if not self._is_cut(segment):
            return self._range(segment, None)
        return None if self._offsets.must_read(shard, counted) else self._range(segment, self._offsets.known(shard))

    def _is_cut(self, segment: Segment) -> bool:
        """Whether reading less than the shard saves anything: one that is compressed is read from its beginning on."""
        ends_inside = segment.first + segment.span < self._counted[segment.shard].samples
        return segment.first > 0 or (ends_inside and not _is_compressed(self.shards[segment.shard]))

    def _range(self, segment: Segment, offsets: npt.NDArray[np.int64] | None) -> SegmentRange:
        """Return the range from the last known position before a segment to the first behind it."""
        number, first, size = segment.shard, segment.first, segment.span
        stop, counted = first + size, self._counted[number]
        if self.shards[number].format == PARQUET:
            return SegmentRange(number, first, stop, most=size)
        if offsets is None:
            before, after = counted.before(first), counted.after(stop)
            end = None if after is None else after.offset
            return SegmentRange(number, before.offset, end, skip=first - before.number, most=size)
        # What lies before the first sample and behind the last is for the shard's reader to check.
        start = int(offsets[first]) if first else 0
        end = int(offsets[stop]) if stop < counted.samples else None
        # A copy: the table of the whole shard is not kept for the samples of a part.
        edges = None if _is_compressed(self.shards[number]) else SampleEdges(offsets[first : stop + 1].copy())
        return SegmentRange(number, start, end, most=size, edges=edges)


def _is_compressed(shard: Shard) -> bool:
    return (shard.format.compression if shard.mds is None else shard.mds.compression) is not None


async def read_segments(shards: Shards, segments: Iterator[Segment]) -> AsyncGenerator[list[Element], None]:
    """Read segments one after the other. Those after the first mostly begin with their shard.

    Yields:
        Non-empty lists of samples in order. A sample that cannot be read is replaced by its error.

    Raises:
        TransportError: the store cannot be read, and the error is not about the samples.
    """
    ahead = RangePrefetcher(shards.shards, shards.open, OPEN_AHEAD)
    next_few = list(islice(segments, 4))
    early: dict[Segment, SegmentRange] = {}  # what may have been opened; of the next few, in their order
    async with aclosing(ahead):
        while next_few:
            segment = next_few.pop(0)
            next_few += islice(segments, 1)
            try:
                shard_range = early.pop(segment, None) or await shards.range_of(segment)
            except Exception as error:
                if not is_about_sample(error):
                    raise
                # The shard's samples alone: the stream goes on at the beginning of the next shard.
                for errors in _repeated(error, segment.size):
                    yield errors
                continue
            reading = ahead.open(shard_range)
            # Only what begins with its shard: where another begins may have to be read first.
            for each in takewhile(lambda each: not each.first, next_few[len(early) :]):
                if (known := shards.range_known(each)) is None:
                    break
                early[each] = known
            ahead.look(shard_range, early.values())
            shard = shards.shards[segment.shard]
            # All other readers begin behind these samples.
            skip = shard_range.skip if shard.format == CUSTOM else 0
            read = _read_segment(reading, shard, segment, skip)
            async with aclosing(reading), aclosing(read) as found:
                async for elements in found:
                    yield elements


async def _read_segment(
    reading: RangeReading, shard: Shard, segment: Segment, skip: int
) -> AsyncGenerator[list[Element], None]:
    left = segment.span
    without = segment.left_out
    while left:
        found = _taken(reading, skip + left)
        begin = segment.span - left
        if not found:
            missing = left - sum(number >= begin for number in without)
            try:
                await reading.more()
            except StopAsyncIteration:
                if not reading.bad:
                    why = f"the shard has fewer samples than were counted: {left} are missing; it was replaced, or cut"
                    for errors in _repeated(ShardError(why, url=shard.url), missing):
                        yield errors
                    return
            except Exception as error:
                if not is_about_sample(error):
                    raise
                for errors in _repeated(error, missing):
                    yield errors
                return
            continue
        skipped = min(skip, len(found))
        skip -= skipped
        found = found[skipped:]
        left -= len(found)
        if without:
            found = [each for number, each in enumerate(found, begin) if number not in without]
        if found:
            yield found


def _repeated(error: Exception, count: int) -> Iterator[list[Element]]:
    """Yield an error for each of `count` samples, some at a time: a damaged index may promise any number."""
    for first in range(0, count, _ERRORS):
        yield [copied(error)] * min(_ERRORS, count - first)


def _taken(reading: RangeReading, most: int) -> list[Element]:
    """Take at most `most` of the samples and errors that were read, in their order in the shard."""
    bad = reading.bad
    if not bad:
        return _elements(reading.take(most, None)[0])
    taken: list[Element] = []
    while len(taken) < most:
        samples = _elements(reading.take(most - len(taken), bad[0].resume if bad else None)[0])
        taken += samples
        if not samples:
            if not bad:
                break
            taken.append(bad.popleft())
    return taken


def _elements(samples: Sequence[Sample]) -> list[Element]:
    if isinstance(samples, Rows):
        return [*map(_as_row, zip(repeat(samples.table), samples.within, strict=False))]
    return [*samples]


def copied(error: Exception) -> Exception:
    """Return an error of its own to raise: a raised error collects notes and frames."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:  # a user's class
        return error


class StreamBlocks:
    """Reads one stream from one of its blocks on, each block in its order. Several calls of `read` may wait at a time.

    Args:
        order: of the epoch.
        stream: its number.
        first: a sample of the block at which to begin.
        shards: how shards are read.
    """

    def __init__(self, order: StreamOrder, stream: int, first: int, shards: Shards) -> None:
        self._order = order
        self._stream = stream
        self._shards = shards
        self._next = order.block_at(stream, first)
        self._near = order.parts
        self.users = 0
        """Calls that use this reader now; it must not be closed while there are any."""
        self._ended = False
        self._held: list[Element] = []  # the loaded blocks one after the other, each in its order
        self._first = self._next.first  # number of the first sample that is held
        self._last = self._next.first  # that of the first sample of the last block
        self._elements: AsyncGenerator[list[Element], None] | None = None
        self._read: list[Element] = []  # behind the last block that is complete
        self._loading: asyncio.Task[None] | None = None

    def serves(self, first: int) -> bool:
        """Whether a sample is loaded, or will be soon: each part of a global batch may need a block of its own."""
        if self._first <= first < self._first + len(self._held):
            return True
        if self._ended or first < self._next.first:
            return False
        return self._order.block_at(self._stream, first).number <= self._next.number + self._near

    def found(self, first: int, stop: int) -> list[Element] | None:
        """Return the samples ``[first, stop)`` of the stream's order; None: they must be waited for, in `read`."""
        held, at, end = self._held, first - self._first, stop - self._first
        if at < 0 or end > len(held):
            return None
        self.prepare(stop)
        found = held[at:end]
        # Two batches in progress may need samples that lie next to each other.
        if (done := at - _KEPT * (end - at)) > _DROPPED and 2 * done > len(held):
            del held[:done]
            self._first += done
        return found

    async def read(self, first: int, stop: int) -> list[Element]:
        """Return the samples ``[first, stop)`` of the stream's order.

        Raises:
            TransportError: the store cannot be read. The next call tries again.
        """
        while (found := self.found(first, stop)) is None:
            if first < self._first:
                # They were dropped, for another call that is farther.
                again = StreamBlocks(self._order, self._stream, first, self._shards)
                async with aclosing(again):
                    return await again.read(first, stop)
            self.prepare(stop)
            loading = self._loading
            assert loading is not None
            try:
                await shielded(loading)
            finally:
                del loading  # its error refers to this frame
        return found

    def prepare(self, stop: int) -> None:
        """Begin to load the next block if samples up to `stop` are in the last one or behind it."""
        if stop > self._last and not self._ended and (self._loading is None or self._loading.done()):
            self._loading = asyncio.create_task(self._load(), name="asyncloader-block")
            self._loading.add_done_callback(_retrieve)

    async def _load(self) -> None:
        block, read = self._next, self._read
        if self._elements is None:
            read.clear()
            self._elements = read_segments(self._shards, self._order.segments(self._stream, block.first))
        try:
            while len(read) < block.size:
                read += await anext(self._elements)
        except BaseException:
            # Ended by the error, or by a cancellation: reading begins anew, at this block.
            self._elements = None
            raise
        # All blocks whose samples are there already: they take no more memory, and no task each.
        taken = 0
        after: Block | None = block
        while after is not None and taken + after.size <= len(read):
            if self._order.shuffled:
                self._held += [read[taken + place] for place in self._order.arranged(self._stream, after)]
            else:
                # As many of them as there are, all of one size, in the order in which they were read.
                after = self._order.last_block(self._stream, after, len(read) - taken)
                self._held += read[taken : after.first + after.size - block.first]
            taken = after.first + after.size - block.first
            self._last = after.first
            after = self._order.block_after(self._stream, after)
        del read[:taken]
        if after is None:
            self._ended = True
        else:
            self._next = after

    async def aclose(self) -> None:
        """Stop reading."""
        loading, self._loading = self._loading, None
        if loading is not None and not loading.done():
            loading.cancel()
            await wait_until_done([loading])
        elements, self._elements = self._elements, None
        self._held.clear()
        self._read.clear()
        if elements is not None:
            await elements.aclose()


def _retrieve(loading: asyncio.Task[None]) -> None:
    """Mark the error as retrieved, so that asyncio does not log it: a block that is asked for raises it."""
    if not loading.cancelled():
        loading.exception()
