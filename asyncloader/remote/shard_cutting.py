"""Decides which samples go into which shard. Pure.

Data path: encoded samples -> [shard_cutting] -> shard_writing.

A shard ends before the sample that would make it larger than the limit, and after `max_samples`. So the cuts depend on
the samples alone, and not on how they were grouped for encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncloader.errors import ShardWriteError
from asyncloader.formats.encoder import EncodedBatch, EncodedSamples, Part, ShardEncoder

TASK_BYTES = 1 << 20
"""Encoded bytes that are passed on together."""

MOST_PER_TASK = 1024
"""Most samples that are passed on together."""


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
        self._max_samples = max_samples
        self.samples = sample
        """The number of samples that were added, with those before the first."""
        self._shard = shard
        self._parts: list[Part] = []
        self._keys: set[str] = set()
        self._count, self._size = 0, encoder.base_bytes

    def is_due(self, batch: EncodedBatch) -> bool:
        """Whether samples are to be added before more are encoded: they are many, or may end the shard, which is then
        written while an iterable computes the next sample. That may take it hours.
        """
        most = MOST_PER_TASK if self._max_samples is None else min(MOST_PER_TASK, self._max_samples - self._count)
        return batch.size >= min(TASK_BYTES, self._max_bytes - self._size) or batch.count >= most

    def add(self, encoded: EncodedSamples) -> Iterator[CutShard]:
        """Add samples; return the shards that are complete.

        Raises:
            ShardWriteError: a sample is too large for any shard, or has the key of another in its shard.
        """
        first = 0  # of the samples that are in no part yet
        for at, size in enumerate((encoded.sizes + self._encoder.sample_bytes).tolist()):
            if self._count and self._size + size > self._max_bytes:
                yield self._cut(Part(encoded, first, at))
                first = at
            self._check(size, encoded.keys[at] if encoded.keys else "")
            self._count += 1
            self._size += size
            self.samples += 1
            if self._count == self._max_samples:
                yield self._cut(Part(encoded, first, at + 1))
                first = at + 1
        if first < len(encoded.sizes):
            self._parts.append(Part(encoded, first, len(encoded.sizes)))

    def end(self) -> Iterator[CutShard]:
        """Return the shard that is not complete, if it has samples."""
        if self._count:
            yield self._cut()

    def _cut(self, *last: Part) -> CutShard:
        parts = [part for part in (*self._parts, *last) if part.first < part.stop]
        shard = CutShard(self._shard, self.samples - self._count, self._count, self._size, parts)
        self._shard += 1
        self._parts, self._keys = [], set()
        self._count, self._size = 0, self._encoder.base_bytes
        return shard

    def _check(self, size: int, key: str) -> None:
        text = None
        if self._size + size > self._max_bytes:
            text = (
                f"it takes a shard of {self._size + size:,} bytes, more than max_bytes={self._max_bytes:,}; raise "
                "max_bytes, or make it smaller"
            )
        elif key and key in self._keys:
            text = f"another sample of the same shard ({self._shard}) has the same key; give each sample its own"
        if text is not None:
            raise ShardWriteError(text, number=self.samples, key=key)
        self._keys.add(key)
