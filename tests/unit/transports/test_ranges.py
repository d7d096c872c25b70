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


def test_a_range_inside_another_costs_nothing() -> None:
    """Of two ranges that begin alike the longer serves both, even if it exceeds `max_size`."""
    plan = plan_ranges([(0, 4), (0, 100)], max_size=10)
    assert plan.blocks == (ByteRange(0, 100),)
    assert plan.cuts == (Cut(0, 0, 4), Cut(0, 0, 100))


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
