"""A shard of which samples are read, and the samples of one call that lie in it; makes samples of their bytes.

Data path: numbers, transport or the cache's files -> [opened_shards] -> shard_reader.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.formats import JsonlReader, MdsReader, Sample, ShardError, ShardReader, TarReader, read_whole
from asyncloader.formats.base import SampleSlices
from asyncloader.formats.compressed import Compression
from asyncloader.formats.tar import END
from asyncloader.formats.tfrecord import TFRecordReader
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.random_access.host_files import FileName
from asyncloader.remote.stores import strip_signature
from asyncloader.transports import ObjectInfo, PinnedReader, SizeUnknown, plan_ranges
from asyncloader.transports.base import changed_error, gather_all
from asyncloader.transports.cached_object import CachedObject
from asyncloader.transports.local import PinnedFile
from asyncloader.transports.open_files import OpenFiles
from asyncloader.transports.pinned import PinnedObject

GAP = 1 << 16
"""Bytes between two samples that are read to save a request to a network: requests are concurrent, so it saves no round
trip, but about as much CPU time as 64 KiB take."""

_READERS: dict[str, Any] = {"tar": TarReader, "tfrecord": TFRecordReader, "jsonl": JsonlReader}


def compression_of(shard: Shard) -> Compression | None:
    """Return the compression of a whole shard."""
    return shard.format.compression if shard.mds is None else shard.mds.compression


class SampleParser:
    """Makes samples of the bytes of a shard that an index says it has.

    Args:
        shard: the shard.
        max_sample_bytes: refuse a sample with more (decompressed) bytes.
    """

    def __init__(self, shard: Shard, max_sample_bytes: int) -> None:
        self._url = shard.url
        self._max = max_sample_bytes
        self._tail = END if shard.format.name == "tar" else b""
        self._whole = read_whole(shard.url, shard.format.name, shard.mds)
        made: Callable[..., ShardReader] = _READERS.get(shard.format.name, JsonlReader)
        make = partial(made, shard.url) if shard.mds is None else partial(MdsReader, shard.url, shard.mds)
        self._reader: Callable[..., ShardReader] = partial(make, max_sample_bytes=max_sample_bytes)

    def parse(self, source: SampleSlices, at: int, end: int, start: int) -> Sample:
        """Return the sample in these bytes.

        Args:
            source: has them.
            at: their position in `source`: where the sample before ends.
            end: where this sample ends.
            start: their offset in the shard, after decompression.

        Raises:
            ShardError: they are no sample, or more.
        """
        length = end - at
        # The members, lines or records of a sample are not larger than its bytes, so they are within the limit, too.
        if length <= self._max and (sample := self._whole(source, at, end, start)) is not None:
            return sample
        reader = self._reader(start=start)
        found = reader.feed(source[at:end])
        if not found:
            # A tar's sample ends where the next begins, or the archive; other samples end by themselves.
            found = reader.feed(self._tail) if self._tail else reader.end()
        if len(found) != 1 or found[0].resume != start + length:
            raise ShardError(
                f"the index of its samples does not fit this shard: {len(found)} samples where one should be; remove "
                "the index, and make it again",
                url=self._url,
                offset=start,
            )
        return found[0].sample


class OpenShard:
    """A shard of which samples were read."""

    def __init__(
        self, shard: Shard, info: ObjectInfo | None, pinned: PinnedReader, parser: SampleParser, files: OpenFiles
    ) -> None:
        self.shard = shard
        self.info = info
        self.pinned = pinned
        self.parser = parser
        self.edges: npt.NDArray[np.int64] | None = None
        self.whole = True
        self._files = files  # keeps it open, if it is a file of a disk
        self.is_file = isinstance(pinned, PinnedFile)
        self.compared = False  # with the store
        # Has bytes of samples without a request, as they are in the shard.
        self.local: CachedObject | PinnedFile | None = None
        if isinstance(pinned, CachedObject | PinnedFile) and shard.format != PARQUET and compression_of(shard) is None:
            self.local = pinned

    async def read(self, ranges: list[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges of the shard, like `PinnedReader.read_ranges`."""
        if not isinstance(self.pinned, PinnedObject):  # a disk; or a cache, which keeps the bytes between them, too
            return await self.pinned.read_ranges(ranges)
        # The transport would read a useless MiB to save a request: right for a shard that is read through.
        plan = plan_ranges(ranges, max_gap=GAP, max_size=self.pinned.transport.range_size)
        return plan.cut([data for (data,) in await gather_all(self.pinned.read_ranges([each]) for each in plan.blocks)])

    async def decode(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Decode a part of the shard by `make`, which compares its version."""
        data = await make()
        self.compared = True
        return data

    def check_file(self) -> None:
        """Raise ReadFailed if it is a file of a disk that has changed since it was indexed. Blocks, in a thread."""
        if isinstance(self.pinned, PinnedFile):
            self.pinned.check_here(self._files)
            if not self.pinned.may_be(self.version):
                raise changed_error(self.pinned.path)

    async def compare(self) -> None:
        """Compare the shard's version with the one that was indexed.

        Raises:
            TransportError: it has changed, or cannot be asked for.
        """
        with suppress(SizeUnknown):
            info = await self.pinned.info()
            # Not of a local file, whose inode number may change.
            same = self.info is None or self.is_file or None in (self.version, info.etag)
            if not self.pinned.may_be(self.version) or not (same or self.info == info):
                raise changed_error(self.pinned.path)
        self.compared = True

    def decoded_name(self, what: str) -> FileName:
        """Name the file of what was decoded of the shard."""
        # Of a local file that is too new for a version, what was decoded must not outlive a change.
        fresh = self.pinned.version if isinstance(self.pinned, PinnedFile) and self.version is None else ""
        return FileName(f"{strip_signature(self.shard.url)}\0{what}{fresh}", self.version)

    @property
    def version(self) -> str | None:
        """Of the object; None without a version."""
        return None if self.info is None else self.info.etag


class SampleGroup(NamedTuple):
    """Samples of one shard, ascending by their numbers in it; and their places in the result."""

    opened: OpenShard
    samples: npt.NDArray[np.int64]
    places: list[int]

    def spans(self, edges: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return start and length of the samples' bytes."""
        if len(self.places) == 1:
            start, stop = edges[self.samples[0] : self.samples[0] + 2].tolist()
            return [(start, stop - start)]
        starts = edges[self.samples]
        return list(zip(starts.tolist(), (edges[self.samples + 1] - starts).tolist(), strict=True))

    def put(self, found: Sequence[Any], samples: list[Any]) -> None:
        """Put the samples that were found into their places."""
        for place, sample in zip(self.places, found, strict=True):
            samples[place] = sample

    def left(self, found: Sequence[Any]) -> list[SampleGroup]:
        """Return a group of the samples that were not found, which are None; or nothing, if all were."""
        left = [number for number, sample in enumerate(found) if sample is None]
        return [SampleGroup(self.opened, self.samples[left], [self.places[each] for each in left])] if left else []
