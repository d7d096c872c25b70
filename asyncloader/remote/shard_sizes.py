"""Requests unknown sizes, sample counts and cut points of shards from the store.

Data path: discovery -> [shard_sizes] -> shard_splitting.

Requests for different shards are concurrent, up to a limit. Known facts are not requested again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from asyncloader.base.bridge import in_thread
from asyncloader.formats import MdsShard, ShardError
from asyncloader.formats.compressed import Compression, MemberDecoder
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.shard_splitting import CatalogRange, Stretch, can_cut, sample_numbers
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectNotFound, RangeOutOfBounds, SizeUnknown
from asyncloader.transports.base import gather_all

T = TypeVar("T")

REQUESTS = 64
"""Maximum number of shards with a request at the same time."""

EDGES_PER_RANGE = 8
"""Cut points of an MDS shard that are kept per wanted range: enough to cut evenly."""

RAISED_WHEN_READ = (ObjectNotFound, ShardError)
"""Errors of a single shard, which do not fail the plan: they are raised when the shard is read, and `on_error` applies.

Other errors fail the plan: they may be temporary, or occur in one rank only, and all ranks must make the same plan.
"""


async def with_sizes(
    shards: Sequence[Shard], stores: Stores, *, leave: tuple[type[Exception], ...] = ()
) -> list[Shard]:
    """Return the shards with `Shard.size`. A shard that raises one of the errors `leave` is left as it is.

    Raises:
        TransportError: a shard's size cannot be read; the first such error, the other requests are cancelled.
    """
    return await _each(shards, lambda shard: _with_size(shard, stores), leave)


async def with_counts(
    shards: Sequence[Shard], stores: Stores, *, leave: tuple[type[Exception], ...] = ()
) -> list[Shard]:
    """Return the shards with `Shard.samples`, where an index or a footer provides it: MDS and Parquet. A shard that
    raises one of the errors `leave` is left as it is: reading it will raise the error.

    Raises:
        ShardError: a Parquet footer is damaged.
        TransportError: a footer cannot be read.
        ImportError: pyarrow is needed and not installed.
    """

    async def count(shard: Shard) -> Shard:
        return await _with_footer(shard, stores) if shard.format == PARQUET and shard.samples is None else shard

    return await _each(shards, count, leave)


async def with_edges(
    shards: Sequence[Shard], stores: Stores, parts: int, *, leave: tuple[type[Exception], ...] = ()
) -> list[Shard]:
    """Return the shards with the sizes and cut points that `shard_splitting.cut` needs to make `parts` ranges.

    With at least `parts` shards, it requests nothing. A shard whose size the store does not provide is not cut, nor is
    one that raises one of the errors `leave`: reading it will raise the error.

    Raises:
        ShardError: an MDS header or a Parquet footer is damaged, or contradicts the index.
        TransportError: a size, a header or a footer cannot be read.
        ImportError: pyarrow is needed and not installed.
    """
    if len(shards) >= parts:
        return list(shards)

    async def measure(shard: Shard) -> Shard:
        sized = await _with_size(shard, stores)
        if sized.edges is not None or not can_cut(sized):
            return sized
        if sized.format == PARQUET:
            return await _with_footer(sized, stores)
        return await _with_offsets(sized, stores, parts)

    return await _each(shards, measure, (SizeUnknown, *leave))


async def _with_size(shard: Shard, stores: Stores) -> Shard:
    if shard.size is not None:
        return shard
    transport, path = stores.find(shard.url)
    return shard._replace(size=(await transport.info(path)).size)


async def _with_footer(shard: Shard, stores: Stores) -> Shard:
    from asyncloader.remote.parquet_reading import read_footer

    transport, path = stores.find(shard.url)
    footer, info = await read_footer(transport.pinned(path), shard.url)
    # Row groups without rows have equal edges, which are removed.
    return shard._replace(size=info.size, samples=footer.rows, edges=tuple(sorted(set(footer.edges))))


async def sample_position(shard: Shard, number: int, stores: Stores) -> int:
    """Return the position at which sample `number` of an MDS or Parquet shard begins, in the units of
    `CatalogRange.start`.

    Reads the table of an MDS shard; of a compressed shard, all bytes up to the end of the table.

    Raises:
        ShardError: the table is damaged.
        TransportError: the table cannot be read.
    """
    return number if shard.mds is None else int((await mds_offsets(shard, shard.mds, stores))[number])


async def trim(
    shard_ranges: Sequence[CatalogRange], shards: Sequence[Shard], stretch: Stretch, stores: Stores
) -> list[CatalogRange]:
    """Cut off the samples of the first and the last range of a rank's stretch that other ranks read.

    A shard whose sample positions cannot be read is not cut: both ranks raise the error when they read it.
    """

    async def position(shard_range: CatalogRange, end: int, samples: int) -> int | None:
        shard = shards[shard_range.shard]
        with suppress(*RAISED_WHEN_READ):
            return await sample_position(shard, sample_numbers(shard, shard_range)[end] + samples, stores)
        return None

    found = list(shard_ranges)
    start = await position(found[0], 0, stretch.skipped) if stretch.skipped else None
    stop = await position(found[-1], 1, -stretch.left) if stretch.left else None
    if start is not None:
        found[0] = found[0]._replace(start=start)
    if stop is not None:
        found[-1] = found[-1]._replace(stop=stop)
    return found


async def mds_offsets(shard: Shard, mds: MdsShard, stores: Stores) -> npt.NDArray[np.int64]:
    """Read an MDS shard's table: the offset of each sample and, last, of the end. Reads and raises as
    `sample_position`.
    """
    transport, path = stores.find(shard.url)
    if mds.compression is not None:
        stream = transport.stream(path, chunk_size=1 << 16)
        header = await decompress(stream, mds.compression, shard.url, mds.header_size)
    else:
        try:
            header = await transport.read_range(path, 0, mds.header_size)
        except RangeOutOfBounds as error:
            raise ShardError(
                "the shard is truncated: its header does not fit in it", url=shard.url, offset=0
            ) from error
    return await in_thread(partial(mds.offsets, header, url=shard.url))


async def decompress(
    stream: AsyncGenerator[bytes, None], compression: Compression, url: str, most: int, *, whole: bool = False
) -> bytes:
    """Return the first `most` decompressed bytes of an object; fewer if it ends before.

    Args:
        stream: of the object.
        compression: of the object.
        url: of the object, for errors.
        most: the number of bytes.
        whole: they are all.

    Raises:
        ShardError: the compressed data is damaged; or, if they are all, is cut off, or has more.
        TransportError: the object cannot be read.
    """
    decoding, found = MemberDecoder(compression), bytearray()

    def take(chunk: bytes) -> None:
        decoding.give(chunk)
        try:
            while not decoding.hungry and len(found) <= most:
                found.extend(decoding.take())
        except Exception as error:  # the type depends on the package
            raise ShardError(f"the compressed data is damaged: {error}", url=url) from error

    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            await in_thread(partial(take, chunk))
            if len(found) >= most and not whole:
                break
            if len(found) > most:
                raise ShardError(
                    f"the compressed shard has more than {most:,} bytes after decompression: more than its index says, "
                    "or than can be accessed at random: write smaller shards, or without compression",
                    url=url,
                )
    if whole and not decoding.complete:
        raise ShardError("the compressed data is truncated", url=url)
    return bytes(found[:most])


async def _with_offsets(shard: Shard, stores: Stores, parts: int) -> Shard:
    if shard.mds is None:
        return shard
    offsets = await mds_offsets(shard, shard.mds, stores)
    edge_count = min(shard.mds.samples, EDGES_PER_RANGE * parts)
    edges = (
        [int(offsets[shard.mds.samples * edge // edge_count]) for edge in range(edge_count + 1)] if edge_count else []
    )
    return shard._replace(edges=tuple(edges) or None)


async def _each(
    shards: Sequence[Shard], function: Callable[[Shard], Awaitable[Shard]], leave: tuple[type[Exception], ...]
) -> list[Shard]:
    """Return the results of `function` in the order of the shards, `REQUESTS` at a time; a shard for which it raises an
    error of `leave` as it is.
    """
    found = list(shards)

    async def replace(number: int) -> None:
        with suppress(*leave):
            found[number] = await function(found[number])

    await for_each(range(len(found)), replace)
    return found


async def for_each(items: Collection[T], function: Callable[[T], Awaitable[object]], most: int = REQUESTS) -> None:
    """Call a function with each item, `most` at a time. Raises its first error, and cancels the other calls."""
    waiting = iter(items)

    # The tasks share one iterator, which is safe in one loop: each takes the next item when it has finished another.
    async def work() -> None:
        for item in waiting:
            await function(item)

    await gather_all(work() for _ in range(min(most, len(items))))
