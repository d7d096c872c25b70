"""The samples that are left of an epoch, and their order: no sample twice, none lost, whatever the orders before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.errors import StateError
from asyncloader.remote.stream_order import LANES, MOST_BEFORE, OrderBefore, StreamOrder, order_of, read_before, rest_of
from tests.drawn import scaled
from tests.unit.remote.stream_parts import parts_of

Sample = tuple[int, int]


def samples_of(order: StreamOrder, first: int, last: int) -> list[Sample]:
    """The samples at these positions, as shards and numbers in them: read as `StreamBlocks` reads them."""
    found: list[Sample] = []
    for stream, block, start, stop in parts_of(order, range(first, last)):
        numbers: list[Sample] = []
        for segment in order.segments(stream, block.first):
            numbers += [(segment.shard, number) for number in segment.numbers()]
            if len(numbers) >= block.size:
                break
        arranged = order.arranged(stream, block)
        found += [numbers[place] for place in arranged[start:stop]]
    return found


ORDERS = st.builds(
    OrderBefore,
    batch=st.integers(1, 12),
    streams=st.integers(1, 5),
    shuffle_buffer=st.sampled_from([0, 1, 4, 9, 40]),
    shuffle_shards=st.booleans(),
    steps=st.integers(0, 12),
)


@settings(max_examples=scaled(300), deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.lists(ORDERS, min_size=1, max_size=5))
def test_no_sample_is_lost_or_comes_twice(counts: list[int], orders: list[OrderBefore]) -> None:
    """Each order gives a part, the last the rest; the stretches name the very samples that are left."""
    found: list[Sample] = []
    for number, now in enumerate(orders):
        order = order_of(np.array(counts), orders[:number], now, 7)
        assert order.total == sum(counts) - len(found)
        steps = now.steps if number < len(orders) - 1 else order.total
        found += samples_of(order, 0, min(order.total, steps * now.batch))
        left = [(each.shard, sample) for each in rest_of(order, steps) for sample in each.numbers()]
        everything = {(shard, sample) for shard, count in enumerate(counts) for sample in range(count)}
        assert len(left) == len(set(left))
        assert set(left) == everything - set(found)
    assert len(found) == len(set(found)) == sum(counts)


def test_few_stretches() -> None:
    """A thousand shards of ten thousand samples are not taken apart."""
    counts = np.full(1000, 10_000)
    order = order_of(counts, [], OrderBefore(256, 8, 1000, True, 0), 3)
    rest = rest_of(order, 10_000)
    assert sum(each.size for each in rest) == 10**7 - 2_560_000
    assert len(rest) < 1000 + 4 * LANES * 8
    assert sum(len(each.left_out) for each in rest) <= LANES * 8 * 1000


@pytest.mark.parametrize(
    "given",
    [
        None,
        [3],
        [[1, 2, 3]],
        [["1", 2, 3, True, 4]],
        [[0, 2, 3, True, 4]],
        [[1, 0, 3, True, 4]],
        [[1, 2, 3, 1, 4]],
        [[1 << 25, 2, 3, True, 4]],
        [[1 << 20, 1 << 20, 3, True, 4]],
        [[1, 2, 3, True, 4.0]],
        [[1, 2, 3, True, 4]] * (MOST_BEFORE + 1),
    ],
)
def test_orders_that_cannot_be(given: Any) -> None:
    """A state is refused before anything is computed from it."""
    with pytest.raises(StateError, match="the state is broken: its earlier orders"):
        read_before(given)
