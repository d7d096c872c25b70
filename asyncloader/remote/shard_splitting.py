"""Cuts shards into ranges if the workers need more than the number of shards, groups small ranges, and divides the
ranges of an epoch among the ranks. Pure.

Data path: discovery, shard_sizes -> catalog -> [shard_splitting] -> assignment -> worker_stream.

JSON lines are cut by bytes, MDS and Parquet at `Shard.edges`. The other formats cannot be cut without an index and are
read whole.

Where the number of samples in every range is known, each rank reads one stretch of the epoch's order, and the lengths
of the stretches differ by at most one sample: a range that two ranks share is cut at a sample. Otherwise each rank
reads every `ranks`-th range, and an epoch ends for all with the rank that has the fewest samples.
"""

from __future__ import annotations

import heapq
import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.formats import ShardFormat, ShardRange, cut_shard
from asyncloader.remote.catalog import PARQUET, Shard

RANGES_PER_WORKER = 4
"""Fewer shards than this per worker are cut into this number of ranges per worker: enough to balance the epoch's end.
"""

GROUP_BYTES = 32 << 20
"""Upper bound of the bytes in one assignment of several ranges: 0.3 s at 100 MB/s."""

GROUP_RANGES = 8
"""Upper bound of the ranges in one assignment."""

GROUPS_PER_WORKER = 4
"""Least assignments per worker after small ranges are grouped: enough to balance the end of the epoch."""


class CatalogRange(NamedTuple):
    """A range of one shard of the catalog. Plain numbers, so that it can be part of a state.

    Attributes:
        shard: index in the catalog.
        start: where reading begins: bytes; rows in Parquet.
        stop: samples that begin here or later belong to another range. None: to the end.
        sync: `start` may lie inside a sample, which then belongs to the range before.
    """

    shard: int
    start: int = 0
    stop: int | None = None
    sync: bool = False


Assignment = tuple[CatalogRange, ...]
"""Shard ranges that a worker reads in this order."""


