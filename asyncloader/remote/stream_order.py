"""Says which sample is at each position of an epoch's order, and which stream it is read from. Pure.

Data path: sample_counts -> [stream_order] -> stream_blocks -> fixed_streams.

The samples of all shards are counted, so the order of an epoch is a function of the counts, the global batch, the
number of streams and a key; workers and ranks have no part in it. The shards, in the epoch's order, are one sequence of
samples. It is cut into `LANES` lanes, and each lane into `parts` streams:

    global batch    0  1  2  3  4  5  6  7  8  9 ...     LANES = 8
    lane            0  1  2  3  4  5  6  7  0  1 ...

    a global batch  [ part 0 | part 1 | part 2 | ... ]   part s comes from stream s of the batch's lane

A worker that makes the batches of a lane, for a rank that has some of the parts, so reads streams that no other reads,
each from its beginning to its end. Any other division of the work gives the same batches: a stream is then read by more
than one process, each of which skips the samples of the others. The samples after the last full global batch are a
stream of their own.

Within its stream a sample moves by less than a block: a stream is cut into blocks, each in a random order of its own
(see `remote.shuffle`). The first blocks are smaller, so that the first batch waits only for its own samples.

A run that resumes with other streams, or another global batch, cannot go on in the old order. The samples that were
read follow from the old order and the number of global batches alone: of each stream, the blocks before one of them,
and a part of that one. The others are stretches of shards, of which some lack samples. These stretches are to the new
order (`RestOrder`) what the shards were to the old one. A state has the arguments of each order before, a few numbers,
whatever was read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.errors import StateError
from asyncloader.samplers.permutation import Permutation, hashed
from asyncloader.workers.fetch.seeding import derive

LANES = 8
"""Global batches in a row that are read from different streams. Workers whose number divides it share them evenly."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's: the numbers that it hashes in turn


class StreamRun(NamedTuple):
    """Consecutive samples of a stream, from number `first` on."""

    stream: int
    first: int
    size: int


class Block(NamedTuple):
    """A stretch of a stream that is shuffled, and read, as one: its number, its first sample, its samples."""

    number: int
    first: int
    size: int


class Segment(NamedTuple):
    """Samples of a shard, from number `first` on.

    Attributes:
        shard: its number.
        first: the first sample.
        size: number of samples.
        left_out: samples behind the first, counted from it, that do not belong to it, ascending; mostly none.
    """

    shard: int
    first: int
    size: int
    left_out: tuple[int, ...] = ()

    @property
    def span(self) -> int:
        """Samples of the shard from the first to the last."""
        return self.size + len(self.left_out)

    def numbers(self) -> list[int]:
        """Return the numbers of its samples in the shard."""
        without = set(self.left_out)
        return [self.first + number for number in range(self.span) if number not in without]


