"""Hostile shards: an error with URL and offset, or skipped samples; nothing is written, memory stays bounded."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import pytest_asyncio

from asyncloader.formats import Located, ShardError, ShardFormat
from asyncloader.remote.catalog import Shard, format_of
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import MemoryTransport
from tests.helpers.http_store import serving
from tests.unit.remote.shards import drain, number_of, read_all, tar, zstd_compress

pytestmark = pytest.mark.network

MB = 1 << 20

Serve: TypeAlias = Callable[[str, bytes], tuple[Stores, Shard]]


@pytest_asyncio.fixture(params=["memory", "http"])
async def serve(request: pytest.FixtureRequest) -> AsyncIterator[Serve]:
    """A function that puts a shard into a store, and returns the arguments to read it."""
    if request.param == "memory":
        async with MemoryTransport() as transport:

            def put(path: str, data: bytes) -> tuple[Stores, Shard]:
                transport.put(path, data)
                return Stores(transport=transport), Shard(path, known(path))

            yield put
        return
    stores = Stores()
    async with serving() as store:

        def put_http(path: str, data: bytes) -> tuple[Stores, Shard]:
            store.put(path, data)
            return stores, Shard(f"{store.url}/{path}", known(path))

        yield put_http
        await stores.aclose()


def known(path: str) -> ShardFormat:
    return ShardFormat("mds", None) if path.endswith(".mds") else format_of(path)


async def fails(stores: Stores, shard: Shard, **options: Any) -> tuple[list[Located], ShardError]:
    """The samples before the error, and the error."""
    got: list[Located] = []
    with pytest.raises(ShardError) as caught:
        await drain(read_shard_range(stores, shard, CatalogRange(0), **options), got)
    assert caught.value.url == shard.url
    assert shard.url in str(caught.value)
    return got, caught.value


async def test_tar_paths_are_only_names(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute paths, ``..`` and links are keys and nothing else. No file is created."""
    monkeypatch.chdir(tmp_path)
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in (f"{tmp_path}/absolute.txt", "../../up.txt", "./here.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        archive.addfile(link)
    found = await read_all(*serve("a.tar", file.getvalue()))
    assert [sample["txt"] for sample, _ in found] == [b"evil"] * 3
    assert found[1].sample["__key__"] == "../../up"
    assert not os.listdir(tmp_path)  # noqa: PTH208 - one name would be too many


@cache
def bomb(ending: str) -> bytes:
    packed = (gzip.compress if ending == "gz" else zstd_compress)(b'{"n": 0}\n' + bytes(64 * MB))
    assert len(packed) < MB
    return packed


@pytest.mark.parametrize("ending", ["gz", "zst"])
async def test_a_bomb_in_one_line(serve: Serve, ending: str) -> None:
    """A few KB that hold a line of 64 MB are refused at the limit, without the memory for the line."""
    data = bomb(ending)
    stores, shard = serve(f"a.jsonl.{ending}", data)
    tracemalloc.start()
    try:
        got, error = await fails(stores, shard, max_sample_bytes=MB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [number_of(sample) for sample, _ in got] == [0]
    assert "max_sample_bytes=1,048,576" in str(error)
    assert error.offset == 9
    assert peak < 40 * MB


@pytest.mark.thorough
async def test_a_bomb_of_many_small_samples(serve: Serve) -> None:
    """Each sample is allowed, so all are delivered, some at a time: memory does not grow with the content."""
    inside = tar(range(2000), size=20_000)
    stores, shard = serve("a.tar.gz", gzip.compress(inside, 9))
    count = 0
    tracemalloc.start()
    try:
        async for batch in read_shard_range(stores, shard, CatalogRange(0), max_sample_bytes=MB):
            count += len(batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 2000
    assert peak < len(inside) / 2
