"""Stores and disks that behave oddly without intent: nothing is lost, mixed, kept wrongly, or refused for ever."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from asyncloader import AsyncDataLoader, RemoteIterableDataset
from asyncloader.errors import is_about_sample
from asyncloader.formats import Located
from asyncloader.remote.reading import Pins, read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import (
    CachedTransport,
    HttpTransport,
    LocalTransport,
    MemoryTransport,
    ObjectNotFound,
    ReadFailed,
    cache_store,
)
from asyncloader.transports.cache_layout import BLOCK_BYTES
from asyncloader.transports.local import _differs
from tests.helpers.http_store import Fault, HttpStore, serving
from tests.unit.remote.shards import MAKERS, drain, jsonl, number_of, shard_of

pytestmark = pytest.mark.network

OLD, NEW = jsonl(range(9_000), size=400), jsonl(range(10_000, 19_000), size=400)  # several chunks


async def all_of(chunks: AsyncGenerator[bytes, None]) -> bytes:
    async with aclosing(chunks):
        return b"".join([chunk async for chunk in chunks])


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("how", ["copied over", "cut", "removed and read on"])
async def test_a_file_is_exchanged_under_its_reader(tmp_path: Path, how: str) -> None:
    """A reader of the old file continues only where it holds that file open and the file has not changed."""
    (tmp_path / "a.jsonl").write_bytes(OLD)
    (tmp_path / "b").write_bytes(NEW)
    async with LocalTransport(tmp_path) as transport:
        pins, got = Pins(), list[Located]()
        options: dict[str, Any] = {"read_ahead": 1, "pins": pins}
        batches = read_shard_range(Stores(transport=transport), shard_of("a.jsonl", ()), CatalogRange(0), **options)
        got += await anext(batches)
        if how == "copied over":
            shutil.copyfile(tmp_path / "b", tmp_path / "a.jsonl")
        elif how == "cut":
            os.truncate(tmp_path / "a.jsonl", OLD.index(b"\n", len(OLD) // 2) + 1)
        else:
            (tmp_path / "a.jsonl").unlink()
            await drain(batches, got)
            assert [number_of(sample) for sample, _ in got] == list(range(9_000))
            batches = read_shard_range(
                Stores(transport=transport), shard_of("a.jsonl", ()), CatalogRange(0, got[9].resume), **options
            )
        with pytest.raises(ReadFailed, match="changed while it was read"):
            await drain(batches, got)
        assert [number_of(sample) for sample, _ in got] == list(range(len(got)))


def test_what_identifies_a_file() -> None:
    """Some file systems number a reopened file differently; an exchanged file has another time or size."""
    first: dict[str, Any] = {"st_dev": 1, "st_ino": 2, "st_size": 3, "st_mtime_ns": 4, "st_ctime_ns": 5}
    for changes, differs in [
        ({}, False),
        ({"st_ino": 9, "st_dev": 9}, False),
        ({"st_ctime_ns": 9}, False),  # a further link, or other permissions
        ({"st_ino": 9, "st_ctime_ns": 9}, True),
        ({"st_size": 9}, True),
        ({"st_mtime_ns": 9}, True),
    ]:
        now: Any = SimpleNamespace(**first | changes)
        assert _differs(SimpleNamespace(**first), now) is differs  # type: ignore[arg-type]


async def test_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    """An unmounted disk proves nothing about its files: none is skipped. A file that is missing on the disk may be."""
    root = tmp_path / "disk"
    root.mkdir()
    async with LocalTransport(root) as transport:
        with pytest.raises(ObjectNotFound) as missing:
            await transport.read("a")
        assert is_about_sample(missing.value)
        root.rmdir()
        with pytest.raises(ObjectNotFound, match="is not a directory") as away:
            await transport.read("a")
        assert not is_about_sample(away.value)


class Reversed(LocalTransport):
    """Its files are stored backwards."""

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        yield (await self.read(path))[::-1][start:]


async def test_a_transport_that_inherits_from_ours(tmp_path: Path) -> None:
    """The subclass's own `stream` is used, and not our way of reading files."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(range(20))[::-1])
    dataset = RemoteIterableDataset("a.jsonl", transport=Reversed(tmp_path))
    async with AsyncDataLoader[Any](dataset, batch_size=20, seed=1, decode=number_of) as loader:
        assert sorted([number async for batch in loader for number in batch.tolist()]) == list(range(20))


# ---------------------------------------------------------------------------------------- transports of users


class OwnError(ReadFailed):
    """An error with a constructor of its own."""

    def __init__(self, text: str) -> None:
        OSError.__init__(self, text)


class Flaky(MemoryTransport):
    """Raises the given error for the third read of rows, or in the middle of a stream."""

    def __init__(self, error: Exception, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.error: Exception | None = error
        self.reads = 0

    def look(self) -> None:
        self.reads += 1
        if self.reads > 3 and self.error is not None:
            error, self.error = self.error, None
            raise error

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().stream(path, start=start, chunk_size=2048)) as chunks:
            async for chunk in chunks:
                self.look()
                yield chunk

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        self.look()
        return await super().read_ranges(path, ranges)


