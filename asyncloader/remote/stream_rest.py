"""Says which samples of an epoch are left after a number of global batches, and orders them anew. Pure.

Data path: a state -> [stream_rest] -> stream_order -> stream_blocks.

A run that resumes with other streams, or another global batch, cannot go on in the old order. The samples that were
read follow from the old order and the number of global batches alone: of each stream, the blocks before one of them,
and a part of that one. The others are stretches of shards, of which some lack samples. These stretches are to the new
order what the shards were to the old one. A state has the arguments of each order before, a few numbers, whatever was
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.errors import StateError
from asyncloader.remote.stream_order import LANES, Block, Segment, StreamOrder
from asyncloader.workers.fetch.seeding import derive

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
