"""A shard is exchanged while several requests read it: rows of one version, or an error; never rows of both."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from aiohttp import web

from asyncloader import AsyncDataLoader, RemoteIterableDataset
from asyncloader.formats import Located
from asyncloader.remote.reading import Pins, read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import CachedTransport, MemoryTransport, ReadFailed
from tests.helpers.http_store import HttpStore, serving
from tests.unit.remote.shards import drain, jsonl, number_of, shard_of

pytestmark = pytest.mark.network

COUNT = 300


def rows(first: int) -> bytes:
    file = io.BytesIO()
    table = pa.table({"n": pa.array(range(first, first + COUNT), pa.int64()), "text": ["x" * 500] * COUNT})
    pq.write_table(table, file, row_group_size=20, compression="none", use_dictionary=False, write_statistics=False)
    return file.getvalue()


OLD, NEW = rows(0), rows(COUNT)
NAMES: dict[str, Callable[[int], dict[str, Any]]] = {
    "strong ETag": lambda version: {"etag": f'"{version}"'},
    "weak ETag": lambda version: {"etag": f'W/"{version}"'},
    "date": lambda version: {"etag": "", "Last_Modified": f"Wed, 25 Nov 2026 06:00:0{version} GMT"},
    "no longer named": lambda version: {"etag": "" if version else '"0"'},
}


def exchanged(
    name: str, path: str = "a.parquet", data: bytes = NEW
) -> Callable[[HttpStore, web.Request], Awaitable[None]]:
    """Replace the object just before it is served."""

    async def fault(store: HttpStore, request: web.Request) -> None:
        store.put(path, data, **NAMES[name](1))

    return fault


async def usual(store: HttpStore, request: web.Request) -> None:
    """Serve the object as it is."""


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        yield store


@pytest_asyncio.fixture
async def stores() -> AsyncIterator[Stores]:
    stores = Stores()
    yield stores
    await stores.aclose()


def test_the_versions_have_one_size() -> None:
    """Equal sizes put the columns of both at the same bytes, so that only the validators distinguish the versions."""
    assert len(OLD) == len(NEW)


@pytest.mark.parametrize("number", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("name", NAMES)
async def test_a_mixture_is_never_read(store: HttpStore, stores: Stores, name: str, number: int) -> None:
    """The exchange strikes one of the requests: HEAD, the footer, and one or two for each row group."""
    store.put("a.parquet", OLD, **NAMES[name](0))
    store.faults["a.parquet"].extend([usual] * number + [exchanged(name)])
    got: list[Located] = []
    batches = read_shard_range(stores, shard_of(f"{store.url}/a.parquet", ()), CatalogRange(0), read_ahead=1)
    with pytest.raises(ReadFailed, match="changed while it was read"):
        await drain(batches, got)
    assert [number_of(sample) for sample, _ in got] == list(range(len(got)))


async def test_ranges_of_one_worker_are_of_one_version(store: HttpStore, stores: Stores) -> None:
    """A range after a range that was read has its version; a version of which no rows were given does not bind."""

    async def read(start: int) -> list[int]:
        shard_range = CatalogRange(0, start, start + 20)
        got: list[Located] = []
        await drain(read_shard_range(stores, shard_of(f"{store.url}/a.parquet", ()), shard_range, pins=pins), got)
        return [number_of(sample) for sample, _ in got]

    pins = Pins()
    store.put("a.parquet", OLD)
    store.faults["a.parquet"].extend([usual, usual, exchanged("weak ETag")])
    with pytest.raises(ReadFailed, match="changed while it was read"):
        await read(0)
    assert await read(20) == list(range(COUNT + 20, COUNT + 40))
    store.put("a.parquet", OLD)
    for _ in range(2):
        with pytest.raises(ReadFailed, match="changed while it was read"):
            await read(40)
    store.put("a.parquet", NEW, **NAMES["weak ETag"](1))
    assert await read(40) == list(range(COUNT + 40, COUNT + 60))


REQUESTS = {"a.parquet": [3, 6, 9, 12], "a.jsonl": [2, 3, 4]}
LINES = jsonl(range(COUNT), size=500), jsonl(range(COUNT, 2 * COUNT), size=500)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("name", "number"), [(name, number) for name, each in REQUESTS.items() for number in each])
async def test_no_sample_is_skipped_for_it(store: HttpStore, name: str, number: int, workers: int) -> None:
    """The reason is no bad sample, although `on_error` is "skip". A worker reads several ranges of the shard."""
    old, new = (OLD, NEW) if name == "a.parquet" else LINES
    store.put(name, old, **NAMES["weak ETag"](0))
    dataset = RemoteIterableDataset(f"{store.url}/{name}", read_ahead=1)
    loader = AsyncDataLoader[Any](
        dataset, batch_size=10, seed=1, decode=number_of, on_error="skip", num_workers=workers
    )
    store.faults[name].extend([usual] * number + [exchanged("weak ETag", name, new)])
    batches: list[list[int]] = []
    async with loader:
        reading = aiter(loader)
        with suppress(ReadFailed):
            async for batch in reading:
                batches += [batch.tolist()]
        assert not loader.skipped_samples
    for worker in range(max(workers, 1)):
        versions = {number >= COUNT for batch in batches[worker :: max(workers, 1)] for number in batch}
        assert len(versions) <= 1
    assert not store.faults[name]


def evict(path: Path) -> None:
    for each in path.rglob("*"):
        if each.is_file() and each.stat().st_size >= len(OLD):
            each.unlink()


@pytest.mark.parametrize("revalidate", [True, False])
@pytest.mark.parametrize("evicted", [False, True])
async def test_a_cached_version_is_read_to_its_end(tmp_path: Path, revalidate: bool, evicted: bool) -> None:
    """A new version in the store and in the cache does not matter, unless the old version is evicted."""
    inner = MemoryTransport({"a.parquet": OLD})
    async with CachedTransport(inner, "memory://x", tmp_path, revalidate=revalidate) as transport:
        await transport.read("a.parquet")
        batches = read_shard_range(
            Stores(transport=transport), shard_of("a.parquet", ()), CatalogRange(0), read_ahead=1
        )
        got = list(await anext(batches))
        inner.put("a.parquet", NEW)
        async with CachedTransport(MemoryTransport({"a.parquet": NEW}), "memory://x", tmp_path) as other:
            await other.read("a.parquet")
        if evicted:
            evict(tmp_path)
            with pytest.raises(ReadFailed, match="mixed"):
                await drain(batches, got)
        else:
            await drain(batches, got)
            assert len(got) == COUNT
        assert [number_of(sample) for sample, _ in got] == list(range(len(got)))
