"""Reads samples by their numbers, in one event loop: those of a shard together, shards at the same time.

Data path: numbers -> [shard_reader: index -> byte ranges -> sample_parsing] -> dataset.

The transport joins neighbours into one request (`Transport.read_ranges`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncloader.formats import Sample, ShardError
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.random_access.chunks import compression_of, decode_rows, unpack
from asyncloader.remote.random_access.host_files import FileName, HostFiles
from asyncloader.remote.random_access.indexing import Indexer, SampleCatalog, name_of
from asyncloader.remote.random_access.sample_parsing import SampleParser
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectInfo, PinnedReader, RangeOutOfBounds, plan_ranges
from asyncloader.transports.base import changed_error, gather_all
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.pinned import PinnedObject

INDEX_BYTES = 64 << 20
"""Bytes of indexes that a loop keeps in memory: of 8 million samples. Others are read from their files again."""

MOST_SHARDS = 1 << 16
"""Shards whose versions a loop keeps."""

GAP = 1 << 16
"""Bytes between two samples that are read to save a request to a network: requests are concurrent, so it saves no round
trip, but about as much CPU time as 64 KiB take."""

THREADS = 4

DECODED_AT_ONCE = 4
"""Compressed shards and row groups that a loop decodes at a time; each is in memory meanwhile."""


class _OpenShard:
    """A shard of which samples were read."""

    def __init__(self, shard: Shard, info: ObjectInfo | None, pinned: PinnedReader, parser: SampleParser) -> None:
        self.shard = shard
        self.info = info
        self.pinned = pinned
        self.parser = parser
        self.edges: npt.NDArray[np.int64] | None = None
        self.whole = True

    async def read(self, ranges: list[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges of the shard, like `PinnedReader.read_ranges`."""
        if not isinstance(self.pinned, PinnedObject):  # a disk; or a cache, which keeps the bytes between them, too
            return await self.pinned.read_ranges(ranges)
        # The transport would read a useless MiB to save a request: right for a shard that is read through.
        plan = plan_ranges(ranges, max_gap=GAP, max_size=self.pinned.transport.range_size)
        return plan.cut([data for (data,) in await gather_all(self.pinned.read_ranges([each]) for each in plan.blocks)])

    @property
    def version(self) -> str | None:
        """Of the object; None without a version."""
        return None if self.info is None else self.info.etag


