"""Reads one stream, block by block, each in its own order.

Data path: stream_order -> [stream_blocks: prefetch -> segments -> blocks] -> fixed_streams.

`read_segments` reads the samples of a stream from any of its samples on. `StreamBlocks` collects them in blocks: the
blocks are read one after the other, and the block after the one that was asked for last is read ahead.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import islice, repeat, takewhile
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from asyncloader.base.shielding import retrieve_error, shielded, wait_until_done
from asyncloader.errors import is_about_sample
from asyncloader.formats import Sample, ShardError
from asyncloader.formats.rows import Rows, RowTable
from asyncloader.remote.catalog import CUSTOM, PARQUET, Shard
from asyncloader.remote.index_counts import SampleOffsets
from asyncloader.remote.prefetch import Open, RangePrefetcher, RangeReading
from asyncloader.remote.sample_counts import Counted
from asyncloader.remote.shard_splitting import SampleEdges, SegmentRange
from asyncloader.remote.stream_order import Block, Segment, StreamOrder


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
        offsets = None
        if self._is_cut(segment):
            offsets = await self._offsets.find(shard, counted.samples, counted.indexed)
        return self._range(segment, offsets)

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


async def read_segments(shards: Shards, segments: Iterator[Segment]) -> AsyncGenerator[SegmentReading, None]:
    """Read segments one after the other. Those after the first mostly begin with their shard.

    Yields:
        The reading of a segment, each time that it may have samples: they are to be taken before the next step.

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
            shard = shards.shards[segment.shard]
            try:
                shard_range = early.pop(segment, None) or await shards.range_of(segment)
            except Exception as error:
                if not is_about_sample(error):
                    raise
                # The shard's samples alone: the stream goes on at the beginning of the next shard.
                yield SegmentReading.failed(shard, segment, error)
                continue
            async with aclosing(ahead.open(shard_range)) as reading:
                # Only what begins with its shard, as all but the first mostly do.
                with suppress(Exception):  # raised in its turn
                    for each in takewhile(lambda each: not each.first, next_few[len(early) :]):
                        early[each] = await shards.range_of(each)
                ahead.look(shard_range, early.values())
                # All other readers begin behind these samples.
                skip = shard_range.skip if shard.format == CUSTOM else 0
                found = SegmentReading(reading, shard, segment, skip)
                while found.left:
                    await found.wait()
                    yield found


class SegmentReading:
    """The samples of one segment in order, those that cannot be read replaced by their errors.

    Args:
        reading: reads the shard.
        shard: the shard.
        segment: the segment.
        skip: samples that `reading` returns before those of the segment.
    """

    def __init__(self, reading: RangeReading | None, shard: Shard, segment: Segment, skip: int) -> None:
        self._reading = reading
        self._shard = shard
        self._segment = segment
        self._skip = skip
        self.left = segment.span
        """Samples of the shard that `wait` has to wait for."""
        self._errors: Iterator[list[Element]] = iter(())  # in place of the samples that are not waited for

    @classmethod
    def failed(cls, shard: Shard, segment: Segment, error: Exception) -> Self:
        """Return the reading of a segment of which nothing can be read."""
        found = cls(None, shard, segment, 0)
        found._fail(error)
        return found

    def take(self) -> list[Element]:
        """Return some of the next samples, which are made without waiting; none: `wait` for them."""
        reading, segment = self._reading, self._segment
        while self.left and reading is not None:
            found = _taken(reading, self._skip + self.left)
            if not found:
                if reading.more_at_once():
                    continue
                return found
            if self._skip:
                skipped = min(self._skip, len(found))
                self._skip -= skipped
                found = found[skipped:]
            begin = segment.span - self.left
            self.left -= len(found)
            if segment.left_out:
                found = [each for number, each in enumerate(found, begin) if number not in segment.left_out]
            if found:
                return found
        return next(self._errors, [])

    async def wait(self) -> None:
        """Wait for further samples, after `take` has returned none.

        Raises:
            TransportError: the store cannot be read, and the error is not about the samples.
        """
        assert self._reading is not None
        try:
            await self._reading.more()
        except StopAsyncIteration:
            if not self._reading.bad:
                why = f"the shard has fewer samples than were counted: {self.left} are missing; it was replaced, or cut"
                self._fail(ShardError(why, url=self._shard.url))
        except Exception as error:
            if not is_about_sample(error):
                raise
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        begin = self._segment.span - self.left
        missing = self.left - sum(number >= begin for number in self._segment.left_out)
        # A copy: the error's traceback refers to frames, which refer to this object.
        self._errors, self.left = _repeated(copied(error), missing), 0


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
        self._segments: AsyncGenerator[SegmentReading, None] | None = None
        self._present: SegmentReading | None = None  # of the segment that is read; None while it is waited for
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
        if at < 0:
            return None
        while end > len(held):
            if not self._take_some():
                return None
        if stop > self._last:
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
        """Load some of the next block, or begin to, if samples up to `stop` are in the last one or behind it."""
        if stop <= self._last or self._ended or self._take_some():
            return
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load(), name="asyncloader-block")
            self._loading.add_done_callback(retrieve_error)

    def _take_some(self) -> bool:
        """Make some samples whose bytes have arrived: a task for a few of them would cost as much as they do."""
        if self._present is None or not (found := self._present.take()):
            return False
        self._read += found
        self._arrange()
        return True

    async def _load(self) -> None:
        if self._segments is None:
            self._read.clear()
            self._segments = read_segments(self._shards, self._order.segments(self._stream, self._next.first))
        try:
            while len(self._read) < self._next.size:
                if self._present is not None and (found := self._present.take()):
                    self._read += found
                    continue
                # Nothing may be taken meanwhile: the generator goes on with what was not taken.
                self._present = None
                self._present = await anext(self._segments)
        except BaseException:
            # Ended by the error, or by a cancellation: reading begins anew, at this block.
            self._segments = self._present = None
            raise
        self._arrange()

    def _arrange(self) -> None:
        """Add the blocks whose samples are all there to those that are held."""
        order, stream, read = self._order, self._stream, self._read
        if not order.shuffled:
            # In the order in which they were read, as many as there are.
            self._held += read
            read.clear()
            share, end, size = order.share(stream), self._first + len(self._held), order.stretch(stream)[1]
            self._last = end - share
            self._next = Block(end // share, end, min(share, size - end))
            self._ended = end >= size
            return
        taken, block = 0, self._next
        while taken + block.size <= len(read) and not self._ended:
            self._held += [read[taken + place] for place in order.arranged(stream, block)]
            taken += block.size
            self._last = block.first
            after = order.block_after(stream, block)
            block, self._ended = after or block, after is None
        del read[:taken]
        self._next = block

    async def aclose(self) -> None:
        """Stop reading."""
        loading, self._loading = self._loading, None
        if loading is not None and not loading.done():
            loading.cancel()
            await wait_until_done([loading])
        segments, self._segments, self._present = self._segments, None, None
        self._held.clear()
        self._read.clear()
        if segments is not None:
            await segments.aclose()
