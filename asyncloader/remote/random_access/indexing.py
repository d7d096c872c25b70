"""Finds where the samples of each shard are: in an index that is kept or lies beside the shard, or by reading it.

Data path: discovery -> [indexing: sample_index, host_files] -> catalog of samples -> shard_reader.

MDS shards begin with a table of their samples, and Parquet files end with one of their row groups: only the number of
samples is asked for here. Shards of other formats are read once, whole, several at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.formats import Located, ShardError
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.random_access.host_files import Content, FileName, HostFiles
from asyncloader.remote.reading import Pins, check_size, read_shard_range
from asyncloader.remote.sample_counts import warn_when_slow
from asyncloader.remote.sample_index import (
    MAX_INDEX_BYTES,
    SampleIndex,
    dump_index,
    format_name,
    index_name,
    parse_index,
)
from asyncloader.remote.shard_sizes import for_each, with_counts
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores, scheme_of, strip_signature
from asyncloader.transports import ObjectInfo, ObjectNotFound
from asyncloader.transports.base import changed_error
from asyncloader.transports.blocking import BlockingPool

READ_AT_ONCE = 8
"""Shards that are read at the same time to index them."""

LEFT_TO_READERS = (ObjectNotFound, ShardError)
"""Errors of a single shard: one sample stands for what cannot be read, and raises the error. Others may be temporary.
"""


class SampleCatalog(NamedTuple):
    """The samples of a dataset, numbered through all shards.

    Attributes:
        shards: the shards; those of Parquet with the rows at which their row groups begin (`Shard.edges`).
        infos: their sizes and versions; None where they do not matter, or the object is missing.
        starts: the number of each shard's first sample and, last, of all samples: int64.
    """

    shards: Sequence[Shard]
    infos: Sequence[ObjectInfo | None]
    starts: npt.NDArray[np.int64]


class Indexer:
    """Finds or makes the indexes of shards, in one loop.

    Args:
        stores: find the transports.
        files: where indexes are kept.
        pool: threads for these files.
        max_sample_bytes: a sample with more bytes ends what can be read of its shard.
        read_ahead: bytes of a shard that are fetched ahead.
    """

    def __init__(
        self, stores: Stores, files: HostFiles, pool: BlockingPool, *, max_sample_bytes: int, read_ahead: int
    ) -> None:
        self._stores = stores
        self._files = files
        self._pool = pool
        self._max = max_sample_bytes
        self._ahead = read_ahead
        self.slots = asyncio.Semaphore(READ_AT_ONCE)
        self.read = 0
        """Shards that were read."""

    async def catalog(self, shards: Sequence[Shard]) -> SampleCatalog:
        """Count the samples of all shards, and index those that have no index.

        Raises:
            ShardError: an index beside a shard does not fit it; or a shard has another size than its listing says.
            TransportError: a shard cannot be read, for a reason that may pass.
            ImportError: a format needs a package that is not installed.
        """
        counted = await with_counts(shards, self._stores, leave=LEFT_TO_READERS)
        counts = np.ones(len(shards), np.int64)  # of a shard that cannot be read
        infos: list[ObjectInfo | None] = [None] * len(shards)
        done = 0

        async def count(number: int) -> None:
            nonlocal done
            shard = counted[number]
            if shard.mds is None or shard.mds.compression is not None:
                try:
                    infos[number] = info = await self.info(shard)
                except LEFT_TO_READERS:
                    return
                check_size(shard, info.size)
            if shard.samples is not None:
                counts[number] = shard.samples
            elif shard.format != PARQUET:
                counts[number] = len(await self.index(shard, infos[number] or ObjectInfo(0, None)))
            done += 1

        text = (
            "the samples of %d shards are indexed before the first batch, which reads each shard without an index: "
            "%d are indexed after %.0f s"
        )
        with warn_when_slow(text, len(shards), lambda: done):
            await for_each(range(len(shards)), count)
        starts = np.zeros(len(shards) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        return SampleCatalog(counted, infos, starts)

    async def info(self, shard: Shard) -> ObjectInfo:
        """Return a shard's size and version. Raises the errors of `Transport.info`."""
        transport, path = self._stores.find(shard.url)
        return await transport.info(path)

    async def index(self, shard: Shard, info: ObjectInfo) -> SampleIndex:
        """Return the index of this version of a shard: kept, beside the shard, or made now.

        Raises:
            The errors of `catalog`.
        """

        async def make() -> bytes:
            found = await self.beside(shard, info)
            return dump_index(await self.make(shard, info) if found is None else found)

        what = f"{strip_signature(shard.url)}\0samples\0{format_name(shard.format)}\0{self._max}"

        def use(kept: Content) -> SampleIndex | None:
            try:
                return parse_index(kept.read(0, kept.size))
            except ValueError:
                return None

        index = await self._files.use(FileName(what, info.etag, small=True), make, use, self._pool, self.slots)
        if index is None or (index.size, index.etag, index.format) != (*info, format_name(shard.format)):
            # The file that is kept there is of another shard.
            async with self.slots:
                return await self.make(shard, info)
        return index

    async def beside(self, shard: Shard, info: ObjectInfo) -> SampleIndex | None:
        """Return the index beside a shard, or None.

        Raises:
            ShardError: it is damaged, or of another version of the shard.
        """
        transport, path = self._stores.find(shard.url)
        folder, slash, name = path.rpartition("/")
        path = f"{folder}{slash}{index_name(name)}"
        try:
            data = await transport.read(path, max_bytes=MAX_INDEX_BYTES)
        except ObjectNotFound:
            return None
        try:
            index = parse_index(data)
            if index.format != format_name(shard.format):
                raise ValueError(f"it is of a shard of format {index.format!r}")
            if (index.size, index.etag or info.etag) != (info.size, info.etag or index.etag):
                raise ValueError(
                    f"it is of another version of the shard, of {index.size:,} bytes and version {index.etag}; the "
                    f"shard has {info.size:,} bytes and version {info.etag}"
                )
        except ValueError as error:
            raise ShardError(
                f"the index of samples beside this shard, {index_name(name)!r}, cannot be used: {error}. Delete it, or "
                "make it again by index_shards(...)",
                url=shard.url,
            ) from None
        # As the object is described here: one of the two may have no version.
        return SampleIndex(index.format, info.size, info.etag, index.edges, index.whole)

    async def make(self, shard: Shard, info: ObjectInfo) -> SampleIndex:
        """Read a whole shard, and return its index.

        Raises:
            TransportError: it cannot be read, or has changed.
        """
        bad: list[ShardError] = []
        found = [np.zeros(1, np.int64)]
        whole = True
        pins = Pins()
        transport, path = self._stores.find(shard.url)
        reading = read_shard_range(
            self._stores,
            shard,
            CatalogRange(0),
            max_sample_bytes=self._max,
            on_bad=bad.append,
            read_ahead=self._ahead,
            pins=pins,
        )

        def note(located: Sequence[Located]) -> None:
            # A bad sample is a sample, which raises its error.
            ends = [each.resume for each in located] + [error.resume for error in bad if error.resume is not None]
            bad.clear()
            found.append(np.array(sorted(ends), np.int64))

        with pins.hold(transport, path, shard.url) as pin:
            try:
                async with aclosing(reading) as batches:
                    async for located in batches:
                        note(located)
                        await asyncio.sleep(0)  # the reader of a shard in memory has nothing to wait for
            except LEFT_TO_READERS:
                whole = False
            note(())
            if not pin.reader.may_be(info.etag):
                raise changed_error(path)
        self.read += 1
        edges = np.concatenate(found)
        if not whole:
            last = int(edges[-1])
            edges = np.append(edges, last if shard.format.compression else max(last, info.size))
        return SampleIndex(format_name(shard.format), info.size, info.etag, edges, whole)


async def index_all(shards: Sequence[Shard], stores: Stores, indexer: Indexer) -> int:
    """Make the indexes that are missing beside shards, or do not fit, and write them there. Return how many.

    Raises:
        ShardError, ObjectNotFound: a shard cannot be read to its end.
        WriteFailed: the store cannot be written to.
        The errors of `Indexer.catalog`.
    """
    made = 0

    async def one(shard: Shard) -> None:
        nonlocal made
        info = await indexer.info(shard)
        try:
            if await indexer.beside(shard, info) is not None:
                return
        except ShardError:
            pass  # of another version: it is made again
        async with indexer.slots:
            index = await indexer.make(shard, info)
        if not index.whole:
            raise ShardError(
                f"the shard cannot be read beyond byte {int(index.edges[-2]):,}, so it gets no index: write it again",
                url=shard.url,
            )
        # A local file's version is its time of modification, which ends when the files are copied to a store.
        if scheme_of(shard.url) == "file" and stores.transport is None:
            index = replace(index, etag=None)
        transport, path = stores.find(shard.url)
        folder, slash, name = path.rpartition("/")
        await transport.write(f"{folder}{slash}{index_name(name)}", [dump_index(index)])
        made += 1

    await for_each(shards, one)
    return made
