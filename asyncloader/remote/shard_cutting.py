"""Decides which samples go into which shard. Pure.

Data path: encoded samples -> [shard_cutting] -> shard_writing.

A shard ends before the sample that would make it larger than the limit, and after `max_samples`. So the cuts depend on
the samples alone, and not on how they were grouped for encoding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncloader.errors import ShardWriteError
from asyncloader.formats.encoder import EncodedSamples, Part, ShardEncoder


class CutShard(NamedTuple):
    """The samples of one shard.

    Attributes:
        number: of the shard, from 0.
        first: number of its first sample.
        samples: number of its samples.
        size: bytes of the shard, before compression.
        parts: the samples.
    """

    number: int
    first: int
    samples: int
    size: int
    parts: list[Part]


class ShardCutter:
    """Cuts a stream of encoded samples into shards.

    Args:
        encoder: of the samples.
        max_bytes: of a shard, before compression.
        max_samples: of a shard; None: no limit.
        shard: the number of the first shard.
        sample: the number of the first sample.
    """

    def __init__(
        self, encoder: ShardEncoder, max_bytes: int, max_samples: int | None, *, shard: int = 0, sample: int = 0
    ) -> None:
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._room = max_bytes - encoder.base_bytes
        self._max_samples = max_samples
        self.samples = sample
        """The number of samples that were added, with those before the first."""
        self._shard = shard
        self._parts: list[Part] = []
        self._keys: set[str] = set()
        self._count = self._bytes = 0

    @property
    def room(self) -> int:
        """Bytes that the shard which is not complete still takes."""
        return self._room - self._bytes

    def task(self, first: int, most: int) -> int:
        """Return how many samples from number `first` on, `most` at most, are to be encoded together: not beyond the
        shard that `first` comes into if no shard ends before it has `max_samples`.
        """
        if self._max_samples is None:
            return most
        return min(most, self._max_samples - (first - self.samples + self._count) % self._max_samples)

    def add(self, encoded: EncodedSamples) -> list[CutShard]:
        """Add samples; return the shards that are complete.

        Raises:
            ShardWriteError: a sample is too large for any shard, or has the key of another in its shard.
        """
        costs = encoded.sizes + self._encoder.sample_bytes
        ends = np.cumsum(costs)
        large = np.flatnonzero(costs > self._room)
        stop = int(large[0]) if len(large) else len(costs)
        found: list[CutShard] = []
        first = 0
        while first < stop:
            before = int(ends[first] - costs[first])
            # The first sample that does not fit.
            last = min(int(np.searchsorted(ends, before + self._room - self._bytes, side="right")), stop)
            if self._max_samples is not None:
                last = min(last, first + self._max_samples - self._count)
            if last > first:
                self._take(encoded, first, last, int(ends[last - 1]) - before)
                first = last
            if first < stop or self._count == self._max_samples:
                found += self.end()
        if stop < len(costs):
            key = encoded.keys[stop] if encoded.keys else ""
            size = int(costs[stop]) + self._encoder.base_bytes
            raise ShardWriteError(
                f"it takes a shard of {size:,} bytes, more than max_bytes={self._max_bytes:,}; raise max_bytes, or "
                "make it smaller",
                number=self.samples,
                key=key,
            )
        return found

    def end(self) -> list[CutShard]:
        """Return the shard that is not complete, if it has samples."""
        if not self._count:
            return []
        size = self._encoder.base_bytes + self._bytes
        shard = CutShard(self._shard, self.samples - self._count, self._count, size, self._parts)
        self._shard += 1
        self._parts, self._keys, self._count, self._bytes = [], set(), 0, 0
        return [shard]

    def _take(self, encoded: EncodedSamples, first: int, last: int, size: int) -> None:
        for at, key in enumerate(encoded.keys[first:last]):
            if key in self._keys:
                raise ShardWriteError(
                    f"another sample of the same shard ({self._shard}) has the same key; give each sample its own",
                    number=self.samples + at,
                    key=key,
                )
            self._keys.add(key)
        self._parts.append(Part(encoded, first, last))
        self._count += last - first
        self._bytes += size
        self.samples += last - first
