"""Requests to stores about shards: only necessary requests, many at a time, and the answers are checked."""

from __future__ import annotations

import asyncio
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncloader import RemoteIterableDataset
from asyncloader.formats import ShardError
from asyncloader.remote.catalog import Shard, format_of
from asyncloader.remote.discovery import find_shards
from asyncloader.remote.shard_sizes import REQUESTS, with_counts, with_edges, with_sizes
from asyncloader.remote.shard_splitting import cut
from asyncloader.remote.stores import Stores
from asyncloader.transports import MemoryTransport, ObjectInfo, ObjectNotFound, SizeUnknown
from tests.unit.remote.shards import mds, mds_index, parquet, shard_of, tar


class Counting(MemoryTransport):
    """Counts calls, and the largest number of simultaneous calls."""

    asked = 0
    now = 0
    most = 0

    async def info(self, path: str) -> ObjectInfo:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().info(path)
        finally:
            self.now -= 1


class Vague(MemoryTransport):
    """Does not know the size of one of its objects."""

    async def info(self, path: str) -> ObjectInfo:
        if path == "vague.jsonl":
            raise SizeUnknown("it does not say", path=path)
        return await super().info(path)


async def test_sizes_are_asked_for_many_at_a_time() -> None:
    """At most REQUESTS sizes are asked for at a time; the result has the shards' order; no known size is asked for."""
    count = 3 * REQUESTS
    async with Counting({f"{number:03d}.tar": bytes(number) for number in range(count)}) as transport:
        stores = Stores(transport=transport)
        shards = await find_shards("/", stores)
        measured = await with_sizes(shards, stores)
        assert [shard.size for shard in measured] == list(range(count))
        assert (transport.asked, transport.most) == (count, REQUESTS)
        assert await with_sizes(measured, stores) == measured
        assert transport.asked == count


async def test_a_missing_shard_is_named() -> None:
    """The transport's own error is raised, and no request continues."""
    async with Counting({"a.tar": b""}) as transport:
        shards = [Shard(url, format_of(url)) for url in ("a.tar", "gone.tar", "b.tar")]
        with pytest.raises(ObjectNotFound, match=r"(b|gone)\.tar"):
            await with_sizes(shards, Stores(transport=transport))
        assert len(asyncio.all_tasks()) == 1


async def test_a_shard_of_unknown_size_is_read_whole() -> None:
    """Only code that needs the size gets an error; the other shards are measured, and cut."""
    lines = b"{}\n" * 100
    async with Vague({"a.jsonl": lines, "vague.jsonl": lines}) as transport:
        stores = Stores(transport=transport)
        shards = [Shard(url, format_of(url)) for url in ("a.jsonl", "vague.jsonl")]
        measured = await with_edges(shards, stores, 4)
        assert [shard.size for shard in measured] == [300, None]
        assert [shard_range.shard for shard_range in cut(measured, 4)] == [0, 0, 0, 1]
        with pytest.raises(SizeUnknown):
            await with_sizes(shards, stores)
        dataset = RemoteIterableDataset("vague.jsonl", transport=transport)
        assert len([sample async for sample in dataset]) == 100


async def test_nothing_is_asked_if_there_are_shards_enough() -> None:
    """The shards are read whole, so no size is needed."""
    async with Counting() as transport:
        shards = [Shard(f"{number}.parquet", format_of("a.parquet")) for number in range(4)]
        assert await with_edges(shards, Stores(transport=transport), 4) == shards
        assert transport.asked == 0


async def test_parquet_footers_count() -> None:
    """Samples are counted in a Parquet footer; a tar has no count."""
    objects = {"a.parquet": parquet(range(30)), "b.tar": tar(range(3))}
    async with MemoryTransport(objects) as transport:
        stores = Stores(transport=transport)
        shards = await with_counts(await find_shards("/", stores), stores)
        assert [shard.samples for shard in shards] == [30, None]
        assert shards[0].edges == (0, 7, 14, 21, 28, 30)


async def test_row_groups_without_rows_are_no_places_to_cut() -> None:
    """A cut there would only give an empty range."""
    file = io.BytesIO()
    table = pa.table({"n": [1, 2]})
    with pq.ParquetWriter(file, table.schema) as writer:
        for part in (table, table.slice(0, 0), table):
            writer.write_table(part)
    async with MemoryTransport({"a.parquet": file.getvalue()}) as transport:
        (shard,) = await with_edges([shard_of("a.parquet", [])], Stores(transport=transport), 8)
    assert shard.edges == (0, 2, 4)
    assert len(cut([shard], 8)) == 2


async def test_an_mds_header_must_agree_with_its_index() -> None:
    """The header has the samples' positions, so it is checked before the shard is cut."""
    good = mds(range(20))
    objects = {"index.json": mds_index(good, counts=[20]), "shard.00000.mds": good}
    for data, match in ((good, None), (b"\x15" + good[1:], "its index says"), (good[:50], "truncated")):
        async with MemoryTransport({**objects, "shard.00000.mds": data}) as transport:
            stores = Stores(transport=transport)
            shards = await find_shards("/", stores)
            if match is None:
                (shard,) = await with_edges(shards, stores, 4)
                assert len(cut([shard], 4)) == 4
            else:
                with pytest.raises(ShardError, match=match):
                    await with_edges(shards, stores, 4)
