"""Ranges: every sample is in exactly one range, and the ranges are not fewer than asked for if formats allow."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import PARQUET, Shard, format_of, named_format
from asyncloader.remote.shard_splitting import EpochShares, cut, part_left_out, sample_numbers, stretch_of
from tests.unit.remote.shards import mds_entry

TAR = ShardFormat("tar", None)
JSONL = ShardFormat("jsonl", None)


def test_formats_by_extension_and_by_name() -> None:
    """Parquet is known beside the push readers' formats; a format's name is an extension without its dot."""
    assert format_of("https://host/a.PARQUET?sig=1") == PARQUET
    assert format_of("a.pq") == PARQUET
    assert format_of("s3://bucket/a.tar#b?c.pq") == PARQUET
    assert format_of("s3://bucket/a.tar?version=7") == TAR
    assert format_of("https://host/a.tar?to=/b.pq") == TAR
    assert format_of("a.tgz") == ShardFormat("tar", "gzip")
    assert named_format("jsonl.zst") == ShardFormat("jsonl", "zstd")
    assert named_format("parquet") == PARQUET
    assert named_format(TAR) == TAR
    assert named_format(None) is None
    with pytest.raises(ValueError, match=r"the extension of 'shard\.csv' says no format"):
        named_format("csv")


def test_the_largest_are_cut_first() -> None:
    """Ranges of different shards differ little in size."""
    shards = [Shard("a.jsonl", JSONL, 900), Shard("b.tar", TAR, 10_000), Shard("c.jsonl", JSONL, 100)]
    assert [shard_range.shard for shard_range in cut(shards, 6)] == [0, 0, 0, 0, 1, 2]


def test_no_parts_are_refused() -> None:
    """At least one part is needed."""
    with pytest.raises(ValueError, match="into 0 parts"):
        cut([], 0)


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 2000), st.lists(st.integers(1, 9), max_size=6)), max_size=6),
    st.integers(1, 40),
)
@settings(deadline=None)
def test_ranges_cover_each_shard_once(kinds: list[int | list[int] | None], parts: int) -> None:
    """Ranges are in order, without gap or overlap, and not fewer than asked for unless nothing can be cut further."""
    shards: list[Shard] = []
    for number, kind in enumerate(kinds):
        if kind is None:
            shards.append(Shard(f"{number}.tar", TAR, 50))
        elif isinstance(kind, int):
            shards.append(Shard(f"{number}.jsonl", JSONL, kind))
        else:
            edges = tuple(itertools.accumulate([0, *kind]))
            shards.append(Shard(f"{number}.parquet", PARQUET, sum(kind), edges[-1], edges=edges))
    shard_ranges = cut(shards, parts)
    most = sum(1 if kind is None else max(1, kind) if isinstance(kind, int) else max(1, len(kind)) for kind in kinds)
    assert len(shard_ranges) == max(len(shards), min(parts, most))
    assert [shard_range.shard for shard_range in shard_ranges] == sorted(
        shard_range.shard for shard_range in shard_ranges
    )
    for number in range(len(shards)):
        own = [shard_range for shard_range in shard_ranges if shard_range.shard == number]
        assert own[0].start == 0
        assert own[-1].stop is None
        assert [shard_range.stop for shard_range in own[:-1]] == [shard_range.start for shard_range in own[1:]]
        assert all(shard_range.start < (shard_range.stop or shard_range.start + 1) for shard_range in own)


# ------------------------------------------------------------------------------------------------- the ranks


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
