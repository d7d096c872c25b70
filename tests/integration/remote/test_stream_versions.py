"""A shard is exchanged between two reads of a worker: the second read continues in the same bytes, or fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncloader.formats import Located
from asyncloader.remote.reading import Pins, read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import CachedTransport, LocalTransport, MemoryTransport, ReadFailed, Transport
from tests.helpers.http_store import serving
from tests.unit.remote.shards import MAKERS, drain, number_of, shard_of

pytestmark = pytest.mark.network

OLD, NEW = range(100, 160), range(240, 300)  # one MDS index fits both
NAMES: dict[str, Callable[[int], dict[str, Any]]] = {
    "http": lambda version: {"etag": f'"{version}"'},
    "http, weak ETag": lambda version: {"etag": f'W/"{version}"'},
    "http, date": lambda version: {"etag": "", "Last_Modified": f"Wed, 25 Nov 2026 06:00:0{version} GMT"},
    "http, no longer named": lambda version: {"etag": "" if version else '"0"'},
}
Opened = tuple[str, Stores, Callable[[bytes], object]]


@asynccontextmanager
async def opened(kind: str, name: str, data: bytes, folder: Path) -> AsyncGenerator[Opened]:
    """An object in a store: its URL, the stores that open it, and a function that replaces it."""
    if kind.startswith("http"):
        async with serving() as store:
            store.put(name, data, **NAMES[kind](0))
            stores = Stores()
            yield f"{store.url}/{name}", stores, lambda new: store.put(name, new, **NAMES[kind](1))
            await stores.aclose()
    elif kind == "local":
        (folder / name).write_bytes(data)

        def replace(new: bytes) -> None:
            (folder / "new").write_bytes(new)
            os.utime(folder / "new", ns=(0, (folder / name).stat().st_mtime_ns))
            (folder / "new").replace(folder / name)

        async with LocalTransport(folder) as files:
            yield name, Stores(transport=files), replace
    else:
        memory = MemoryTransport({name: data})
        if kind == "memory":
            yield name, Stores(transport=memory), lambda new: memory.put(name, new)
        else:
            async with CachedTransport(memory, "memory://x", folder / "cache") as cached:
                if kind == "cached":
                    await cached.read(name)
                yield name, Stores(transport=cached), lambda new: memory.put(name, new)


@pytest.mark.parametrize("kind", [*NAMES, "local", "memory", "cached", "evicted"])
@pytest.mark.parametrize("name", MAKERS)
async def test_reading_goes_on_in_the_same_version(tmp_path: Path, name: str, kind: str) -> None:
    """In every format, from every store. A cached version is read to its end, whatever the store has by then."""
    async with opened(kind, name, MAKERS[name](OLD), tmp_path) as (url, stores, replace):
        shard, pins = shard_of(url, OLD), Pins()

        async def read(shard_range: CatalogRange) -> list[Located]:
            got: list[Located] = []
            await drain(read_shard_range(stores, shard, shard_range, pins=pins), got)
            return got

        async with aclosing(read_shard_range(stores, shard, CatalogRange(0), pins=pins)) as batches:
            first = await anext(batches)  # left early, as after an error
        behind = CatalogRange(0, first[4].resume)
        assert [number_of(sample) for sample, _ in await read(behind)] == list(OLD[5:])
        if kind == "evicted":
            shutil.rmtree(tmp_path / "cache")
        replace(MAKERS[name](NEW))
        if kind == "cached":
            assert [number_of(sample) for sample, _ in await read(behind)] == list(OLD[5:])
        else:
            for _ in range(2):
                with pytest.raises(ReadFailed, match="changed while it was read"):
                    await read(behind)
        pins = Pins()
        assert [number_of(sample) for sample, _ in await read(CatalogRange(0))] == list(NEW)


async def test_what_has_become_shorter_has_changed() -> None:
    """A shorter shard is not a damaged sample, which might be skipped: the rest of the old shard is not read."""
    transport = MemoryTransport({"a.jsonl": MAKERS["a.jsonl"](OLD)})
    transport.info = Transport.info.__get__(transport)  # type: ignore[method-assign]  # has no versions
    shard, pins = shard_of("a.jsonl", OLD), Pins()
    got: list[Located] = []
    await drain(read_shard_range(Stores(transport=transport), shard, CatalogRange(0), pins=pins), got)
    transport.put("a.jsonl", b"")
    behind = CatalogRange(0, got[4].resume)
    with pytest.raises(ReadFailed, match="changed while it was read"):
        await drain(read_shard_range(Stores(transport=transport), shard, behind, pins=pins), got)
