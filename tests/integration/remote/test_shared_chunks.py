"""Compressed shards and row groups: decoded once per host, within a bound, and by another process if one is killed."""

from __future__ import annotations

import asyncio
import gzip
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from asyncloader import AsyncDataLoader, RemoteMapDataset
from asyncloader.errors import ShardError
from asyncloader.remote.random_access import host_files, opened_shards
from asyncloader.transports import ReadFailed
from asyncloader.transports.file_lock import open_regular, try_lock
from tests import script_server
from tests.helpers.http_store import HttpStore
from tests.helpers.http_store import serving as serving_http
from tests.helpers.running import ROOT, environment, run_async
from tests.helpers.shards_of_formats import SIZES, write
from tests.integration.remote.test_random_access import OPTIONS, numbers_of, put_all
from tests.unit.remote.shards import parquet, tar

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

TOTAL = sum(SIZES)


def data_asked(store: HttpStore) -> list[tuple[str, str | None]]:
    return [(each.path, each.range) for each in store.asked if each.method == "GET" and each.path != "index.json"]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("format", ["mds.zstd", "jsonl.zst", "parquet"])
def test_once_per_host(format: str, cached: bool, tmp_path: Path) -> None:
    """However many workers read samples of a chunk at the same time, and in whatever order: one of them decodes it."""
    shards = tmp_path / "shards"
    shards.mkdir()
    write(shards, format)

    async def run() -> None:
        async with serving_http() as store:
            urls = put_all(store, shards)
            options: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {}
            dataset = RemoteMapDataset(urls, **options)
            await dataset.prepare()
            store.asked.clear()
            store.latency_s = 0.02  # so that workers meet
            async with AsyncDataLoader[Any](dataset, **OPTIONS, num_workers=3) as loader:
                for _ in range(2):
                    assert sorted(numbers_of([batch async for batch in loader])) == [*range(TOTAL)]
            asked = data_asked(store)
            # A footer is read again by whoever decodes a row group: its last bytes, which are all of these files.
            groups = sum(-(-size // 7) for size in SIZES)
            most = len(SIZES) if format != "parquet" else 2 * groups
            if format == "parquet" and cached:
                most = len(SIZES)  # the transport's cache has the blocks
            assert 0 <= len(asked) <= most
            assert cached or asked

    run_async(run())


def test_the_bound(tmp_path: Path) -> None:
    """Decoded row groups take no more than `cache_bytes`; what does not fit is decoded again, and warned of."""
    for number in range(4):
        path = tmp_path / f"s{number}.parquet"
        path.write_bytes(parquet(range(number * 100, number * 100 + 100), group=50, size=100))
        os.utime(path, (1e9, 1e9))  # a file that was just written has no version
    cache, limit = tmp_path / "cache", 100_000
    dataset = RemoteMapDataset(f"{tmp_path}/", cache_dir=cache, cache_bytes=limit)

    async def run() -> None:
        async with dataset:
            for _ in range(2):
                for first in range(0, 400, 25):
                    found = await dataset.__getitems__([first, (first + 77) % 400])
                    assert [sample["n"] for sample in found] == [first, (first + 77) % 400]
                    kept = [path.stat().st_size for path in (cache / "asyncloader-cache-1").rglob("objects/*/*")]
                    assert kept
                    assert sum(kept) <= limit

    run_async(run())
    small = RemoteMapDataset(f"{tmp_path}/", cache_bytes=10)
    with pytest.warns(RuntimeWarning, match="Raise cache_bytes="):
        assert run_async(small.__getitems__([3]))[0]["n"] == 3


def test_decoded_once_for_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no decoded row group can be kept, and however many of its rows a call asks for."""
    (tmp_path / "s.parquet").write_bytes(parquet(range(200), group=100, size=100))
    decoded: list[int] = []

    async def count(*arguments: Any, **options: Any) -> bytes:
        decoded.append(arguments[3])
        return await decode_rows(*arguments, **options)

    decode_rows = opened_shards.decode_rows
    monkeypatch.setattr(opened_shards, "decode_rows", count)
    dataset = RemoteMapDataset(tmp_path / "s.parquet", cache_bytes=10)
    with pytest.warns(RuntimeWarning, match="Raise cache_bytes="):
        found = run_async(dataset.__getitems__(range(200)))
    assert [sample["n"] for sample in found] == [*range(200)]
    assert sorted(decoded) == [0, 100]


def stuck_once(begun: asyncio.Event) -> Any:
    """Answer with a body that never ends, until the client is gone."""

    async def fault(store: HttpStore, request: web.Request) -> web.StreamResponse:
        etag = store.objects["s0.jsonl.zst"].etag or ""
        answer = web.StreamResponse(headers={"Content-Length": "100000", "ETag": etag})
        await answer.prepare(request)
        await answer.write(b"\x28\xb5\x2f\xfd")
        begun.set()
        await store.ending.wait()
        return answer

    return fault


READER = """
import asyncio, sys, pickle
dataset = pickle.loads(bytes.fromhex(sys.argv[1]))
asyncio.run(dataset.__getitems__([3]))
"""


@pytest.mark.thorough
def test_a_decoder_that_is_killed(tmp_path: Path) -> None:
    """Its chunk is taken for none, its lock is free, and who waited for it decodes."""
    write(tmp_path, "jsonl.zst")

    async def run() -> None:
        async with serving_http() as store:
            dataset = RemoteMapDataset(put_all(store, tmp_path), cache_dir=tmp_path / "cache")
            await dataset.prepare()
            begun = asyncio.Event()
            # The indexing has read the shards: now no cache has their bytes.
            shutil.rmtree(tmp_path / "cache" / "asyncloader-cache-1")
            store.faults["s0.jsonl.zst"].extend([nothing, stuck_once(begun)])
            script = [sys.executable, "-c", READER, pickle.dumps(dataset).hex()]
            with script_server.start(script, env=environment(), cwd=ROOT) as process:
                await begun.wait()
                waiting = asyncio.ensure_future(dataset.__getitems__([3, 20]))
                done, _ = await asyncio.wait([waiting], timeout=0.3)
                assert not done
                process.kill()
                found = await waiting
            assert [sample["n"] for sample in found] == [3, 20]

    run_async(run())


async def nothing(store: HttpStore, request: web.Request) -> None:
    """Answer as usual."""


def test_who_waits_for_too_long_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped does not stop the others; and who is cancelled while it waits leaves no lock."""
    write(tmp_path, "parquet")
    dataset = RemoteMapDataset(f"{tmp_path}/", cache_dir=tmp_path / "cache")
    locks = tmp_path / "cache" / "asyncloader-locks"

    async def run() -> None:
        await dataset.prepare()
        locks.mkdir(parents=True, exist_ok=True)
        held = [open_regular(str(locks / f"{number:04}"), os.O_RDWR | os.O_CREAT) for number in range(1 << 10)]
        assert all(map(try_lock, held))
        try:
            waiting = asyncio.ensure_future(dataset.__getitems__([3]))
            await asyncio.wait([waiting], timeout=0.2)
            waiting.cancel()
            await asyncio.wait([waiting])
            monkeypatch.setattr(host_files, "_WAIT_S", 0.01)
            assert (await dataset[40])["n"] == 40
        finally:
            for lock in held:
                os.close(lock)
        monkeypatch.undo()
        assert (await dataset[3])["n"] == 3

    run_async(run())


def test_compressed_shards_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, or larger than is read: an error that says so, and the samples of other shards."""
    whole = gzip.compress(tar(range(20), size=5000))
    (tmp_path / "a.tar.gz").write_bytes(whole[:-40])
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(tar([50])))
    (tmp_path / "c.tar.gz").write_bytes(whole)
    dataset = RemoteMapDataset(f"{tmp_path}/")

    async def run() -> None:
        await dataset.prepare()
        with pytest.raises(ShardError, match=r"a\.tar\.gz.*truncated|truncated"):
            await dataset[0]
        assert (await dataset[-21])["n"] == b"50"
        monkeypatch.setattr(opened_shards, "MAX_UNPACKED", 20_000)
        with pytest.raises(ShardError, match="accessed at random"):
            await dataset[-1]
        monkeypatch.undo()
        assert (await dataset[-1])["n"] == b"19"

    run_async(run())


def test_rows_that_cannot_be_samples(tmp_path: Path) -> None:
    """Their neighbours can be read, in the same row group."""
    times = pa.array([0, 400_000_000_000_000_000, 2], pa.timestamp("us"))  # the second is in the year 14645
    table = pa.table({"n": [0, 1, 2], "at": times, "text": ["a", "b", "c" * 5000]})
    pq.write_table(table, tmp_path / "s.parquet")
    dataset = RemoteMapDataset(tmp_path / "s.parquet", max_sample_bytes=4000)

    async def run() -> None:
        assert (await dataset[0])["text"] == "a"
        for row, match in ((1, "no Python form"), (2, "max_sample_bytes")):
            with pytest.raises(ShardError, match=match):
                await dataset[row]
        columns = RemoteMapDataset(tmp_path / "s.parquet", columns=["n"])
        assert await columns[1] == {"n": 1, "__key__": "s.parquet:1", "__url__": str(tmp_path / "s.parquet")}

    run_async(run())


def test_a_chunk_that_changes(tmp_path: Path) -> None:
    """A compressed shard of another version than was counted raises, and is kept for nobody."""
    write(tmp_path, "jsonl.zst")

    async def run() -> None:
        async with serving_http() as store:
            dataset = RemoteMapDataset(put_all(store, tmp_path))
            await dataset.prepare()
            store.put("s1.jsonl.zst", store.objects["s0.jsonl.zst"].data)
            for _ in range(2):
                with pytest.raises(ReadFailed, match="changed"):
                    await dataset[SIZES[0] + 1]

    run_async(run())


def test_order_of_columns(tmp_path: Path) -> None:
    """Samples have the columns in the order that was asked for, whichever order another dataset has in the cache."""
    shard = tmp_path / "s.parquet"
    pq.write_table(pa.table({"n": [1], "text": ["a"]}), shard)
    os.utime(shard, (10**9, 10**9))  # old enough for a version

    async def run() -> None:
        for columns in (["n", "text"], ["text", "n"]):
            dataset = RemoteMapDataset(shard, columns=columns, cache_dir=tmp_path / "cache")
            assert [*await dataset[0]][:2] == columns

    run_async(run())
