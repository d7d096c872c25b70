"""Shards in a bucket: prefixes, keys with odd names, ranges; one transport for the whole bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from asyncloader.remote.discovery import find_shards
from asyncloader.remote.shard_sizes import with_counts, with_edges
from asyncloader.remote.shard_splitting import cut
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectNotFound
from tests.helpers.object_stores import KEYS, SOON, Moto, moto_server, sockets, sockets_closed
from tests.unit.remote.shards import MAKERS, mds, mds_index, number_of, parquet, read_all

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with moto_server() as server:
        yield server


@pytest_asyncio.fixture
async def stores(moto: Moto) -> AsyncIterator[Stores]:
    before = sockets()
    moto.make_bucket("bucket")
    stores = Stores({"endpoint": moto.url, "config": KEYS, "region": "us-east-1", "retry": SOON})
    yield stores
    await stores.aclose()
    moto.reset()
    await sockets_closed(before)


@pytest.mark.thorough
async def test_a_prefix_of_every_format(moto: Moto, stores: Stores) -> None:
    """The shards are listed in ascending order, and read; keys are used unchanged."""
    urls = [url for url in MAKERS if not url.endswith(".mds")]
    for url in urls:
        moto.put(f"bucket/train/100%25 sure #{url}", MAKERS[url](range(50)))
    moto.put("bucket/other/x.tar", b"")
    shards = await find_shards("s3://bucket/train/", stores)
    assert [shard.url for shard in shards] == sorted(f"s3://bucket/train/100%25 sure #{url}" for url in urls)
    for shard in shards:
        assert [number_of(sample) for sample, _ in await read_all(stores, shard)] == list(range(50))
    assert len({stores.find(shard.url)[0] for shard in shards}) == 1


async def test_ranges_of_a_parquet_shard(moto: Moto, stores: Stores) -> None:
    """The shard is cut at its row groups, by the footer that the bucket gave."""
    moto.put("bucket/a.parquet", parquet(range(100), group=9))
    shards = await with_edges(await find_shards("s3://bucket/a.parquet", stores), stores, 5)
    shard_ranges = cut(shards, 5)
    assert len(shard_ranges) == 5
    read = [
        number_of(found.sample)
        for shard_range in shard_ranges
        for found in await read_all(stores, shards[0], shard_range)
    ]
    assert read == list(range(100))


async def test_an_mds_data_set(moto: Moto, stores: Stores) -> None:
    """The prefix has an index, by which the dataset is counted and read."""
    moto.put("bucket/set/index.json", mds_index(mds(range(9)), counts=[9]))
    moto.put("bucket/set/shard.00000.mds", mds(range(9)))
    (shard,) = await with_counts(await find_shards("s3://bucket/set/", stores), stores)
    assert shard.samples == 9
    assert [number_of(sample) for sample, _ in await read_all(stores, shard)] == list(range(9))


async def test_a_shard_that_is_not_there(stores: Stores) -> None:
    """The transport's own error names it; a prefix without shards is an error, too."""
    (shard,) = await find_shards("s3://bucket/gone.tar", stores)
    with pytest.raises(ObjectNotFound, match=r"gone\.tar"):
        await read_all(stores, shard)
    with pytest.raises(ValueError, match="no shard below 's3://bucket/gone/'"):
        await find_shards("s3://bucket/gone/", stores)