class ShardsReader:
    """Reads the samples of a catalog. Its loop must call `aclose`.

    Args:
        catalog: the samples.
        stores: find the transports; of the running loop.
        files: the host's.
        max_sample_bytes: refuse a sample with more (decompressed) bytes.
        read_ahead: bytes of a shard or a row group that are fetched ahead of its decoding.
        columns: of Parquet, the columns to read. None: all.
    """

    def __init__(
        self,
        catalog: SampleCatalog,
        stores: Stores,
        files: HostFiles,
        *,
        max_sample_bytes: int,
        read_ahead: int,
        columns: Sequence[str] | None,
    ) -> None:
        self._catalog = catalog
        self._stores = stores
        self._files = files
        self._columns = columns
        self._max = max_sample_bytes
        self._ahead = read_ahead
        self._pool = BlockingPool("shards", THREADS)
        self._indexer = Indexer(stores, files, self._pool, max_sample_bytes=max_sample_bytes, read_ahead=read_ahead)
        self._slots = asyncio.Semaphore(DECODED_AT_ONCE)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()  # the last used last
        self._index_bytes = 0

    async def aclose(self) -> None:
        """Join the threads."""
        await self._pool.aclose()

    async def read(self, numbers: npt.NDArray[np.int64]) -> list[Sample]:
        """Return the samples with these numbers, in their order.

        Raises:
            ShardError, ObjectNotFound: a sample cannot be read.
            TransportError: the store cannot be read, or a shard has changed.
        """
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        starts = self._catalog.starts
        of_shards = np.searchsorted(starts, ascending, side="right") - 1
        firsts = np.flatnonzero(np.diff(of_shards, prepend=-1))
        groups = zip(of_shards[firsts].tolist(), np.split(ascending, firsts[1:]), strict=True)
        found = await gather_all(self._read_shard(shard, (each - starts[shard]).tolist()) for shard, each in groups)
        samples: list[Any] = [None] * len(numbers)
        at = iter(order.tolist())
        for group in found:
            for sample in group:
                samples[next(at)] = sample
        return samples

    async def _read_shard(self, number: int, samples: list[int]) -> list[Sample]:
        """Return samples of one shard, ascending by their numbers in it."""
        opened = self._opened(number)
        if opened.shard.format == PARQUET:
            return await self._read_rows(opened, samples)
        if compression_of(opened.shard) is not None:
            return await self._read_unpacked(opened, samples)
        edges = await self._edges(opened)
        spans = [(int(edges[each]), int(edges[each + 1])) for each in samples]
        if self._is_odd(opened, edges, samples) or any(stop - start > self._max for start, stop in spans):
            return [await self._read_stepwise(opened, *span) for span in spans]
        try:
            data = await opened.read([(start, stop - start) for start, stop in spans])
        except RangeOutOfBounds as error:
            raise ShardError(
                "the shard is truncated, or was replaced: it ends before its samples do",
                url=opened.shard.url,
                offset=spans[-1][0],
            ) from error
        self._check_version(opened)
        parse = opened.parser.parse
        return [parse(each, start, last=False) for each, (start, _) in zip(data, spans, strict=True)]

    async def _read_unpacked(self, opened: _OpenShard, samples: list[int]) -> list[Sample]:
        """Return samples of a compressed shard, from its decompressed bytes, which the host's processes share."""
        shard, mds = opened.shard, opened.shard.mds
        edges = opened.edges if mds is not None else await self._edges(opened)
        if edges is not None and self._is_odd(opened, edges, samples):
            return [await self._read_stepwise(opened, int(edges[each]), int(edges[each + 1])) for each in samples]

        def use(view: memoryview) -> tuple[npt.NDArray[np.int64], list[bytes]]:
            found = edges
            if found is None:
                assert mds is not None
                found = mds.offsets(bytes(view[: mds.header_size]), url=shard.url)
            if found[-1] > len(view):
                raise ShardError("the index of its samples does not fit this shard", url=shard.url)
            return found, [bytes(view[found[each] : found[each + 1]]) for each in samples]

        name = FileName(f"{name_of(shard)}\0unpacked", opened.version)
        make = partial(unpack, self._stores, shard, opened.info, self._ahead)
        found, data = await self._files.use(name, make, use, self._pool, self._slots)
        if opened.edges is None:
            self._keep_edges(opened, found)
        parse = opened.parser.parse
        return [parse(each, int(found[at]), last=False) for each, at in zip(data, samples, strict=True)]

    async def _read_rows(self, opened: _OpenShard, rows: list[int]) -> list[Sample]:
        """Return samples of a Parquet shard, from its decoded row groups, which the host's processes share."""
        shard, edges = opened.shard, opened.shard.edges
        if edges is None:
            from asyncloader.remote.parquet_reading import read_footer

            await read_footer(opened.pinned, shard.url)  # raises the error that it raised before
            raise ShardError("the shard was replaced since its rows were counted", url=shard.url)
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(bisect_right(edges, row) - 1, []).append(row)
        columns = "" if self._columns is None else repr(sorted(self._columns))

        def read_group(group: int, wanted: list[int]) -> Coroutine[Any, Any, list[Sample]]:
            first, stop = edges[group : group + 2]
            make = partial(
                decode_rows,
                opened.pinned,
                shard,
                opened.info,
                first,
                stop,
                columns=self._columns,
                max_sample_bytes=self._max,
                read_ahead=self._ahead,
            )
            use = partial(_parse_rows, rows=wanted, first=first, url=shard.url, max_sample_bytes=self._max)
            name = FileName(f"{name_of(shard)}\0rows {first} to {stop} {columns}", opened.version)
            return self._files.use(name, make, use, self._pool, self._slots)

        found = await gather_all(read_group(*each) for each in groups.items())
        return [sample for group in found for sample in group]

    @staticmethod
    def _is_odd(opened: _OpenShard, edges: npt.NDArray[np.int64], samples: list[int]) -> bool:
        """Whether one of the samples, the last in its shard, stands for what cannot be read: the reader of a range has
        the error for it.
        """
        return not opened.whole and samples[-1] == len(edges) - 2

    async def _read_stepwise(self, opened: _OpenShard, start: int, stop: int) -> Sample:
        part = CatalogRange(0, start, stop if stop > start else None)
        reading = read_shard_range(self._stores, opened.shard, part, max_sample_bytes=self._max, read_ahead=self._ahead)
        async with aclosing(reading) as batches:
            async for batch in batches:
                return batch[0].sample
        raise ShardError("the shard was replaced: no sample is here", url=opened.shard.url, offset=start)

    def _opened(self, number: int) -> _OpenShard:
        opened = self._open.get(number)
        if opened is None:
            shard = self._catalog.shards[number]
            transport, path = self._stores.find(shard.url)
            parser = SampleParser(shard, self._max)
            opened = _OpenShard(shard, self._catalog.infos[number], transport.pinned(path), parser)
            self._open[number] = opened
            if len(self._open) > MOST_SHARDS:
                _, oldest = self._open.popitem(last=False)
                self._forget(oldest)
        self._open.move_to_end(number)
        return opened

    async def _edges(self, opened: _OpenShard) -> npt.NDArray[np.int64]:
        if opened.edges is not None:
            return opened.edges
        shard = opened.shard
        if shard.mds is not None:
            try:
                (header,) = await opened.pinned.read_ranges([(0, shard.mds.header_size)])
            except RangeOutOfBounds as error:
                raise ShardError("the shard is truncated: its table does not fit in it", url=shard.url) from error
            edges = shard.mds.offsets(header, url=shard.url)
        else:
            index = await self._indexer.index(shard, opened.info or ObjectInfo(0, None))
            edges, opened.whole = index.edges, index.whole
        self._keep_edges(opened, edges)
        return edges

    def _keep_edges(self, opened: _OpenShard, edges: npt.NDArray[np.int64]) -> None:
        if opened.edges is None:  # another call may have been quicker
            opened.edges = edges
            self._index_bytes += edges.nbytes
        for each in list(self._open.values()) if self._index_bytes > INDEX_BYTES else ():
            if each is not opened and self._index_bytes > INDEX_BYTES:
                self._forget(each)

    def _forget(self, opened: _OpenShard) -> None:
        if opened.edges is not None:
            self._index_bytes -= opened.edges.nbytes
            opened.edges = None

    def _check_version(self, opened: _OpenShard) -> None:
        if opened.version is not None and opened.pinned.etag not in (None, opened.version):
            raise changed_error(opened.pinned.path)


def _parse_rows(view: memoryview, **options: Any) -> list[Sample]:
    from asyncloader.formats.arrow_chunk import parse_rows  # imports pyarrow

    return parse_rows(view, **options)
