"""The order of fixed streams: every sample once, each stream read from its beginning to its end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.remote.stream_order import LANES, StreamOrder
from tests.unit.remote.stream_parts import parts_of

counts_of_shards = st.lists(st.integers(0, 40), max_size=12)


def order_of(counts: list[int], batch: int, parts: int, buffer: int, key: int, *, shuffle: bool) -> StreamOrder:
    return StreamOrder(np.array(counts, np.int64), batch, parts, buffer, key, shuffle_shards=shuffle)


def samples_of(order: StreamOrder, stream: int, first: int, size: int) -> list[tuple[int, int]]:
    found = [
        (segment.shard, segment.first + number)
        for segment in order.segments(stream, first)
        for number in range(segment.size)
    ]
    return found[:size]


@given(
    counts_of_shards, st.integers(1, 30), st.integers(1, 40), st.integers(0, 70), st.integers(0, 1 << 63), st.booleans()
)
def test_each_sample_once(counts: list[int], batch: int, parts: int, buffer: int, key: int, shuffle: bool) -> None:
    """The positions are a permutation of the samples, in whatever pieces they are asked for."""
    order = order_of(counts, batch, parts, buffer, key, shuffle=shuffle)
    found = []
    for first in range(0, order.total, batch):
        for stream, block, start, stop in parts_of(order, range(first, min(first + batch, order.total))):
            assert 0 <= start < stop <= block.size
            read = samples_of(order, stream, block.first, block.size)
            found += [read[place] for place in order.arranged(stream, block)[start:stop]]
    assert sorted(found) == [(shard, number) for shard, count in enumerate(counts) for number in range(count)]
    assert order.total == sum(counts)


@given(counts_of_shards, st.integers(1, 30), st.integers(1, 40), st.integers(0, 70))
def test_streams_are_read_on(counts: list[int], batch: int, parts: int, buffer: int) -> None:
    """The positions take each stream from its first sample to its last, and its blocks one after the other."""
    order = order_of(counts, batch, parts, buffer, 7, shuffle=True)
    reached: dict[int, int] = {}
    for stream, first, size in order.runs(range(order.total)):
        assert first == reached.get(stream, 0)
        reached[stream] = first + size
    for stream, end in reached.items():
        assert end == order.stretch(stream)[1]
        block, at = order.block_at(stream, 0), 0
        while True:
            assert (block.first, block) == (at, order.block_at(stream, at + block.size - 1))
            at += block.size
            after = order.block_after(stream, block)
            if after is None:
                break
            assert (after.number, after.size <= max(2 * block.size, 1)) == (block.number + 1, True)
            block = after
        assert at == end


@given(counts_of_shards, st.integers(1, 12), st.data())
def test_any_positions(counts: list[int], ranks: int, data: st.DataObject) -> None:
    """A rank's part of a global batch, and single positions, are found where the whole batch is."""
    batch = 12
    order = order_of(counts, batch, 4, 20, 3, shuffle=True)
    whole = list(order.runs(range(order.total)))
    each = {
        place: (stream, first + number)
        for place, (stream, first, number) in enumerate(
            (stream, first, number) for stream, first, size in whole for number in range(size)
        )
    }
    places = data.draw(st.lists(st.integers(0, order.total - 1), max_size=20)) if order.total else []
    for positions in (places, range(0, order.total, ranks)):
        found = [(run.stream, run.first + number) for run in order.runs(positions) for number in range(run.size)]
        assert found == [each[position] for position in positions]


def test_a_lane_has_its_own_shards() -> None:
    """The batches of one lane are read from streams that no other lane reads."""
    order = order_of([50] * 40, 10, 5, 0, 1, shuffle=True)
    lanes: dict[int, set[int]] = {}
    for step in range(order.total // 10):
        runs = order.runs(range(step * 10, step * 10 + 10))
        lanes.setdefault(step % LANES, set()).update(run.stream for run in runs)
    assert [len(streams) for streams in lanes.values()] == [5] * LANES
    assert len(set.union(*lanes.values())) == 5 * LANES


def test_blocks_grow() -> None:
    """The first batch waits for its own samples only; then blocks double up to the buffer's part."""
    order = order_of([100_000], 64, 4, 1000, 1, shuffle=False)
    sizes, block = [], order.block_at(0, 0)
    for _ in range(7):
        sizes.append(block.size)
        following = order.block_after(0, block)
        assert following is not None
        block = following
    assert sizes == [16, 32, 64, 128, 250, 250, 250]


def test_large_numbers() -> None:
    """A position among 1e15 samples is found without those before it."""
    order = order_of([10**12] * 1000, 4096, 64, 10_000, 5, shuffle=True)
    (run,) = order.runs([10**15 - 4097])
    assert run.first < order.stretch(run.stream)[1]
    with pytest.raises(IndexError, match="position 1000000000000000 is out of range"):
        list(order.runs([10**15]))


def test_orders_stay_as_they_are() -> None:
    """A state that was saved by an earlier version goes on in the same order."""
    order = order_of([5, 0, 7, 4], 6, 2, 8, 11, shuffle=True)
    found = []
    for stream, block, start, stop in parts_of(order, range(order.total)):
        read = samples_of(order, stream, block.first, block.size)
        found += [read[place] for place in order.arranged(stream, block)[start:stop]]
    assert found == [
        (0, 1),
        (0, 0),
        (0, 2),
        (0, 3),
        (0, 4),
        (2, 0),
        (2, 1),
        (2, 2),
        (2, 3),
        (2, 4),
        (2, 5),
        (2, 6),
        (3, 2),
        (3, 1),
        (3, 0),
        (3, 3),
    ]
