"""The samples and sizes of the shards of a run, and the requests and bytes by which their ranges are read. Pure.

Data path: shard_facts -> [contents] -> simulated_shards, epoch_simulation, forecast.

A simulation need not move each sample by itself: `units` of several samples are moved, a divisor of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.simulation.parquet_layout import ParquetLayout

LEAST_UNITS = 16
"""Units of an average shard, at least: fewer would move its samples in one go."""


class Reads(NamedTuple):
    """The traffic of an epoch.

    Attributes:
        requests: their number.
        nbytes: of the answers.
    """

    requests: int
    nbytes: int


@dataclass(frozen=True)
class Contents:
    """The shards.

    Attributes:
        catalog: the shards as the loader knows them when it plans an epoch.
        sizes: bytes of each shard's object, known or estimated.
        samples: number of samples of each, known or estimated.
        layouts: of the Parquet shards whose footers were read, by the shard's number; others are taken to be like them.
    """

    catalog: Sequence[Shard]
    sizes: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    layouts: Mapping[int, ParquetLayout] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Samples of all shards."""
        return int(self.samples.sum())

    def sample_bytes(self) -> float:
        """Mean bytes of the store for a sample."""
        return float(self.sizes.sum()) / max(1, self.total)

    def grain(self, batch_size: int, most_batches: int) -> int:
        """Return the largest divisor of a batch's samples that still cuts a mean shard into `LEAST_UNITS` units; 1 for
        an epoch of at most this number of batches, whose end can be simulated exactly.
        """
        if self.total <= batch_size * most_batches:
            return 1
        most = self.total / max(1, len(self.catalog)) / LEAST_UNITS
        return next(batch_size // parts for parts in range(1, batch_size + 1) if _fits(batch_size, parts, most))

    def layout(self, number: int) -> ParquetLayout | None:
        """Return the layout of a shard; of one that was not looked at, that of another. None: it is not Parquet."""
        if self.catalog[number].format != PARQUET or not self.layouts:
            return None
        found = self.layouts.get(number)
        return [*self.layouts.values()][number % len(self.layouts)] if found is None else found

    def span(self, shard_range: CatalogRange) -> tuple[int, int]:
        """Return the positions at which a range begins and ends: bytes, or rows of Parquet."""
        layout = self.layout(shard_range.shard)
        end = int(self.sizes[shard_range.shard]) if layout is None else layout.edges[-1]
        stop = end if shard_range.stop is None else min(shard_range.stop, end)
        return min(shard_range.start, stop), stop

    def units(self, shard_range: CatalogRange, grain: int) -> int:
        """Return the number of units in a range. Those of all ranges of a shard are those of the shard."""
        number = shard_range.shard
        layout = self.layout(number)
        length = int(self.sizes[number]) if layout is None else layout.edges[-1]
        if not length:
            return 0
        whole = -(-int(self.samples[number]) // grain)
        start, stop = self.span(shard_range)
        return whole * stop // length - whole * start // length

    def reads(self, shard_ranges: Iterable[CatalogRange]) -> Reads:
        """Return the requests and bytes by which these ranges are read."""
        requests = nbytes = 0
        for shard_range in shard_ranges:
            layout = self.layout(shard_range.shard)
            if layout is None:
                start, stop = self.span(shard_range)
                requests, nbytes = requests + 1, nbytes + stop - start
                continue
            groups = [layout.group(number) for number in layout.wanted(shard_range.start, shard_range.stop)]
            requests += len(layout.footer) + sum(each.requests for each in groups)
            nbytes += sum(layout.footer) + sum(each.nbytes for each in groups)
        return Reads(requests, nbytes)


def _fits(batch_size: int, parts: int, most: float) -> bool:
    return batch_size % parts == 0 and (batch_size // parts <= most or parts == batch_size)
