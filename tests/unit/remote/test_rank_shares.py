"""How ranks share an epoch: evenly where samples are counted, by whole ranges otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.rank_shares import EpochShares, part_left_out, sample_numbers, stretch_of
from asyncloader.remote.shard_splitting import cut
from tests.unit.remote.shards import mds_entry


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 7))
def test_stretches_are_disjoint_and_even(counts: list[int], ranks: int) -> None:
    """All samples are read once, in order; the ranks' numbers of samples differ by at most one.

    A rank has samples in the first and in the last range that it opens.
    """
    samples = [(at, number) for at, count in enumerate(counts) for number in range(count)]
    read: list[list[Any]] = []
    for rank in range(ranks):
        stretch = stretch_of(np.array(counts, np.int64), rank, ranks)
        mine = [(at, number) for at in range(stretch.first, stretch.stop) for number in range(counts[at])]
        read.append(mine[stretch.skipped : len(mine) - stretch.left])
        if read[-1]:
            assert counts[stretch.first] > stretch.skipped
            assert counts[stretch.stop - 1] > stretch.left
    assert [*itertools.chain.from_iterable(read)] == samples
    assert max(map(len, read)) - min(map(len, read)) <= 1


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 9))
def test_dropped_samples_are_counted(samples: int, ranks: int, batch_size: int) -> None:
    """Dropped samples are those in a rank's share behind the number of batches that all ranks have."""
    own = [len(part) for part in np.array_split(np.arange(samples), ranks)]
    batches = min(-(-each // batch_size) for each in own)
    left = sum(max(0, each - batches * batch_size) for each in own)
    assert EpochShares(ranks, samples, 0.0).dropped(batches, batch_size) == left * (ranks > 1)
    assert left < ranks


def test_dropped_samples_are_estimated() -> None:
    """Where samples are not counted, the number is estimated from the part of the data that is left out."""
    assert EpochShares(2, None, 0.2).dropped(20, 10) == 100
    assert EpochShares(2, None, 0.0).dropped(20, 10) == 0
    assert EpochShares(2, None, 1.0).dropped(0, 10) == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_samples_of_a_range(parts: int) -> None:
    """A Parquet range counts rows, an MDS range the samples between the positions at which it was cut."""
    edges = tuple(100 + 10 * (50 * number // 20) for number in range(21))  # see `shard_sizes`: 50 samples, 20 pieces
    shards = [
        Shard("a.parquet", PARQUET, 1000, 50, edges=(0, 9, 20, 50)),
        Shard("a.mds", ShardFormat("mds", None), 600, 50, mds_entry(range(50)), edges),
        Shard("b.mds", ShardFormat("mds", "zstd"), 600, 50),
    ]
    ranges = cut(shards, parts)
    numbers = [sample_numbers(shards[each.shard], each) for each in ranges]
    for shard in range(3):
        own = [pair for pair, each in zip(numbers, ranges, strict=True) if each.shard == shard]
        assert [first for first, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == 50
    for (first, stop), each in zip(numbers, ranges, strict=True):
        if each.shard == 1 and each.start:
            assert each.start == 100 + 10 * first
        if each.shard == 0:
            assert (each.start, each.stop or 50) == (first, stop)


@pytest.mark.parametrize(
    ("sizes", "ranks", "part"),
    [
        ([100] * 5, 2, 0.2),
        ([100] * 6, 2, 0.0),
        ([100] * 6, 3, 0.0),
        ([100, 200], 2, 1 / 3),
        ([100] * 3, 4, 1.0),
        ([None, 100, 100], 2, 1 / 3),
        ([0, 0], 2, 0.0),
    ],
)
def test_what_ranks_leave_out(sizes: list[int | None], ranks: int, part: float) -> None:
    """Each of n ranks has every n-th range, and all end with the first rank that has no more."""
    shards = [Shard(f"{number}.tar", ShardFormat("tar", None), size) for number, size in enumerate(sizes)]
    assert part_left_out(shards, cut(shards, 1), ranks) == pytest.approx(part)
