"""Divides the ranges of an epoch among the ranks. Pure.

Data path: shard_splitting -> [rank_shares] -> dataset.plan -> assignment.

Where the number of samples in every range is known, each rank reads one stretch of the epoch's order, and the lengths
of the stretches differ by at most one sample: a range that two ranks share is cut at a sample. Otherwise each rank
reads every `ranks`-th range, and an epoch ends for all with the rank that has the fewest samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.remote.assignment import Assignment
from asyncloader.remote.catalog import Shard
from asyncloader.remote.shard_splitting import CatalogRange, bytes_left

MOST_WEIGHED = 10_000
"""Most ranges whose bytes are added up at the beginning of each epoch: with more ranges the ranks' shares are alike."""


class EpochShares(NamedTuple):
    """How the ranks share one epoch of a stream.

    Attributes:
        ranks: number of ranks.
        samples: in the epoch, if the ranks' stretches differ by at most one; None: a range's number is unknown.
        left_out: without `samples`: the part of the data that no rank reads, from 0 to 1, as far as sizes are known.
    """

    ranks: int
    samples: int | None
    left_out: float

    def dropped(self, batches: int, batch_size: int) -> int:
        """Return the number of samples that the ranks do not read, if each has delivered `batches` batches; an estimate
        without `samples`.
        """
        read = batches * batch_size * self.ranks
        if self.ranks == 1:
            return 0
        if self.samples is None:
            return round(read * self.left_out / (1 - self.left_out)) if self.left_out < 1 else 0
        # The last batch of a stretch may not be full: a rank never reads more than its stretch.
        longer = self.samples % self.ranks
        short, most = self.samples // self.ranks, batches * batch_size
        return longer * max(0, short + 1 - most) + (self.ranks - longer) * max(0, short - most)


class EpochPlan(NamedTuple):
    """The part of an epoch that one rank reads.

    Attributes:
        assignments: in the order in which they are given to the workers.
        shares: how the ranks share the epoch.
    """

    assignments: Sequence[Assignment]
    shares: EpochShares


class Stretch(NamedTuple):
    """One rank's part of the epoch's order.

    Attributes:
        first: the position of its first range.
        stop: the position after its last range.
        skipped: samples of the first range that the rank before reads.
        left: samples of the last range that the rank after reads.
    """

    first: int
    stop: int
    skipped: int
    left: int


def stretch_of(counts: npt.NDArray[np.int64], rank: int, ranks: int) -> Stretch:
    """Return a rank's part of ranges that hold `counts` samples. Parts differ by at most one sample."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    begin, end = total * rank // ranks, total * (rank + 1) // ranks
    if begin == end:
        return Stretch(0, 0, 0, 0)
    # The first range that ends after `begin`: a range that ends there, or is empty, belongs to the rank before.
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(ends, end, side="left"))
    return Stretch(first, last + 1, begin - int(ends[first] - counts[first]), int(ends[last]) - end)


def sample_numbers(shard: Shard, shard_range: CatalogRange) -> tuple[int, int]:
    """Return the numbers of the samples in a range that `cut` made: of its first sample within the shard, and of the
    sample after its last. `Shard.samples` must be known.
    """
    samples, edges, (_, start, stop, _) = shard.samples, shard.edges, shard_range
    assert samples is not None
    if start == 0 and stop is None:
        return 0, samples
    assert edges is not None, "only JSON lines are cut without edges, and their samples are not counted"
    if shard.mds is None:  # Parquet: positions are rows
        return start, samples if stop is None else stop
    # `shard_sizes` has made edge `n` at sample `samples * n // last`.
    last = len(edges) - 1

    def number(offset: int) -> int:
        return samples * bisect_left(edges, offset) // last

    return 0 if start == 0 else number(start), samples if stop is None else number(stop)


def part_left_out(shards: Sequence[Shard], shard_ranges: Sequence[CatalogRange], ranks: int) -> float:
    """Return the part of the data, from 0 to 1, that no rank reads, if each has every `ranks`-th range and all end with
    the smallest share: by bytes, if all sizes are known and at most `MOST_WEIGHED` ranges exist; otherwise by ranges.
    """
    if len(shard_ranges) > MOST_WEIGHED:
        return len(shard_ranges) % ranks / len(shard_ranges)
    sizes = [bytes_left(shards[each.shard], each) for each in shard_ranges]
    weights = [size for size in sizes if size is not None]
    if len(weights) < len(sizes):
        weights = [1] * len(sizes)
    total = sum(weights)
    return 1 - ranks * min(sum(weights[rank::ranks]) for rank in range(ranks)) / total if total else 0.0
