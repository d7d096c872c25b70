"""One piece of a shard, from its transport to its samples. Data path: lease -> [stream, read-ahead, reader] -> samples.

The reader is a push parser (`formats.base`) and knows no network; here it is fed. Compressed shards are decompressed in
a thread, because zlib and zstd work without the interpreter's lock; all other parsing is done in the loop, by so much
at a time that the loop stays responsive. Parquet is read by ranges: `parquet_reading`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias

from asyncloader.formats import MAX_SAMPLE_BYTES, Located, OnBad, ShardError, ShardRange, ShardReader, open_reader
from asyncloader.remote.catalog import PARQUET, Piece, Shard
from asyncloader.remote.prefetch import ReadAhead
from asyncloader.remote.stores import Stores
from asyncloader.transports import RangeOutOfBounds, Transport, TransportError

__all__ = ["READ_AHEAD", "MakeReader", "read_piece"]

MakeReader: TypeAlias = Callable[[str, ShardRange], ShardReader]
"""A user's own format: URL and part -> the reader of that part."""

READ_AHEAD = 8 << 20
"""Bytes of a shard that are fetched ahead of parsing, by default: 8 MiB, 80 ms at 100 MB/s."""

CHUNK = 1 << 20

SLOW_CHUNK = 1 << 17
"""JSON takes about 10 ms a MB."""


async def read_piece(
    stores: Stores,
    shard: Shard,
    piece: Piece,
    *,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    on_bad: OnBad | None = None,
    reader: MakeReader | None = None,
    read_ahead: int = READ_AHEAD,
    columns: Sequence[str] | None = None,
) -> AsyncGenerator[list[Located], None]:
    """Read one piece of a shard.

    Network reads run ahead in a task of their own, which begins with the iteration and ends with it. An iterator that
    is left before its end must be closed: ``async with contextlib.aclosing(read_piece(...)) as batches``.

    Args:
        stores: where the shard's URL leads.
        shard: the shard.
        piece: the part of it. To go on after a sample: ``piece._replace(start=resume, sync=False)``.
        max_sample_bytes: refuse a sample that takes more (decompressed) bytes.
        on_bad: is told of bad samples that can be stepped over, before the samples behind them come. It is called in
            the loop. None: each of them is raised.
        reader: makes the reader of a format of the user's own, which has its own limits and its own `on_bad`.
        read_ahead: bytes that are fetched ahead of parsing, at least 1. A chunk of up to 1 MiB may come on top.
        columns: of Parquet, the columns to read. None: all. Other formats have no columns.

    Yields:
        Samples with the places where to go on after them, in the shard's order; a list of at least one.

    Raises:
        ShardError: the shard breaks the rules of its format, or ends too early; after the samples before the fault.
        TransportError: the bytes cannot be read; after the samples before the fault.
        ValueError: the piece cannot be one of this shard.
        ImportError: the format needs a package that is not installed.
    """
    if read_ahead < 1:
        raise ValueError(f"read_ahead must be at least 1 byte, got {read_ahead}")
    transport, path = stores.find(shard.url)
    bad: list[ShardError] = []
    if shard.format == PARQUET and reader is None:
        from asyncloader.remote.parquet_reading import read_parquet

        found = read_parquet(
            transport,
            path,
            shard.url,
            start=piece.start,
            stop=piece.stop,
            max_sample_bytes=max_sample_bytes,
            on_bad=None if on_bad is None else bad.append,
            read_ahead=read_ahead,
            columns=columns,
        )
    else:
        part = ShardRange(piece.start, piece.stop, piece.sync)
        if reader is not None:
            shard_reader, packed = reader(shard.url, part), False
        else:
            packed = (shard.format.compression if shard.mds is None else shard.mds.compression) is not None
            shard_reader = open_reader(
                shard.url,
                shard.format,
                part=part,
                max_sample_bytes=max_sample_bytes,
                on_bad=None if on_bad is None else bad.append,
                shard=shard.mds,
            )
        chunk_size = SLOW_CHUNK if shard.format.name == "jsonl" else CHUNK
        stop = None if packed or reader is not None else piece.stop
        found = _push(transport, path, shard_reader, stop=stop, chunk_size=chunk_size, most=read_ahead, thread=packed)
    async with aclosing(found) as batches:
        try:
            async for batch in batches:
                _tell(on_bad, bad)
                if batch:
                    yield batch
            _tell(on_bad, bad)
        except RangeOutOfBounds as error:
            size = "fewer" if error.size is None else f"{error.size:,}"
            raise ShardError(
                f"the shard is truncated, or was replaced: it has {size} bytes", url=shard.url, offset=piece.start
            ) from error
        except (ShardError, TransportError):
            _tell(on_bad, bad)
            raise


def _tell(on_bad: OnBad | None, bad: list[ShardError]) -> None:
    """Tell of the bad samples that were stepped over; here, because their reader may have run in a thread."""
    while on_bad is not None and bad:
        on_bad(bad.pop(0))


async def _push(
    transport: Transport,
    path: str,
    reader: ShardReader,
    *,
    stop: int | None,
    chunk_size: int,
    most: int,
    thread: bool,
) -> AsyncGenerator[list[Located], None]:
    """Feed `reader` to its end. Gives a list for each call of it, empty ones as well.

    Args:
        transport: of the shard.
        path: below the transport's root.
        reader: is fed.
        stop: offset after which bytes are fetched only when the reader turns out to need them. None: to the end.
        chunk_size: bytes that the reader is fed at a time, at most.
        most: bytes that are fetched ahead.
        thread: run the reader in a thread.
    """

    async def call(function: Callable[..., list[Located]], *arguments: bytes) -> list[Located]:
        if thread:
            return await asyncio.to_thread(function, *arguments)
        await asyncio.sleep(0)  # chunks that are there already must not keep the loop from everything else
        return function(*arguments)

    if reader.done:
        return
    start = reader.feed_from
    wanted = None if stop is None else max(stop - start, 0)
    ahead = ReadAhead(transport.stream(path, start=start, chunk_size=chunk_size), most=most, wanted=wanted)
    try:
        while (chunk := await ahead.next()) is not None:
            yield await call(reader.feed, chunk)
            while reader.pending:
                yield await call(reader.feed, b"")
            if reader.done:
                return
        yield await call(reader.end)
    finally:
        await ahead.aclose()