@pytest.mark.parametrize("error", [ConnectionResetError("by peer"), OwnError("gone")], ids=["system", "own"])
@pytest.mark.parametrize("url", ["a.parquet", "a.jsonl", "a.tar"])
async def test_an_error_of_a_client_is_no_bad_sample(url: str, error: Exception) -> None:
    """In every format the error is raised once, and then all samples are delivered."""
    transport = Flaky(error, {url: MAKERS[url](range(300))})
    dataset = RemoteIterableDataset(url, transport=transport, read_ahead=1, shuffle_buffer=0)
    async with AsyncDataLoader[Any](dataset, batch_size=3, seed=1, decode=number_of, on_error="skip") as loader:
        batches, got = aiter(loader), list[int]()
        for _ in range(2):
            try:
                async for batch in batches:
                    got += batch.tolist()
            except ReadFailed:
                assert transport.error is None
        assert sorted(got) == list(range(300))
        assert not loader.skipped_samples


# ---------------------------------------------------------------------------------------------------- servers


def rollout(store: HttpStore, method: str, data: bytes, etag: str) -> Fault:
    """A machine behind the address has another version already, and answers requests of this method."""

    async def fault(_: HttpStore, request: web.Request) -> web.Response | None:
        store.faults["a"].append(fault)
        if request.method != method:
            return None
        return web.Response(body=data, headers={"ETag": etag})

    return fault


async def test_the_cache_keeps_bytes_under_their_own_version(tmp_path: Path) -> None:
    """An answer that names another version than the request before it is an error, and is not kept."""
    async with serving() as store, CachedTransport(HttpTransport(store.url), store.url, tmp_path) as transport:
        store.put("a", OLD, etag='"1"')
        store.faults["a"].append(rollout(store, "GET", NEW[: len(OLD)], '"2"'))
        with pytest.raises(ReadFailed, match="changed while it was read"):
            await all_of(transport.stream("a"))
        store.faults.clear()
        assert await all_of(transport.stream("a")) == OLD
        assert await all_of(transport.stream("a")) == OLD
        assert transport.cache_counts.hits == -(-len(OLD) // BLOCK_BYTES)


async def test_a_copy_that_keeps_its_date(tmp_path: Path) -> None:
    """`cp -p` and reproducible builds keep it: the weak ETag shows the change, and so does the size."""
    date = "Wed, 01 Jan 2020 00:00:00 GMT"
    async with serving() as store, CachedTransport(HttpTransport(store.url), store.url, tmp_path) as transport:
        for etag, data in [('W/"1"', OLD), ('W/"2"', NEW), ("", OLD), ("", NEW + NEW)]:
            store.put("a", data, etag=etag, Last_Modified=date)
            for _ in range(2):
                assert await transport.read("a") == data


async def test_two_servers_with_times_of_their_own() -> None:
    """Equal ETags are equal, although each server states the date of its own copy."""
    async with serving() as store:
        url = f"{store.url}/a.parquet"
        data = MAKERS["a.parquet"](range(100))
        days = iter(range(10, 29))

        async def other(_: HttpStore, request: web.Request) -> None:
            store.faults["a.parquet"].append(other)
            store.put("a.parquet", data, etag='"1"', Last_Modified=f"Wed, {next(days)} Nov 2020 06:00:00 GMT")

        store.put("a.parquet", data)
        store.faults["a.parquet"].append(other)
        got: list[Located] = []
        stores = Stores()
        await drain(read_shard_range(stores, shard_of(url, ()), CatalogRange(0), read_ahead=1), got)
        assert [number_of(sample) for sample, _ in got] == list(range(100))
        await stores.aclose()


async def test_a_bad_sector_of_the_caches_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this block is affected: it is read from the store, and the others from the cache."""
    inner = MemoryTransport({"a": OLD, "b": NEW})
    async with CachedTransport(inner, "memory://x", tmp_path) as first:
        for path in ("a", "b"):
            await first.read(path)
    whole = cache_store.is_whole

    def failing(descriptor: int, footer: Any) -> bool:
        if os.pread(descriptor, 20, 0) == OLD[:20]:
            raise OSError(errno.EIO, "input/output error")
        return whole(descriptor, footer)

    monkeypatch.setattr(cache_store, "is_whole", failing)
    async with CachedTransport(MemoryTransport({"a": OLD, "b": NEW}), "memory://x", tmp_path) as transport:
        assert await transport.read("a") == OLD
        assert await transport.read("b") == NEW
        blocks = -(-len(OLD) // BLOCK_BYTES)
        assert (transport.cache_counts.hits, transport.cache_counts.damaged) == (2 * blocks - 1, 1)
