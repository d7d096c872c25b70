"""Where the samples at positions of an epoch's order are: in which block of which stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncloader.remote.stream_order import Block, StreamOrder


class BlockPart(NamedTuple):
    """Consecutive samples of a stream's block, as it is arranged: ``[start, stop)``."""

    stream: int
    block: Block
    start: int
    stop: int


def parts_of(order: StreamOrder, positions: Sequence[int]) -> Iterator[BlockPart]:
    """Return where the samples at these positions are found, in the same order."""
    for stream, first, size in order.runs(positions):
        at, stop = first, first + size
        while at < stop:
            block = order.block_at(stream, at)
            end = min(stop, block.first + block.size)
            yield BlockPart(stream, block, at - block.first, end - block.first)
            at = end
