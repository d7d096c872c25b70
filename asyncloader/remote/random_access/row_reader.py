"""Reads rows of Parquet shards out of decoded row groups, which the host's processes share.

Data path: chunks -> host_files -> kept_chunks -> [row_reader: arrow_chunk] -> shard_reader.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from asyncloader.formats import Sample, ShardError
from asyncloader.formats.arrow_chunk import RowsFile
from asyncloader.formats.parquet import RowOptions
from asyncloader.remote.parquet_reading import read_footer
from asyncloader.remote.random_access.chunks import decode_rows
from asyncloader.remote.random_access.host_files import FileName
from asyncloader.remote.random_access.kept_chunks import DecodedChunk, KeptChunks
from asyncloader.remote.random_access.opened_shards import OpenShard, SampleGroup
from asyncloader.transports.base import gather_all

_MOST_NAMES = 1 << 12
"""Names of decoded row groups that a loop remembers."""


class RowGroupSamples(NamedTuple):
    """Samples of one row group.

    Attributes:
        first, stop: the numbers of the row group's rows.
        group: the samples.
    """

    first: int
    stop: int
    group: SampleGroup


class RowReader:
    """Reads the rows of one dataset. Used in one event loop.

    Args:
        chunks: the decoded row groups.
        options: how rows are read.
    """

    def __init__(self, chunks: KeptChunks, options: RowOptions) -> None:
        self._chunks = chunks
        self._options = options
        self._wanted = "" if options.columns is None else repr([*options.columns])  # samples have them in this order
        self._names: dict[tuple[OpenShard, int], FileName] = {}  # by the first row

    def split(self, group: SampleGroup) -> Iterator[RowGroupSamples]:
        """Yield the samples of a shard by row groups."""
        edges = group.opened.shard.edges
        assert edges is not None
        at, rows = 0, group.samples.tolist()
        while at < len(rows):
            number = bisect_right(edges, rows[at]) - 1
            first, stop = edges[number : number + 2]
            end = bisect_left(rows, stop, at)
            yield RowGroupSamples(first, stop, group.part(at, end))
            at = end

    async def read(self, group: SampleGroup) -> list[Sample]:
        """Return samples of a shard, whose row groups are decoded at the same time.

        Raises:
            ShardError: the shard or a row cannot be read.
            TransportError: the store cannot be read, or the shard has changed.
        """
        opened = group.opened
        if opened.shard.edges is None:
            await read_footer(opened.pinned, opened.shard.url)  # raises the error that it raised before
            raise ShardError("the shard was replaced since its rows were counted", url=opened.shard.url)
        found = await gather_all(map(self._read, self.split(group)))
        return [sample for rows in found for sample in rows]

    async def _read(self, wanted: RowGroupSamples) -> list[Sample]:
        opened = wanted.group.opened
        make = partial(
            decode_rows,
            opened.pinned,
            opened.shard,
            opened.info,
            wanted.first,
            wanted.stop,
            self._options,
        )
        return await self._chunks.use(self._name(wanted), partial(opened.decode, make), partial(self._parse, wanted))

    def _name(self, wanted: RowGroupSamples) -> FileName:
        key = opened, first = wanted.group.opened, wanted.first
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            rows = f"rows {first} to {wanted.stop}, few in a message {self._wanted}"
            name = self._names[key] = opened.decoded_name(rows)
        return name

    def _parse(self, wanted: RowGroupSamples, chunk: DecodedChunk) -> list[Sample]:
        wanted.group.opened.check_file()
        return self._parsed(wanted, chunk).samples(chunk.read, wanted.group.samples.tolist())

    def _parsed(self, wanted: RowGroupSamples, chunk: DecodedChunk) -> RowsFile:
        parsed: RowsFile | None = None if chunk.file is None else chunk.file.parsed
        if parsed is None:
            url, most = wanted.group.opened.shard.url, self._options.max_sample_bytes
            parsed = RowsFile(chunk.read, chunk.size, first=wanted.first, url=url, max_sample_bytes=most)
            if chunk.file is not None:
                chunk.file.parsed = parsed
        return parsed
