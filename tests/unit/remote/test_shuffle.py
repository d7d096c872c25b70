"""The shuffle buffer by itself: permutations of blocks, at the pace of the batches, restored from a few numbers."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.remote.shuffle import ShuffleBlocks


class Source:
    """Numbers from 0 on, given out through blocks as a worker stream does it."""

    def __init__(self, most: int, key: int, length: int) -> None:
        self.blocks: ShuffleBlocks[int] = ShuffleBlocks(most, key)
        self.length = length
        self.read = 0
        self.held = 0

    def _fill(self, giving: int) -> None:
        missing = min(self.blocks.missing(giving), self.length - self.read)
        self.blocks.filling += range(self.read, self.read + missing)
        self.read += missing

    def take(self, most: int) -> list[int]:
        """Return at most `most` numbers; an empty list at the end."""
        blocks = self.blocks
        blocks.begin(most)
        if not blocks.left:
            self._fill(0)
            if not blocks.swap():
                return []
        number = min(most, blocks.left)
        self._fill(number)
        self.held = max(self.held, len(blocks.block) + len(blocks.filling))
        return blocks.take(number)


def everything(most: int, key: int, length: int, batch: int = 4) -> list[int]:
    source = Source(most, key, length)
    out: list[int] = []
    while got := source.take(batch):
        out += got
    return out


@given(st.integers(1, 20), st.integers(0, (1 << 64) - 1), st.integers(0, 80), st.integers(1, 9))
def test_blocks_are_permuted_in_themselves(most: int, key: int, length: int, batch: int) -> None:
    """Every item is given once, less than `most` places from its own; and at most two blocks are held."""
    source = Source(most, key, length)
    out: list[int] = []
    while got := source.take(batch):
        assert len(got) <= batch
        out += got
    assert sorted(out) == list(range(length))
    assert all(abs(place - item) < most for place, item in enumerate(out))
    assert source.held <= 2 * most


def test_first_blocks_are_small() -> None:
    """The first batch needs no more than its own items; blocks double until they are full."""
    source = Source(64, 1, 1000)
    sizes = []
    for _ in range(40):
        if not source.blocks.left:
            sizes.append(0)
        source.take(4)
        if sizes and not sizes[-1]:
            sizes[-1] = len(source.blocks.block)
    assert sizes[:7] == [4, 8, 16, 32, 64, 64][: len(sizes)]
    first = Source(64, 1, 1000)
    first.take(4)
    assert first.read <= 12


def test_a_block_fills_while_another_is_given_out() -> None:
    """Once blocks are full, a batch reads about the number of items that it gives out."""
    source = Source(64, 1, 10_000)
    while len(source.blocks.block) < 64:
        source.take(4)
    reads = []
    for _ in range(64):
        before = source.read
        source.take(4)
        reads.append(source.read - before)
    assert max(reads) <= 8


@pytest.mark.thorough
def test_orders_are_uniform() -> None:
    """All orders of a block are equally likely, and differ from block to block."""
    counts: Counter[tuple[int, ...]] = Counter()
    for key in range(2400):
        counts[tuple(everything(3, key, 3, batch=3))] += 1
    assert set(counts) == set(permutations(range(3)))
    assert all(300 < count < 500 for count in counts.values())  # 400 each, and 5 standard deviations
    out = everything(50, 9, 1050, batch=50)
    blocks = {tuple(item - first for item in out[first : first + 50]) for first in range(50, 1050, 50)}
    assert len(blocks) == 20


@given(st.integers(1, 12), st.integers(0, 60), st.integers(1, 5), st.integers(0, 30))
def test_restored(most: int, length: int, batch: int, steps: int) -> None:
    """Restored from the blocks' items and three numbers, the rest is unchanged."""
    source = Source(most, 5, length)
    for _ in range(steps):
        source.take(batch)
    blocks = source.blocks
    other = Source(most, 5, length)
    other.read = source.read
    other.blocks.restore(blocks.number, blocks.aim, blocks.given, list(blocks.block), list(blocks.filling))
    for _ in range(length + 1):
        assert other.take(batch) == source.take(batch)
