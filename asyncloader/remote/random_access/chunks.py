"""Decodes what cannot be read in part: whole compressed shards, and row groups of Parquet.

Data path: transport -> [chunks: decompress, or decode] -> host_files -> shard_reader, in every process of the host.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

from asyncloader.bridge import in_thread
from asyncloader.formats import CompressedReader, Located, ShardError, ShardRange, ShardReader
from asyncloader.formats.arrow_chunk import dump_rows
from asyncloader.formats.compressed import Compression, decoder
from asyncloader.formats.parquet import RowOptions
from asyncloader.remote.catalog import Shard
from asyncloader.remote.parquet_reading import Ranges, read_footer
from asyncloader.remote.reading import Pins, read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectInfo
from asyncloader.transports.base import PinnedReader, changed_error

MAX_UNPACKED = 4 << 30
"""The most bytes of a compressed shard that is accessed at random, after decompression: they are in memory once."""


class _DecompressedBytes:
    """Takes the decompressed bytes of a shard. A `ShardReader` that finds no samples."""

    feed_from = 0
    done = False
    pending = False

    def __init__(self, url: str, most: int) -> None:
        self.parts: list[bytes] = []
        self._url = url
        self._left = most

    def feed(self, chunk: bytes, /) -> list[Located]:
        """Keep the bytes."""
        self._left -= len(chunk)
        if self._left < 0:
            raise ShardError(
                "the compressed shard has more bytes after decompression than its index says, or than can be accessed "
                f"at random ({MAX_UNPACKED >> 30} GiB): write smaller shards, or without compression",
                url=self._url,
            )
        self.parts.append(chunk)
        return []

    def end(self) -> list[Located]:
        """Do nothing."""
        return []


def compression_of(shard: Shard) -> Compression | None:
    """Return the compression of a whole shard."""
    return shard.format.compression if shard.mds is None else shard.mds.compression


async def unpack(stores: Stores, shard: Shard, info: ObjectInfo | None, read_ahead: int) -> bytes:
    """Return the decompressed bytes of a compressed shard.

    Raises:
        ShardError: the compressed data is damaged, or too large.
        TransportError: the shard cannot be read, or is of another version than `info`.
    """
    compression = compression_of(shard)
    assert compression is not None
    collector = _DecompressedBytes(shard.url, MAX_UNPACKED if shard.mds is None else shard.mds.size)
    reader: ShardReader = CompressedReader(shard.url, collector, decoder(compression))

    def make(_: str, __: ShardRange) -> ShardReader:
        return reader

    transport, path = stores.find(shard.url)
    pins = Pins()
    with pins.hold(transport, path, shard.url) as pin:
        reading = read_shard_range(stores, shard, CatalogRange(0), reader=make, read_ahead=read_ahead, pins=pins)
        async with aclosing(reading) as batches:
            async for _ in batches:
                raise AssertionError("a collector finds no samples")
        _check_version(pin.reader, info)
    return await in_thread(partial(b"".join, collector.parts))


async def decode_rows(
    pinned: PinnedReader,
    shard: Shard,
    info: ObjectInfo | None,
    first: int,
    stop: int,
    options: RowOptions,
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
