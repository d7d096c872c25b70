"""Reads samples by their numbers, in one event loop: those of a shard together, shards at the same time.

Data path: numbers -> [shard_reader: index -> byte ranges -> opened_shards] -> dataset.

The samples of a call whose bytes a cache or a local disk has are read by one call in a thread, from files that are kept
open. Each is parsed before the next is read. All others are read shard by shard, at the same time; the transport joins
neighbours into one request (`Transport.read_ranges`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncloader.formats import Sample, ShardError
from asyncloader.formats.parquet import RowOptions
from asyncloader.remote.catalog import PARQUET
from asyncloader.remote.random_access.host_files import Content, HostFiles
from asyncloader.remote.random_access.indexing import Indexer, SampleCatalog
from asyncloader.remote.random_access.opened_shards import (
    OpenShard,
    RowReader,
    SampleGroup,
    SampleParser,
    compression_of,
    unpack,
)
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectInfo, RangeOutOfBounds
from asyncloader.transports.base import changed_error, gather_all
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cached_object import CachedObject
from asyncloader.transports.open_files import OpenFiles

INDEX_BYTES = 64 << 20
"""Bytes of indexes that a loop keeps in memory: of 8 million samples. Others are read from their files again."""

MOST_SHARDS = 1 << 16
"""Shards whose versions a loop keeps."""

THREADS = 4

DECODED_AT_ONCE = 4
"""Compressed shards and row groups that a loop decodes at a time; each is in memory meanwhile."""

UNUSED_S = 2.0
"""Time after which a file that is not read is no longer kept open."""

_FEW = 64
"""Samples that are read by one thread: each read gives up the GIL, and two threads would wait for each other."""

_LENGTH = itemgetter(1)  # of a sample's start and length


class ShardsReader:
    """Reads the samples of a catalog. Its loop must call `aclose`.

    Args:
        catalog: the samples.
        stores: find the transports; of the running loop.
        files: the host's.
        open_files: keeps files of the cache, and of a disk, open.
        max_sample_bytes: refuse a sample with more (decompressed) bytes.
        read_ahead: bytes of a shard or a row group that are fetched ahead of its decoding.
        columns: of Parquet, the columns to read. None: all.
    """

    def __init__(
        self,
        catalog: SampleCatalog,
        stores: Stores,
        files: HostFiles,
        open_files: OpenFiles,
        *,
        max_sample_bytes: int,
        read_ahead: int,
        columns: Sequence[str] | None,
    ) -> None:
        self._catalog = catalog
        self._stores = stores
        self._kept = open_files
        self._max = max_sample_bytes
        self._ahead = read_ahead
        self._pool = BlockingPool("shards", THREADS)
        self._local_reads = BlockingPool("local shards", THREADS)
        self._indexer = Indexer(stores, files, self._pool, max_sample_bytes=max_sample_bytes, read_ahead=read_ahead)
        self._files = files
        self._slots = asyncio.Semaphore(DECODED_AT_ONCE)
        self._rows = RowReader(files, self._pool, self._slots, RowOptions(columns, max_sample_bytes, read_ahead))
        self._open: OrderedDict[int, OpenShard] = OrderedDict()  # the last used last
        self._index_bytes = 0
        self._timer: asyncio.TimerHandle | None = None  # while files are open

    async def aclose(self) -> None:
        """Join the threads, and close the files."""
        try:
            await gather_all([self._pool.aclose(), self._local_reads.aclose()])
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._kept.drop_unused(0.0)

    async def read(self, numbers: npt.NDArray[np.int64]) -> list[Sample]:
        """Return the samples with these numbers, in their order.

        Raises:
            ShardError, ObjectNotFound: a sample cannot be read.
            TransportError: the store cannot be read, or a shard has changed.
        """
        try:
            return await self._read(numbers)
        finally:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(UNUSED_S, self._drop_unused)

    async def _read(self, numbers: npt.NDArray[np.int64]) -> list[Sample]:
        samples: list[Any] = [None] * len(numbers)
        local: list[tuple[SampleGroup, list[tuple[int, int]]]] = []
        groups: list[SampleGroup] = []
        for group in self._groups(numbers):
            edges = group.opened.edges
            if edges is None or not self._is_local(group, edges):
                groups.append(group)
            else:
                # Here, and not in the thread: another call may forget the edges before it runs.
                local.append((group, group.spans(edges)))
        if local:
            # A call with many samples by several threads: a disk serves several reads at a time.
            number = min(THREADS, 1 + len(numbers) // _FEW)
            parts = [partial(self._read_local, local[first::number], samples) for first in range(number)]
            for read in await gather_all(map(self._local_reads.run, parts)):
                for group, left, nbytes in read:
                    self._count(group, left, nbytes)
                    if left is not None:
                        groups.append(left)
        if len(groups) == 1:  # needs no task
            groups[0].put(await self._read_group(groups[0]), samples)
        elif groups:
            for group, found in zip(groups, await gather_all(map(self._read_group, groups)), strict=True):
                group.put(found, samples)
        return samples

    def _groups(self, numbers: npt.NDArray[np.int64]) -> list[SampleGroup]:
        if len(numbers) == 1:
            shard = int(self._catalog.starts.searchsorted(numbers[0], side="right")) - 1
            return [SampleGroup(self._opened(shard), numbers - self._catalog.starts[shard], [0])]
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        starts = self._catalog.starts
        shards = np.searchsorted(starts, ascending, side="right") - 1
        inside = ascending - starts[shards]
        places = order.tolist()
        edges = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), len(numbers)]
        return [
            SampleGroup(self._opened(int(shards[first])), inside[first:stop], places[first:stop])
            for first, stop in pairwise(edges)
        ]

    # --- from files that are open

    def _is_local(self, group: SampleGroup, edges: npt.NDArray[np.int64]) -> bool:
        """Whether the cache, or a local disk, is worth a look: the version that is read is known."""
        opened = group.opened
        local = opened.local is not None and opened.local.local and opened.pinned.may_be(opened.version)
        return local and not self._is_odd(opened, edges, group.samples)

    def _read_local(
        self, groups: list[tuple[SampleGroup, list[tuple[int, int]]]], samples: list[Any]
    ) -> list[tuple[SampleGroup, SampleGroup | None, int]]:
        """Read the samples of groups, each with its spans, that are in local files; called in a thread.

        Returns:
            Each group, those of its samples that are left, and the bytes of those that were read.

        Raises:
            ShardError: a sample cannot be read.
        """
        results: list[tuple[SampleGroup, SampleGroup | None, int]] = []
        for group, spans in groups:
            opened = group.opened
            assert opened.local is not None
            if max(map(_LENGTH, spans)) > self._max:
                results.append((group, group, 0))  # its error does not need the bytes
                continue
            found = opened.local.use_local(spans, opened.parser.parse, self._kept)
            group.put(found, samples)
            nbytes = sum(length for (_, length), sample in zip(spans, found, strict=True) if sample is not None)
            left = group.left(found)
            results.append((group, left[0] if left else None, nbytes))
        return results

    def _count(self, group: SampleGroup, left: SampleGroup | None, nbytes: int) -> None:
        cached = group.opened.local
        if isinstance(cached, CachedObject):
            if left is None:
                cached.cached.cache_counts.hit()
            cached.cached.cache_counts.save(nbytes)

    def _drop_unused(self) -> None:
        self._timer = None
        if self._kept.drop_unused(UNUSED_S):
            self._timer = asyncio.get_running_loop().call_later(UNUSED_S, self._drop_unused)

    # --- from the store

    async def _read_group(self, group: SampleGroup) -> list[Sample]:
        opened = group.opened
        if (rows := opened.shard.format == PARQUET) or compression_of(opened.shard) is not None:
            # The name of what is decoded of a file that is too new for a version has the version that is read.
            if opened.is_file and not opened.compared:
                await opened.compare()
            decoded = await (self._rows.read(group) if rows else self._read_unpacked(opened, group.samples))
            # Only now: what is decoded anew has been compared.
            if not opened.compared:
                await opened.compare()
            return decoded
        edges = await self._edges(opened)
        spans = group.spans(edges)
        if self._is_odd(opened, edges, group.samples) or any(length > self._max for _, length in spans):
            return [await self._read_stepwise(opened, edges, each) for each in group.samples.tolist()]
        try:
            data = await opened.read(spans)
        except RangeOutOfBounds as error:
            raise ShardError(
                "the shard is truncated, or was replaced: it ends before its samples do",
                url=opened.shard.url,
                offset=spans[-1][0],
            ) from error
        self._check_version(opened)
        parse = opened.parser.parse
        return [parse(each, 0, length, start) for each, (start, length) in zip(data, spans, strict=True)]

    async def _read_unpacked(self, opened: OpenShard, samples: npt.NDArray[np.int64]) -> list[Sample]:
        """Return samples of a compressed shard, from its decompressed bytes, which the host's processes share."""
        shard, mds = opened.shard, opened.shard.mds
        edges = opened.edges if mds is not None else await self._edges(opened)
        if edges is not None and self._is_odd(opened, edges, samples):
            return [await self._read_stepwise(opened, edges, each) for each in samples.tolist()]

        def use(unpacked: Content) -> tuple[npt.NDArray[np.int64], list[tuple[bytes, int]]]:
            opened.check_file()
            found = edges
            if found is None:
                assert mds is not None
                found = mds.offsets(unpacked.read(0, mds.header_size), url=shard.url)
            if found[-1] > unpacked.size:
                raise ShardError("the index of its samples does not fit this shard", url=shard.url)
            starts, lengths = found[samples].tolist(), (found[samples + 1] - found[samples]).tolist()
            return found, [(unpacked.read(*each), each[0]) for each in zip(starts, lengths, strict=True)]

        name = opened.decoded_name("unpacked")
        make = partial(opened.decode, partial(unpack, self._stores, shard, opened.info))
        found, data = await self._files.use(name, make, use, self._pool, self._slots)
        if opened.edges is None:
            self._keep_edges(opened, found)
        parse = opened.parser.parse
        return [parse(each, 0, len(each), start) for each, start in data]

    @staticmethod
    def _is_odd(opened: OpenShard, edges: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> bool:
        """Whether one of the samples, the last in its shard, stands for what cannot be read: the reader of a range has
        the error for it.
        """
        return not opened.whole and int(samples[-1]) == len(edges) - 2

    async def _read_stepwise(self, opened: OpenShard, edges: npt.NDArray[np.int64], number: int) -> Sample:
        start, stop = int(edges[number]), int(edges[number + 1])
        # Where a shard that was cut off ends, its reader would take a part of a sample for the whole.
        odd = self._is_odd(opened, edges, np.array([number]))
        part = CatalogRange(0, start, None if odd or stop <= start else stop)
        reading = read_shard_range(self._stores, opened.shard, part, max_sample_bytes=self._max, read_ahead=self._ahead)
        async with aclosing(reading) as batches:
            async for batch in batches:
                return batch[0].sample
        raise ShardError("the shard was replaced: no sample is here", url=opened.shard.url, offset=start)

    def _opened(self, number: int) -> OpenShard:
        opened = self._open.get(number)
        if opened is None:
            shard = self._catalog.shards[number]
            transport, path = self._stores.find(shard.url)
            parser = SampleParser(shard, self._max)
            opened = OpenShard(shard, self._catalog.infos[number], transport.pinned(path), parser, self._kept)
            self._open[number] = opened
            if len(self._open) > MOST_SHARDS:
                _, oldest = self._open.popitem(last=False)
                self._forget(oldest)
        self._open.move_to_end(number)
        return opened

    async def _edges(self, opened: OpenShard) -> npt.NDArray[np.int64]:
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

    def _keep_edges(self, opened: OpenShard, edges: npt.NDArray[np.int64]) -> None:
        if opened.edges is None:  # another call may have been quicker
            opened.edges = edges
            self._index_bytes += edges.nbytes
        for each in list(self._open.values()) if self._index_bytes > INDEX_BYTES else ():
            if each is not opened and self._index_bytes > INDEX_BYTES:
                self._forget(each)

    def _forget(self, opened: OpenShard) -> None:
        if opened.edges is not None:
            self._index_bytes -= opened.edges.nbytes
            opened.edges = None

    def _check_version(self, opened: OpenShard) -> None:
        if not opened.pinned.may_be(opened.version):
            raise changed_error(opened.pinned.path)
