from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports.ranges import ByteRange, Cut, ReadPlan, plan_ranges

SIZE = 200
CONTENT = random.Random(7).randbytes(SIZE)


@st.composite
def byte_ranges(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, SIZE))
    return start, draw(st.integers(0, min(40, SIZE - start)))


asked_ranges = st.lists(byte_ranges(), max_size=12)
gaps = st.integers(0, 30)
sizes = st.none() | st.integers(1, 80)


def read(plan: ReadPlan) -> list[bytes]:
    return [CONTENT[block.start : block.end] for block in plan.blocks]


def test_near_ranges_share_a_block() -> None:
    """The picture in the module: two near ranges are one read, the far range is another read."""
    plan = plan_ranges([(0, 7), (9, 5), (40, 9)], max_gap=2)
    assert plan.blocks == (ByteRange(0, 14), ByteRange(40, 9))
    assert plan.cuts == (Cut(0, 0, 7), Cut(0, 9, 5), Cut(1, 0, 9))


def test_gap_limit_is_exact() -> None:
    """A gap of `max_gap` bytes is read over, a gap of one byte more is not."""
    assert len(plan_ranges([(0, 1), (4, 1)], max_gap=3).blocks) == 1
    assert len(plan_ranges([(0, 1), (5, 1)], max_gap=3).blocks) == 2


def test_size_limit_is_exact() -> None:
    """A joined block may have `max_size` bytes, not one more."""
    assert plan_ranges([(0, 5), (5, 5)], max_size=10).blocks == (ByteRange(0, 10),)
    assert plan_ranges([(0, 5), (5, 6)], max_size=10).blocks == (ByteRange(0, 5), ByteRange(5, 6))


def test_a_long_range_is_not_split() -> None:
    """A range above `max_size` is one read, and serves the ranges inside of it."""
    plan = plan_ranges([(10, 5), (0, 100), (99, 1)], max_size=10)
    assert plan.blocks == (ByteRange(0, 100),)


def test_a_range_inside_another_costs_nothing() -> None:
    """Of two ranges that begin alike the longer serves both, even if it exceeds `max_size`."""
    plan = plan_ranges([(0, 4), (0, 100)], max_size=10)
    assert plan.blocks == (ByteRange(0, 100),)
    assert plan.cuts == (Cut(0, 0, 4), Cut(0, 0, 100))


def test_nothing_asked_nothing_read() -> None:
    """No ranges, or empty ranges, need no read."""
    assert plan_ranges([]) == ReadPlan((), ())
    plan = plan_ranges([(5, 0), (0, 0)])
    assert plan.blocks == ()
    assert plan.cut([]) == [b"", b""]


def test_an_answer_that_is_its_block_is_not_copied() -> None:
    """The bytes are passed on without a copy."""
    data = bytes(1000)
    (answer,) = plan_ranges([(50, 1000)]).cut([data])
    assert answer is data


@pytest.mark.parametrize(
    ("ranges", "options", "text"),
    [
        ([(-1, 2)], {}, "start and length of 0 or more, got \\(-1, 2\\)"),
        ([(0, 1), (1, -2)], {}, "start and length of 0 or more, got \\(1, -2\\)"),
        ([], {"max_gap": -1}, "max_gap must be 0 or more bytes, got -1"),
        ([], {"max_size": 0}, "max_size must be at least 1 byte, or None for no limit; got 0"),
    ],
)
def test_impossible_arguments(ranges: list[tuple[int, int]], options: dict[str, int], text: str) -> None:
    """Meaningless arguments are refused with their values."""
    with pytest.raises(ValueError, match=text):
        plan_ranges(ranges, **options)


def test_cut_checks_what_was_read() -> None:
    """Missing and short blocks are refused, not cut into wrong results."""
    plan = plan_ranges([(0, 4), (50, 4)])
    with pytest.raises(ValueError, match="the plan has 2 blocks, got the bytes of 1"):
        plan.cut([b"1234"])
    with pytest.raises(ValueError, match="block 1 must have 4 bytes, got 3"):
        plan.cut([b"1234", b"123"])


@given(asked_ranges, gaps, sizes)
def test_answers_are_the_slices(ranges: list[tuple[int, int]], gap: int, size: int | None) -> None:
    """For any plan the cuts are the slices that were asked for, in order."""
    plan = plan_ranges(ranges, max_gap=gap, max_size=size)
    assert plan.cut(read(plan)) == [CONTENT[start : start + length] for start, length in ranges]


@given(asked_ranges, gaps, sizes)
def test_blocks_obey_the_limits(ranges: list[tuple[int, int]], gap: int, size: int | None) -> None:
    """Only a range too long by itself exceeds `max_size`; no run of unasked bytes exceeds `max_gap`."""
    wanted = {byte for start, length in ranges for byte in range(start, start + length)}
    for block in plan_ranges(ranges, max_gap=gap, max_size=size).blocks:
        assert size is None or block.length <= size or tuple(block) in ranges
        assert {block.start, block.end - 1} <= wanted
        waste = "".join("x" if byte in wanted else "-" for byte in range(block.start, block.end))
        assert max(map(len, waste.split("x"))) <= gap


@given(asked_ranges, gaps, sizes)
def test_blocks_are_few(ranges: list[tuple[int, int]], gap: int, size: int | None) -> None:
    """Blocks ascend, none lies in another, and no two neighbours could have been one block."""
    blocks = plan_ranges(ranges, max_gap=gap, max_size=size).blocks
    assert len(blocks) <= sum(length > 0 for _, length in ranges)
    for left, right in pairwise(blocks):
        assert left.start < right.start
        assert left.end < right.end
        assert right.start - left.end > gap or (size is not None and right.end - left.start > size)


@given(asked_ranges, gaps, sizes, st.randoms(use_true_random=False))
def test_blocks_do_not_depend_on_the_order(
    ranges: list[tuple[int, int]], gap: int, size: int | None, shuffle: random.Random
) -> None:
    """The same ranges in another order are read by the same requests."""
    shuffled = shuffle.sample(ranges, len(ranges))
    plans = [plan_ranges(each, max_gap=gap, max_size=size) for each in (ranges, shuffled)]
    assert plans[0].blocks == plans[1].blocks
