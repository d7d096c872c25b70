"""A shard of which samples are read, and the samples of one call that lie in it; makes samples of their bytes.

Data path: numbers, transport or the cache's files -> [opened_shards] -> shard_reader.
Data path: transport -> [opened_shards: decompress, or decode] -> host_files -> [RowReader] -> shard_reader, in every
process. So what cannot be read in part is read: whole compressed shards, and row groups of Parquet.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.base.bridge import in_thread
from asyncloader.formats import JsonlReader, MdsReader, Sample, ShardError, ShardReader, TarReader, read_whole
from asyncloader.formats.arrow_chunk import RowsFile, dump_rows
from asyncloader.formats.base import SampleSlices
from asyncloader.formats.compressed import Compression
from asyncloader.formats.parquet import RowOptions
from asyncloader.formats.tar import END
from asyncloader.formats.tfrecord import TFRecordReader
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.parquet_reading import Ranges, read_footer
from asyncloader.remote.random_access.host_files import Content, FileName, HostFiles
from asyncloader.remote.shard_sizes import decompress
from asyncloader.remote.stores import Stores, strip_signature
from asyncloader.transports import ObjectInfo, PinnedReader, SizeUnknown, plan_ranges
from asyncloader.transports.base import changed_error, gather_all
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cached_object import CachedObject
from asyncloader.transports.local import PinnedFile
from asyncloader.transports.open_files import OpenFiles
from asyncloader.transports.pinned import PinnedObject

MAX_UNPACKED = 4 << 30
"""The most bytes of a compressed shard that is accessed at random, after decompression: they are in memory once."""

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


async def unpack(stores: Stores, shard: Shard, info: ObjectInfo | None) -> bytes:
    """Return the decompressed bytes of a compressed shard.

    Raises:
        ShardError: the compressed data is damaged, or too large.
        TransportError: the shard cannot be read, or is of another version than `info`.
    """
    compression = compression_of(shard)
    assert compression is not None
    transport, path = stores.find(shard.url)
    pinned = transport.pinned(path)
    most = MAX_UNPACKED if shard.mds is None else shard.mds.size
    data = await decompress(pinned.stream(chunk_size=1 << 20), compression, shard.url, most, whole=True)
    _check_version(pinned, info)
    return data


async def decode_rows(
    pinned: PinnedReader, shard: Shard, info: ObjectInfo | None, first: int, stop: int, options: RowOptions
) -> bytes:
    """Return rows ``[first, stop)`` of a Parquet shard, its row groups, as `arrow_chunk` keeps them.

    Raises:
        ShardError: the file is damaged.
        TransportError: the shard cannot be read, or is of another version than `info`.
    """
    footer, _ = await read_footer(pinned, shard.url)
    _check_version(pinned, info)
    ranges = Ranges(pinned)
    try:
        return await in_thread(partial(dump_rows, footer, ranges.fetch, start=first, stop=stop, options=options))
    finally:
        # Ends the reads that the thread waits for, if this call was cancelled.
        await ranges.aclose()


def _check_version(pinned: PinnedReader, info: ObjectInfo | None) -> None:
    if info is not None and not pinned.may_be(info.etag):
        raise changed_error(pinned.path)


class RowReader:
    """Reads the rows of one dataset out of decoded row groups. Used in one event loop.

    Args:
        files: the decoded row groups.
        pool: the threads.
        slots: how many row groups are decoded at a time.
        options: how rows are read.
    """

    def __init__(self, files: HostFiles, pool: BlockingPool, slots: asyncio.Semaphore, options: RowOptions) -> None:
        self._files = files
        self._pool = pool
        self._slots = slots
        self._options = options
        self._wanted = "" if options.columns is None else repr([*options.columns])  # samples have them in this order

    async def read(self, group: SampleGroup) -> list[Sample]:
        """Return samples of a shard, whose row groups are decoded at the same time.

        Raises:
            ShardError: the shard or a row cannot be read.
            TransportError: the store cannot be read, or the shard has changed.
        """
        opened, edges = group.opened, group.opened.shard.edges
        if edges is None:
            await read_footer(opened.pinned, opened.shard.url)  # raises the error that it raised before
            raise ShardError("the shard was replaced since its rows were counted", url=opened.shard.url)
        parts, rows = [], group.samples.tolist()
        at = 0
        while at < len(rows):
            number = bisect_right(edges, rows[at]) - 1
            first, stop = edges[number : number + 2]
            end = bisect_left(rows, stop, at)
            parts.append(self._read(opened, first, stop, rows[at:end]))
            at = end
        return [sample for samples in await gather_all(parts) for sample in samples]

    async def _read(self, opened: OpenShard, first: int, stop: int, rows: list[int]) -> list[Sample]:
        """Return rows of the row group that has rows ``[first, stop)``."""
        shard, options = opened.shard, self._options

        def use(content: Content) -> list[Sample]:
            opened.check_file()
            parsed: RowsFile | None = content.parsed
            if parsed is None:
                most = options.max_sample_bytes
                parsed = RowsFile(content.read, content.size, first=first, url=shard.url, max_sample_bytes=most)
                content.parsed = parsed
            return parsed.samples(content.read, rows)

        make = partial(decode_rows, opened.pinned, shard, opened.info, first, stop, options)
        name = opened.decoded_name(f"rows {first} to {stop}, few in a message {self._wanted}")
        return await self._files.use(name, partial(opened.decode, make), use, self._pool, self._slots)
