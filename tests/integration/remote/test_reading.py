"""Shards from a web server: found, read in ranges, broken, replaced and cached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader import AsyncDataLoader, RemoteIterableDataset, StateError
from asyncloader.formats import Located
from asyncloader.remote.catalog import Shard, format_of
from asyncloader.remote.discovery import find_shards
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_sizes import with_counts, with_edges
from asyncloader.remote.shard_splitting import CatalogRange, cut
from asyncloader.remote.stores import Stores
from asyncloader.transports import HttpTransport, ReadFailed
from asyncloader.transports.retry import RetryPolicy
from tests.helpers.http_store import LISTING, HttpStore, broken, change, serving, status
from tests.unit.remote.shards import (
    MAKERS,
    drain,
    jsonl,
    mds,
    mds_index,
    number_of,
    parquet,
    read_all,
    shard_of,
    tar,
)

pytestmark = pytest.mark.network

SOON = RetryPolicy(budget_s=60, first_delay_s=0.001, cap_s=0.01)


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        yield store


@pytest_asyncio.fixture
async def stores() -> AsyncIterator[Stores]:
    stores = Stores({"retry": SOON})
    yield stores
    await stores.aclose()


@pytest.mark.thorough
@pytest.mark.parametrize("url", MAKERS)
async def test_every_format_over_http(store: HttpStore, stores: Stores, url: str) -> None:
    """All samples are read, and the same samples from the middle on."""
    store.put(url, MAKERS[url](range(300)))
    shard = shard_of(f"{store.url}/{url}", range(300))
    found = await read_all(stores, shard)
    assert [number_of(sample) for sample, _ in found] == list(range(300))
    rest = await read_all(stores, shard, CatalogRange(0, found[123].resume))
    assert [number_of(sample) for sample, _ in rest] == list(range(124, 300))


@pytest.mark.thorough
async def test_many_ranges_at_the_same_time(store: HttpStore, stores: Stores) -> None:
    """One connection pool, many shards and ranges in flight, each sample once."""
    wanted: set[int] = set()
    for number in range(4):
        numbers = range(number * 1000, number * 1000 + 500)
        wanted.update(numbers)
        store.put(f"{number}.jsonl", jsonl(numbers, size=300))
    shards = await find_shards(store.url + "/{0..3}.jsonl", stores)
    shards = await with_edges(shards, stores, 16)
    shard_ranges = cut(shards, 16)
    assert len(shard_ranges) == 16
    store.latency_s = 0.5  # so that the last is requested before the first is answered, on a busy machine too
    lists = await asyncio.gather(
        *(read_all(stores, shards[shard_range.shard], shard_range) for shard_range in shard_ranges)
    )
    numbers_read = [number_of(sample) for found in lists for sample, _ in found]
    assert sorted(numbers_read) == sorted(wanted)
    assert store.most_in_flight > 4


async def test_signed_urls_keep_their_queries(store: HttpStore, stores: Stores) -> None:
    """Each request has the query of its own shard, unchanged."""
    for number in range(3):
        store.put(f"a b/{number}.jsonl", jsonl([number]))
    shards = await find_shards([f"{store.url}/a%20b/{n}.jsonl?sig={n}%2F%3D" for n in range(3)], stores)
    found = [await read_all(stores, shard) for shard in shards]
    assert [number_of(each[0].sample) for each in found] == [0, 1, 2]
    assert {(asked.path, asked.query) for asked in store.asked} == {
        (f"a b/{n}.jsonl", f"sig={n}%2F%3D") for n in range(3)
    }
    assert found[1][0].sample["__url__"] == f"{store.url}/a%20b/1.jsonl?sig=1%2F%3D"


async def test_a_run_goes_on_with_new_signatures(store: HttpStore) -> None:
    """A state identifies shards by their URLs without signatures; the rest of a query is part of the name."""
    store.put("a.jsonl", jsonl(range(5)))

    def make(query: str) -> AsyncDataLoader[Any]:
        dataset = RemoteIterableDataset(f"{store.url}/a.jsonl?{query}")
        return AsyncDataLoader(dataset, batch_size=2, seed=1, decode=number_of)

    async with make("X-Amz-Date=1&X-Amz-Signature=f") as loader:
        batches = aiter(loader)
        assert (await anext(batches)).tolist() == [0, 1]
        state = loader.state_dict()
    async with make("X-Amz-Date=2&X-Amz-Signature=a") as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() async for batch in loader] == [[2, 3], [4]]
    async with make("versionId=2") as loader:
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="of other shards"):
            await anext(aiter(loader))


async def test_options_that_do_not_pickle(store: HttpStore) -> None:
    """Headers from a function, as for a token that changes: without workers nothing is pickled."""
    store.put("a.jsonl", jsonl([5, 6, 7]))
    options: dict[str, Any] = {"headers": lambda: {"Authorization": "Bearer token"}}
    dataset = RemoteIterableDataset(f"{store.url}/a.jsonl", storage_options=options)
    assert [batch.tolist() async for batch in AsyncDataLoader[Any](dataset, 2, decode=number_of)] == [[5, 6], [7]]
    assert "1 shards" in repr(dataset)
    async with HttpTransport(store.url, **options) as transport:
        dataset = RemoteIterableDataset("a.jsonl", transport=transport)
        assert [batch.tolist() async for batch in AsyncDataLoader[Any](dataset, 2, decode=number_of)] == [[5, 6], [7]]
    assert {asked.headers["Authorization"] for asked in store.asked} == {"Bearer token"}


async def test_a_prefix_is_listed_by_a_listing(store: HttpStore) -> None:
    """HTTP itself has no listing; an object with the names serves as one."""
    for number in range(3):
        store.put(f"part {number}.tar", tar([number]))
    stores = Stores({"listing": LISTING})
    shards = await find_shards(f"{store.url}/", stores)
    assert [shard.url for shard in shards] == [f"{store.url}/part%20{number}.tar" for number in range(3)]
    assert [number_of((await read_all(stores, shard))[0].sample) for shard in shards] == [0, 1, 2]
    await stores.aclose()


async def test_an_mds_data_set(store: HttpStore, stores: Stores) -> None:
    """The dataset is counted by its index, and cut by its headers."""
    parts = [mds(range(50)), mds(range(50, 70))]
    store.put("set/index.json", mds_index(*parts, counts=[50, 20]))
    for number, data in enumerate(parts):
        store.put(f"set/shard.{number:05d}.mds", data)
    shards = await with_counts(await find_shards(f"{store.url}/set/", stores), stores)
    assert [shard.samples for shard in shards] == [50, 20]
    shards = await with_edges(shards, stores, 7)
    read: list[int] = []
    for shard_range in cut(shards, 7):
        read += [number_of(found.sample) for found in await read_all(stores, shards[shard_range.shard], shard_range)]
    assert read == list(range(70))


@pytest.mark.thorough
@pytest.mark.parametrize("url", ["a.tar", "a.tar.gz", "a.jsonl", "a.tfrecord", "a.mds", "a.parquet"])
async def test_broken_connections_lose_and_double_nothing(store: HttpStore, stores: Stores, url: str) -> None:
    """Broken downloads are resumed; requests to failing servers are retried."""
    store.put(url, MAKERS[url](range(3000)))
    store.faults[url].extend([status(503), broken(1000), broken(5000), broken(0)])
    found = await read_all(stores, shard_of(f"{store.url}/{url}", range(3000)))
    assert [number_of(sample) for sample, _ in found] == list(range(3000))
    assert not store.faults[url]


async def test_a_shard_that_is_replaced_meanwhile(store: HttpStore, stores: Stores) -> None:
    """The samples before the change are right, then an error: never a mixture."""
    store.put("a.tar", tar(range(2000), size=1000))
    store.faults["a.tar"].extend([broken(500_000), change(tar(range(5000, 7000), size=1000))])
    got: list[Located] = []
    with pytest.raises(ReadFailed, match="changed"):
        await drain(read_shard_range(stores, Shard(f"{store.url}/a.tar", format_of("a.tar")), CatalogRange(0)), got)
    assert got
    assert [number_of(sample) for sample, _ in got] == list(range(len(got)))


async def test_a_parquet_file_that_is_replaced_meanwhile(store: HttpStore, stores: Stores) -> None:
    """Also by a file of the same size: the rows before the change are right, then an error of the transport."""
    old, new = parquet(range(1000), group=100), parquet(range(2000, 3000), group=100)
    store.put("a.parquet", old)
    shard = Shard(f"{store.url}/a.parquet", format_of("a.parquet"))
    batches = read_shard_range(stores, shard, CatalogRange(0), read_ahead=1000)
    got = list(await anext(batches))
    store.put("a.parquet", new)
    with pytest.raises(ReadFailed, match="changed while it was read"):
        await drain(batches, got)
    assert [number_of(sample) for sample, _ in got] == list(range(len(got)))


@pytest.mark.thorough
async def test_leaving_early_ends_the_read_ahead(store: HttpStore, stores: Stores) -> None:
    """No read-ahead continues in the background."""
    store.put("a.tar", tar(range(5000), size=4000))
    batches = read_shard_range(
        stores, Shard(f"{store.url}/a.tar", format_of("a.tar")), CatalogRange(0), read_ahead=100_000
    )

    def reading_ahead() -> bool:
        return "asyncloader-read-ahead" in {task.get_name() for task in asyncio.all_tasks()}

    assert await anext(batches)
    assert reading_ahead()
    await batches.aclose()
    assert not reading_ahead()


async def test_what_was_read_is_cached(store: HttpStore, tmp_path: Path) -> None:
    """The second epoch only asks whether the shard has changed."""
    store.put("a.tar", tar(range(100), size=1000))
    shard = Shard(f"{store.url}/a.tar?sig=1", format_of("a.tar"))
    expected: Any = None
    for _ in range(2):
        stores = Stores(cache_dir=tmp_path)
        found = await read_all(stores, shard)
        await stores.aclose()
        assert expected is None or found == expected
        expected = found
    assert [asked.method for asked in store.asked].count("GET") == 1


async def test_objects_that_differ_by_their_query_are_cached_apart(store: HttpStore, tmp_path: Path) -> None:
    """Objects are cached apart, also where the server states the same date for both."""
    date = {"Last_Modified": "Tue, 03 Nov 2026 08:00:00 GMT", "Date": "Sat, 21 Nov 2026 18:00:00 GMT"}

    async def by_query(store: HttpStore, request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in date.items()}
        return web.Response(body=request.query["part"].encode(), headers=named)

    store.faults["a.tar"].extend([by_query] * 20)
    for revalidate in (True, False):
        stores = Stores(cache_dir=tmp_path / str(revalidate), cache_revalidate=revalidate)
        for turn in range(2):
            for part in ("1", "2"):
                transport, path = stores.find(f"{store.url}/a.tar?part={part}&sig={turn}")
                assert await transport.read(path) == part.encode()
        await stores.aclose()
    assert len([asked for asked in store.asked if asked.method == "GET"]) == 4  # each was cached