def is_count(value: Any) -> bool:
    """Return whether `value` is an integer of at least 0 that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_catalog_range(shard_range: Any, shards: float = math.inf) -> bool:
    """Return whether these are the fields of a `CatalogRange` of a catalog with `shards` shards."""
    if not isinstance(shard_range, list | tuple) or len(shard_range) != 4:
        return False
    shard, start, stop, sync = shard_range
    return all(map(is_count, (shard, start, 0 if stop is None else stop))) and shard < shards and isinstance(sync, bool)


class SampleEdges:
    """Where consecutive samples begin and, last, where they end. Equal to itself alone, so that ranges are compared.

    Args:
        offsets: in bytes.
    """

    __slots__ = ("offsets",)

    def __init__(self, offsets: npt.NDArray[np.int64]) -> None:
        self.offsets = offsets


class SegmentRange(NamedTuple):
    """A part of a range: some samples of one shard of the catalog, good or bad.

    Attributes:
        shard, start, stop, sync: of the range, as in `CatalogRange`.
        skip: samples of the range that come before.
        most: their number; None: all behind `skip`.
        edges: where the samples begin and, last, where they end; None: not known.
    """

    shard: int
    start: int = 0
    stop: int | None = None
    sync: bool = False
    skip: int = 0
    most: int | None = None
    edges: SampleEdges | None = None


def can_cut(shard: Shard) -> bool:
    """Return whether a shard can be cut, once its size (JSON lines) or its edges (MDS, Parquet) are known."""
    if shard.format.name == "mds":
        return shard.mds is not None and shard.mds.compression is None and shard.mds.samples > 1
    return shard.format in (PARQUET, ShardFormat("jsonl", None))


def cut(shards: Sequence[Shard], parts: int) -> list[CatalogRange]:
    """Cut `shards` into at least `parts` ranges; fewer if formats and sizes allow no more.

    With at least `parts` shards, each shard is one range. Otherwise the largest ranges are cut first, so that the
    ranges of different shards have similar sizes. Every sample is in exactly one range. Only known sizes and edges are
    used (`Shard.size`, `Shard.edges`); see `shard_sizes.with_edges`.

    Returns:
        The ranges, in the order of the shards and ascending within each.

    Raises:
        ValueError: `parts` is below 1.
    """
    if parts < 1:
        raise ValueError(f"cannot cut shards into {parts} parts")
    if len(shards) >= parts:
        return [CatalogRange(number) for number in range(len(shards))]
    counts = [1] * len(shards)
    most = [_most_parts(shard) for shard in shards]
    # Ordered by the size of the shard's ranges, largest first; then by shard.
    heap = [(-_weight(shard), number) for number, shard in enumerate(shards) if most[number] > 1]
    heapq.heapify(heap)
    for _ in range(parts - len(shards)):
        if not heap:
            break
        _, number = heap[0]
        counts[number] += 1
        if counts[number] < most[number]:
            heapq.heapreplace(heap, (-_weight(shards[number]) / counts[number], number))
        else:
            heapq.heappop(heap)
    return [
        CatalogRange(number, start, stop, sync)
        for number, shard in enumerate(shards)
        for start, stop, sync in _ranges(shard, counts[number])
    ]


def _weight(shard: Shard) -> float:
    return float(shard.size or (shard.mds.size if shard.mds is not None else 0))


def _most_parts(shard: Shard) -> int:
    """Return the maximum number of ranges that a shard can be cut into with the known size and edges."""
    if not can_cut(shard):
        return 1
    if shard.edges is not None:
        return max(1, len(shard.edges) - 1)
    return max(1, shard.size or 1) if shard.format.name == "jsonl" else 1


def _ranges(shard: Shard, parts: int) -> list[ShardRange]:
    if parts == 1:
        return [ShardRange(0, None, sync=False)]
    if shard.edges is None:
        return cut_shard(shard.format, shard.size or 0, parts)
    edges, last = shard.edges, len(shard.edges) - 1
    at = [edges[last * part // parts] for part in range(parts)]
    # The first range begins with the shard's header; the last range ends with the shard.
    starts, stops = [0, *at[1:]], [*at[1:], None]
    return [ShardRange(start, stop, sync=False) for start, stop in zip(starts, stops, strict=True)]


def bytes_left(shard: Shard, shard_range: CatalogRange | SegmentRange) -> int | None:
    """Return the bytes of the object that a range covers; None if unknown, or if its offsets are of other bytes."""
    packed = shard.format.compression or (shard.mds is not None and shard.mds.compression)
    if packed or shard.format == PARQUET:
        return None if shard_range.start or shard_range.stop is not None else shard.size
    stop = shard.size if shard_range.stop is None else shard_range.stop
    return None if stop is None else max(0, stop - shard_range.start)


def group_ranges(shard_ranges: Sequence[CatalogRange], shards: Sequence[Shard], workers: int) -> list[Assignment]:
    """Group small neighbouring ranges into assignments, as far as enough assignments remain to balance the workers.

    A worker opens the ranges of an assignment early, so that small ranges do not cost a round trip each.
    """
    most = min(GROUP_RANGES, len(shard_ranges) // (GROUPS_PER_WORKER * workers))
    assignments: list[Assignment] = []
    group: list[CatalogRange] = []
    room = GROUP_BYTES
    for shard_range in shard_ranges:
        size = bytes_left(shards[shard_range.shard], shard_range)
        # A range of unknown size is not grouped with others: it may be large.
        if group and (len(group) >= most or size is None or size > room):
            assignments.append(tuple(group))
            group, room = [], GROUP_BYTES
        group.append(shard_range)
        room -= room if size is None else size
    return [*assignments, tuple(group)] if group else assignments


_LEFT_OUT = 0.02  # the part of the data that an epoch leaves out from which a warning is logged

_log = logging.getLogger("asyncloader")

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


def log_left_out(part: float, shards: int, ranks: int) -> None:
    """Warn of the part of the samples that an epoch leaves out, if it is large."""
    if part >= _LEFT_OUT:
        _log.warning(
            "%d ranks share %d shards unevenly: an epoch ends for all with the smallest share, so each epoch leaves "
            "out about %.0f%% of the samples (on_uneven='drop'), other ones each time. With streams= of the dataset "
            "and seed= of the loader none is left out",
            ranks,
            shards,
            100 * part,
        )
