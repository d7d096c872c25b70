"""Reads consecutive samples of a shard whose offsets are known, each at once. Pure.

Data path: transport -> chunks -> [indexed: the format's `ReadWhole`] -> samples.

A shard's reader finds out where a sample ends by parsing it, in chunks that may end anywhere. With the offsets, a
sample is made by one call as soon as its bytes are there: in half of the time, and when it is needed. The samples are
those that the format's reader makes. It goes on from the first one that is unusual or wrong, and has the errors. Only
the last good sample of a damaged tar is returned here, and not there: a reader without offsets needs the next header to
know that it is complete.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from asyncloader.formats.base import Located, LocatedSamples, ReadWhole, Sample, ShardReader

STEP_BYTES = 1 << 15
"""Bytes of the samples that are made at a time. Their caller reads many streams: more of them would leave the CPU's
cache before they are needed.
"""

STEP_SAMPLES = 16
"""Samples that are made at a time, at least."""


class IndexedReader:
    """Reads samples like a `ShardReader`, from which it differs in the type of the samples' sequence.

    Args:
        read: makes a sample; None from it: the format's reader must read the sample.
        edges: where the samples begin and, last, where they end.
        last: whether they are the last of the shard. What comes behind the last is for the format's reader to check.
        open: makes the format's reader, given the offset of a sample and the number of samples to read.
        max_sample_bytes: a larger sample is left to the format's reader.
    """

    def __init__(
        self,
        read: ReadWhole,
        edges: npt.NDArray[np.int64],
        open: Callable[[int, int], ShardReader],
        *,
        last: bool,
        max_sample_bytes: int,
    ) -> None:
        self._read = read
        # Python's numbers are found in it in a fraction of the time of numpy's.
        self._edges = array("q", edges.astype("q").tobytes())
        self._open = open
        self._max = max_sample_bytes
        self._samples = len(edges) - 1
        self._whole = self._samples - last  # the sample from which on the format's reader goes on
        self._number = 0  # of the next sample
        self._at = self._end = self._edges[0]  # offsets of the bytes that are here
        self._data = b""  # a chunk, or a sample that lies across chunks
        self._more: deque[bytes] = deque()  # chunks behind `_data`
        self._more_at = self._at  # the offset of the first of them
        self._reader: ShardReader | None = None  # of the format, once it goes on

    @property
    def feed_from(self) -> int:
        """The offset of the first byte to feed. See `ShardReader.feed_from`."""
        return self._edges[0]

    @property
    def done(self) -> bool:
        """Whether all samples were read. See `ShardReader.done`."""
        return self._number == self._samples if self._reader is None else self._reader.done

    @property
    def pending(self) -> bool:
        """Whether ``feed(b"")`` may return further samples. See `ShardReader.pending`."""
        if self._reader is not None:
            return self._reader.pending
        return self._number < self._samples and not self._misses_bytes()

    def feed(self, chunk: bytes, /) -> Sequence[Located]:
        """Take the next bytes, and return some of the samples that they complete. See `ShardReader.feed`."""
        if self._reader is not None:
            return self._reader.feed(chunk)
        if chunk:
            self._more.append(chunk if type(chunk) is bytes else bytes(chunk))
            self._end += len(chunk)
        number, edges = self._number, self._edges
        begin = edges[number]
        if number < self._whole and edges[number + 1] - begin > self._max:
            self._whole = number  # before its bytes are kept
        if self._misses_bytes():
            return []
        if number == self._whole:
            self._reader = self._open(begin, self._samples - number)
            return self._reader.feed(self._take_all(begin))
        if edges[number + 1] > self._at + len(self._data):
            self._turn_to(begin, edges[number + 1])
        data, at = self._data, self._at
        enough = max(bisect_left(edges, begin + STEP_BYTES, number), number + STEP_SAMPLES)
        ready = bisect_right(edges, at + len(data), number) - 1
        bounds = edges[number : min(ready, enough, self._whole) + 1]
        read, most = self._read, self._max
        samples: list[Sample] = []
        for start, stop in pairwise(bounds):
            sample = read(data, start - at, stop - at, start) if stop - start <= most else None
            if sample is None:
                self._whole = number + len(samples)
                break
            samples.append(sample)
        self._number = number + len(samples)
        return LocatedSamples(samples, bounds[1 : len(samples) + 1])

    def end(self) -> Sequence[Located]:
        """Finish after the last byte. See `ShardReader.end`."""
        found: Sequence[Located] = ()
        if self._reader is None:
            self._whole = self._number
            found = self.feed(b"")
        assert self._reader is not None
        return [*found, *self._reader.end()]

    def _turn_to(self, begin: int, after: int) -> None:
        """Have `_data` hold the sample at these offsets. Chunks are not joined to others: only a sample that lies
        across them is copied.
        """
        more = self._more
        if begin >= self._at + len(self._data):
            while self._more_at + len(more[0]) <= begin:
                self._more_at += len(more.popleft())
            self._data, self._at = more.popleft(), self._more_at
            self._more_at += len(self._data)
            if after <= self._more_at:
                return
        parts = [self._data[begin - self._at :]]
        while self._more_at + len(more[0]) < after:
            parts.append(more.popleft())
            self._more_at += len(parts[-1])
        # The chunk stays: other samples lie behind this one.
        parts.append(more[0][: after - self._more_at])
        self._data, self._at = b"".join(parts), begin

    def _take_all(self, begin: int) -> bytes:
        """Return all bytes from an offset on, and forget them."""
        rest, more = self._data[begin - self._at :], b"".join(self._more)
        # `_data` and the first chunk behind it may have bytes in common.
        behind = more[max(begin, self._at + len(self._data)) - self._more_at :]
        self._data = b""
        self._more.clear()
        return rest + behind if rest else behind

    def _misses_bytes(self) -> bool:
        """Whether the next sample, which is to be read here, is not complete."""
        return self._number < self._whole and self._edges[self._number + 1] > self._end
