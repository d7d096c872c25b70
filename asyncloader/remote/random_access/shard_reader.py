"""Reads samples by their numbers, in one event loop: those of a shard together, shards at the same time.

Data path: numbers -> [shard_reader: index -> byte ranges -> sample_parsing] -> dataset.

The transport joins neighbours into one request (`Transport.read_ranges`).
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import aclosing
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncloader.formats import Sample, ShardError
from asyncloader.remote.catalog import Shard
from asyncloader.remote.random_access.host_files import HostFiles
from asyncloader.remote.random_access.indexing import Indexer, SampleCatalog
from asyncloader.remote.random_access.sample_parsing import SampleParser
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectInfo, PinnedReader, RangeOutOfBounds
from asyncloader.transports.base import changed_error, gather_all
from asyncloader.transports.blocking import BlockingPool

INDEX_BYTES = 64 << 20
"""Bytes of indexes that a loop keeps in memory: of 8 million samples. Others are read from their files again."""

MOST_SHARDS = 1 << 16
"""Shards whose versions a loop keeps."""

THREADS = 4


class _OpenShard:
    """A shard of which samples were read."""

    def __init__(self, shard: Shard, info: ObjectInfo | None, pinned: PinnedReader, parser: SampleParser) -> None:
        self.shard = shard
        self.info = info
        self.pinned = pinned
        self.parser = parser
        self.edges: npt.NDArray[np.int64] | None = None
        self.whole = True


class ShardsReader:
    """Reads the samples of a catalog. Its loop must call `aclose`.

    Args:
        catalog: the samples.
        stores: find the transports; of the running loop.
        files: the host's.
        max_sample_bytes: refuse a sample with more (decompressed) bytes.
        read_ahead: bytes that are fetched ahead of a sample that is too large to be read at once.
    """

    def __init__(
        self, catalog: SampleCatalog, stores: Stores, files: HostFiles, *, max_sample_bytes: int, read_ahead: int
    ) -> None:
        self._catalog = catalog
        self._stores = stores
        self._max = max_sample_bytes
        self._ahead = read_ahead
        self._pool = BlockingPool("shards", THREADS)
        self._indexer = Indexer(stores, files, self._pool, max_sample_bytes=max_sample_bytes, read_ahead=read_ahead)
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
        edges = await self._edges(opened)
        spans = [(int(edges[each]), int(edges[each + 1])) for each in samples]
        # What is no sample, and what is too large for one, is read in steps, by the reader that has the error for it.
        odd = not opened.whole and samples[-1] == len(edges) - 2
        if odd or any(stop - start > self._max for start, stop in spans):
            return [await self._read_stepwise(opened, *span) for span in spans]
        try:
            data = await opened.pinned.read_ranges([(start, stop - start) for start, stop in spans])
        except RangeOutOfBounds as error:
            raise ShardError(
                "the shard is truncated, or was replaced: it ends before its samples do",
                url=opened.shard.url,
                offset=spans[-1][0],
            ) from error
        self._check_version(opened)
        parse = opened.parser.parse
        return [parse(each, start, last=False) for each, (start, _) in zip(data, spans, strict=True)]

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
        if opened.edges is None:  # another call may have been quicker
            opened.edges = edges
            self._index_bytes += edges.nbytes
        for each in list(self._open.values()) if self._index_bytes > INDEX_BYTES else ():
            if each is not opened and self._index_bytes > INDEX_BYTES:
                self._forget(each)
        return edges

    def _forget(self, opened: _OpenShard) -> None:
        if opened.edges is not None:
            self._index_bytes -= opened.edges.nbytes
            opened.edges = None

    def _check_version(self, opened: _OpenShard) -> None:
        expected = None if opened.info is None else opened.info.etag
        if expected is not None and opened.pinned.etag not in (None, expected):
            raise changed_error(opened.pinned.path)