class StreamOrder:
    """The order of one epoch.

    Args:
        counts: samples in each shard.
        batch: samples in a global batch, at least 1.
        parts: streams that a global batch is read from; at most `batch` of them are used.
        buffer: samples of a lane that are shuffled together, about; 0: samples are not shuffled.
        key: seed of the orders.
        shuffle_shards: whether the shards are read in a random order.
    """

    def __init__(
        self, counts: npt.NDArray[np.int64], batch: int, parts: int, buffer: int, key: int, *, shuffle_shards: bool
    ) -> None:
        if batch < 1 or parts < 1 or buffer < 0:
            raise ValueError(f"no order of batch={batch}, parts={parts}, buffer={buffer}")
        self.batch = batch
        self.parts = min(parts, batch)
        self._buffer = 0 if not buffer else max(1, -(-buffer // self.parts))
        self._key = key
        shards = np.arange(len(counts), dtype=np.int64)
        self._shards = Permutation(len(counts), derive(key, "shards"))(shards) if shuffle_shards else shards
        self._ends = np.cumsum(counts[self._shards])
        self.total = int(self._ends[-1]) if len(counts) else 0
        """Samples in the epoch."""
        self._steps, self._rest = divmod(self.total, batch)
        self._bounds = [batch * part // self.parts for part in range(self.parts + 1)]
        self._stretches: dict[int, tuple[int, int]] = {}

    def runs(self, positions: Sequence[int]) -> list[StreamRun]:
        """Return the samples at these positions of the order, as runs of consecutive ones.

        Raises:
            IndexError: there is no such position.
        """
        found: list[StreamRun] = []
        at, end = 0, len(positions)
        # Mostly all of them follow each other.
        together = bool(end) and list(positions) == list(range(positions[0], positions[0] + end))
        while at < end:
            first = positions[at]
            after = end
            if not together:
                after = next((more for more in range(at + 1, end) if positions[more] != first + more - at), end)
            self._add_runs(found, first, after - at)
            at = after
        return found

    def _add_runs(self, found: list[StreamRun], first: int, count: int) -> None:
        """Add the runs of `count` positions from `first` on."""
        if first < 0 or first + count > self.total:
            wrong = first if first < 0 else max(first, self.total)
            raise IndexError(f"position {wrong} is out of range for an epoch of {self.total} samples")
        while count:
            step, within = divmod(first, self.batch)
            if step == self._steps:
                found.append(StreamRun(LANES * self.parts, within, count))
                return
            turn, lane = divmod(step, LANES)
            stop = min(within + count, self.batch)
            first, count = first + stop - within, count - (stop - within)
            part = bisect_right(self._bounds, within) - 1
            while within < stop:
                begin, after = self._bounds[part : part + 2]
                size = min(after, stop) - within
                found.append(StreamRun(lane * self.parts + part, turn * (after - begin) + within - begin, size))
                part, within = part + 1, within + size

    def _turns(self, lane: int) -> int:
        """Return the number of global batches that a lane has."""
        return (self._steps - lane + LANES - 1) // LANES

    def share(self, stream: int) -> int:
        """Return the number of samples that each global batch of a stream's lane takes from it."""
        part = stream % self.parts
        return self._bounds[part + 1] - self._bounds[part]

    def read_of(self, stream: int, steps: int) -> int:
        """Return the number of a stream's samples that the first `steps` global batches have."""
        lane = stream // self.parts
        if lane == LANES:
            return 0 if steps <= self._steps else self._rest
        turns = min(self._turns(lane), max(0, steps - lane + LANES - 1) // LANES)
        return turns * self.share(stream)

    def stretch(self, stream: int) -> tuple[int, int]:
        """Return where a stream begins in the sequence of all samples, and its number of samples."""
        found = self._stretches.get(stream)
        if found is None:
            found = self._stretches[stream] = self._stretch(stream)
        return found

    def _stretch(self, stream: int) -> tuple[int, int]:
        lane, part = divmod(stream, self.parts)
        if lane == LANES:
            return self._steps * self.batch, self._rest
        turns = self._turns(lane)
        before = self.batch * (self._steps // LANES * lane + min(lane, self._steps % LANES))
        first, stop = self._bounds[part], self._bounds[part + 1]
        return before + turns * first, turns * (stop - first)

    # -------------------------------------------------------------------------------------------- blocks

    def block_at(self, stream: int, first: int) -> Block:
        """Return the block that has sample `first` of a stream."""
        size = self._first_block(stream)
        number, start, most = 0, 0, self._buffer or size
        while size < most and start + size <= first:
            number, start, size = number + 1, start + size, min(2 * size, most)
        if size >= most:
            more = (first - start) // size
            number, start = number + more, start + more * size
        return Block(number, start, min(size, self.stretch(stream)[1] - start))

    def block_after(self, stream: int, block: Block) -> Block | None:
        """Return the block that follows; None after the last."""
        first = block.first + block.size
        return None if first >= self.stretch(stream)[1] else self.block_at(stream, first)

    @property
    def shuffled(self) -> bool:
        """Whether the blocks' samples are in another order than in the shards."""
        return bool(self._buffer)

    def arranged(self, stream: int, block: Block) -> list[int]:
        """Return the order in which a block's samples are delivered: for each place, the sample's number in it."""
        if not self._buffer:
            return list(range(block.size))
        # Sorted by a hash of 64 bits each, in which no two places of a block are alike. For some hundred places this
        # takes a tenth of the time of a `Permutation`, which finds single places of a large one.
        key = np.uint64(derive(self._key, "block", stream, block.number))
        hashes = hashed(np.arange(1, block.size + 1, dtype=np.uint64) * _STEP, key)
        order: list[int] = np.argsort(hashes, kind="stable").tolist()
        return order

    def _first_block(self, stream: int) -> int:
        share = self.share(stream)
        return min(share, self._buffer) if self._buffer else share

    # -------------------------------------------------------------------------------------------- segments

    def segments(self, stream: int, first: int) -> Iterator[Segment]:
        """Return the rest of a stream, from its sample `first` on, as segments of shards."""
        begin, size = self.stretch(stream)
        at, end = begin + first, begin + size
        # The first shard that ends after `at`: shards without samples are passed over.
        place = int(np.searchsorted(self._ends, at, side="right"))
        while at < end:
            stop = int(self._ends[place])
            if stop > at:
                shard = int(self._shards[place])
                start = int(self._ends[place - 1]) if place else 0
                yield Segment(shard, at - start, min(stop, end) - at)
                at = min(stop, end)
            place += 1


MOST_BEFORE = 32
"""Orders of an epoch: how often it can be resumed with other streams or another global batch."""

_MOST = 1 << 31  # bound of their numbers
_MOST_BATCH, _MOST_STREAMS = 1 << 24, 1 << 16  # bounds of the lists that are made of them


class OrderBefore(NamedTuple):
    """An order of which the epoch has had a part.

    Attributes:
        batch: samples in a global batch.
        streams: number of streams.
        shuffle_buffer: samples that are shuffled together.
        shuffle_shards: whether shards are shuffled.
        steps: global batches that were delivered.
    """

    batch: int
    streams: int
    shuffle_buffer: int
    shuffle_shards: bool
    steps: int


def read_before(given: Any) -> tuple[OrderBefore, ...]:
    """Return the orders before, from a state.

    Raises:
        StateError: they cannot be.
    """
    found: tuple[OrderBefore, ...] | None = None
    with suppress(TypeError):
        found = tuple(OrderBefore(*each) for each in given)
    if found is None or len(found) > MOST_BEFORE or not all(map(_is_possible, found)):
        raise StateError(f"the state is broken: its earlier orders are {given!r:.200}")
    return found


def _is_possible(before: OrderBefore) -> bool:
    numbers = before.batch, before.streams, before.shuffle_buffer, before.steps
    if type(before.shuffle_shards) is not bool or not all(type(each) is int and 0 <= each < _MOST for each in numbers):
        return False
    return 1 <= before.batch <= _MOST_BATCH and 1 <= before.streams <= _MOST_STREAMS


class RestOrder(StreamOrder):
    """The order of stretches of shards. Arguments as `StreamOrder`, with the stretches in place of the counts."""

    def __init__(
        self, pieces: Sequence[Segment], batch: int, parts: int, buffer: int, key: int, *, shuffle_shards: bool
    ) -> None:
        counts = np.fromiter((piece.size for piece in pieces), np.int64, len(pieces))
        super().__init__(counts, batch, parts, buffer, key, shuffle_shards=shuffle_shards)
        self._pieces = pieces

    def segments(self, stream: int, first: int) -> Iterator[Segment]:
        """Yield the segments of a stream, like `StreamOrder.segments`."""
        for segment in super().segments(stream, first):
            yield _part(self._pieces[segment.shard], range(segment.first, segment.first + segment.size))


def order_of(counts: npt.NDArray[np.int64], before: Sequence[OrderBefore], now: OrderBefore, key: int) -> StreamOrder:
    """Return an epoch's order, after the parts of other orders.

    Args:
        counts: samples in each shard.
        before: the orders before.
        now: the arguments of the order.
        key: of the epoch.
    """
    order: StreamOrder | None = None
    for number, each in enumerate([*before, now]):
        batch, streams, buffer, shuffle_shards, _ = each
        if order is None:
            order = StreamOrder(counts, batch, streams, buffer, key, shuffle_shards=shuffle_shards)
        else:
            pieces = rest_of(order, before[number - 1].steps)
            keyed = derive(key, "rest", number)
            order = RestOrder(pieces, batch, streams, buffer, keyed, shuffle_shards=shuffle_shards)
    assert order is not None
    return order


def rest_of(order: StreamOrder, steps: int) -> list[Segment]:
    """Return the samples that the first `steps` global batches do not have, as stretches of shards."""
    found: list[Segment] = []
    if steps * order.batch >= order.total:
        return found
    for stream in range(LANES * order.parts + 1):
        size = order.stretch(stream)[1]
        read = order.read_of(stream, steps)
        if read < size:
            found += _rest_of_stream(order, stream, order.block_at(stream, read), read)
    return found


def _rest_of_stream(order: StreamOrder, stream: int, block: Block, read: int) -> Iterator[Segment]:
    left = np.sort(np.array(order.arranged(stream, block)[read - block.first :], np.int64))
    at = 0  # the first sample of the segment, in the block
    for segment in order.segments(stream, block.first):
        end = min(at + segment.size, block.size)
        if at < end and (inside := left[np.searchsorted(left, at) : np.searchsorted(left, end)] - at).size:
            yield _part(segment, inside.tolist())
        behind = range(max(0, block.size - at), segment.size)
        if behind:
            yield _part(segment, behind)
        at += segment.size


def _part(segment: Segment, numbers: Sequence[int]) -> Segment:
    """Return the part of a segment that has its samples of these numbers, ascending."""
    if isinstance(numbers, range) and not segment.left_out:
        return Segment(segment.shard, segment.first + numbers[0], len(numbers))
    there = segment.numbers() if segment.left_out else range(segment.first, segment.first + segment.size)
    first, last = there[numbers[0]], there[numbers[-1]]
    wanted = {there[number] for number in numbers}
    without = tuple(number - first for number in range(first, last + 1) if number not in wanted)
    return Segment(segment.shard, first, len(numbers), without)
