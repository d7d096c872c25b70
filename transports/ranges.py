"""Plans which reads to make for a list of byte ranges. Pure.

Data path: ranges -> [ranges: plan] -> transport.

Each request costs a round trip, and each byte that is not needed costs bandwidth. So ranges that lie close together are
read as one *block*, from which the results are *cut*:

    ranges     [--a--]   [-b-]                       [---c---]
    gap              <-->                            (too far from b)
    blocks     [----- 0 -----]                       [-- 1 --]
    cuts       a = block 0 from 0, b = block 0 from 9, c = block 1 from 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ByteRange(NamedTuple):
    """`length` bytes of an object, starting at byte `start`. A plain ``(start, length)`` tuple works as well."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after the range."""
        return self.start + self.length


class Cut(NamedTuple):
    """The position of one result: `length` bytes at `offset` in block number `block`.

    An empty result is in no block: `block` is None.
    """

    block: int | None
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads to make, and how to cut the results from them.

    Attributes:
        blocks: the ranges to read, ascending by start; none is empty.
        cuts: one per requested range, in the order of the request.
    """

    blocks: tuple[ByteRange, ...]
    cuts: tuple[Cut, ...]

    def cut(self, read: Sequence[bytes]) -> list[bytes]:
        """Cut the results from the blocks' bytes. A result that is a whole block is not copied.

        Args:
            read: the bytes of each block, in the order of `blocks`.

        Returns:
            One bytes object per requested range, in the order of the request.

        Raises:
            ValueError: a block is missing, or has another length than planned.
        """
        if len(read) != len(self.blocks):
            raise ValueError(f"the plan has {len(self.blocks)} blocks, got the bytes of {len(read)}")
        for number, (block, data) in enumerate(zip(self.blocks, read, strict=True)):
            if len(data) != block.length:
                raise ValueError(f"block {number} must have {block.length:,} bytes, got {len(data):,}")
        return [
            b"" if cut.block is None else read[cut.block][cut.offset : cut.offset + cut.length] for cut in self.cuts
        ]


def plan_ranges(ranges: Iterable[tuple[int, int]], *, max_gap: int = 0, max_size: int | None = None) -> ReadPlan:
    """Plan the reads for `ranges`, which may come in any order, repeat and overlap.

    In ascending order of start, a range joins the previous block if at most `max_gap` bytes lie between them and the
    block stays within `max_size`, or if the block contains it already. A range is never split: a range longer than
    `max_size` becomes a block of its own. Empty ranges need no block.

    Args:
        ranges: ``(start, length)`` pairs, in bytes.
        max_gap: largest gap between two ranges that is read to save a request; 0 joins only adjacent ranges.
        max_size: maximum size of a joined block; None for no limit.

    Raises:
        ValueError: a start, a length or `max_gap` is negative, or `max_size` is below 1.
    """
    if max_gap < 0:
        raise ValueError(f"max_gap must be 0 or more bytes, got {max_gap}")
    if max_size is not None and max_size < 1:
        raise ValueError(f"max_size must be at least 1 byte, or None for no limit; got {max_size}")
    asked = [ByteRange(*each) for each in ranges]
    for start, length in asked:
        if start < 0 or length < 0:
            raise ValueError(f"a byte range needs start and length of 0 or more, got {(start, length)}")

    blocks: list[ByteRange] = []
    cuts: list[Cut] = [Cut(None, 0, 0)] * len(asked)
    # Longest first among equal starts: the shorter ones then lie inside its block.
    keys = [(start, -length) for start, length in asked]
    first, end = 0, -1 - max_gap  # of the last block; there is none yet, which joins nothing
    for number in sorted(range(len(asked)), key=keys.__getitem__):
        start, length = asked[number]
        if length == 0:
            continue
        stop = start + length
        if stop <= end or (start - end <= max_gap and (max_size is None or stop - first <= max_size)):
            end = max(end, stop)
            blocks[-1] = ByteRange(first, end - first)
        else:
            blocks.append(asked[number])
            first, end = start, stop
        cuts[number] = Cut(len(blocks) - 1, start - first, length)
    return ReadPlan(tuple(blocks), tuple(cuts))
