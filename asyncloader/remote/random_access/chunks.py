"""Decodes what cannot be read in part, whole compressed shards and row groups of Parquet, and reads rows out of these.

Data path: transport -> [chunks: decompress, or decode] -> host_files -> [RowReader] -> shard_reader, in every process.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from functools import partial

from asyncloader.base.bridge import in_thread
from asyncloader.formats import Sample, ShardError
from asyncloader.formats.arrow_chunk import RowsFile, dump_rows
from asyncloader.formats.parquet import RowOptions
from asyncloader.remote.catalog import Shard
from asyncloader.remote.parquet_reading import Ranges, read_footer
from asyncloader.remote.random_access.host_files import Content, HostFiles
from asyncloader.remote.random_access.opened_shards import OpenShard, SampleGroup, compression_of
from asyncloader.remote.shard_sizes import decompress
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectInfo
from asyncloader.transports.base import PinnedReader, changed_error, gather_all
from asyncloader.transports.blocking import BlockingPool

MAX_UNPACKED = 4 << 30
"""The most bytes of a compressed shard that is accessed at random, after decompression: they are in memory once."""


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
