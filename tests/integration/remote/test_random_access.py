"""`RemoteMapDataset`: every format in every way of reading, and indexes that do not fit, or are hostile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncloader import AsyncDataLoader, DataLoader, RemoteIterableDataset, RemoteMapDataset
from asyncloader.errors import NoEffectWarning, ShardError
from asyncloader.remote.random_access.shard_reader import THREADS
from asyncloader.transports import ObjectNotFound
from tests.helpers.comparing import assert_same
from tests.helpers.http_store import HttpStore
from tests.helpers.http_store import serving as serving_http
from tests.helpers.running import run_async
from tests.helpers.shards_of_formats import SIZES, write
from tests.service.definitions import fields_of
from tests.service.test_pools import read
from tests.unit.remote.shards import jsonl, tar

pytestmark = [pytest.mark.independent, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


TOTAL = sum(SIZES)
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "shuffle": True, "decode": fields_of}


def write_tars(folder: Path) -> Path:
    folder.mkdir()
    write(folder, "tar")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # a file that was just written has no version
    return folder


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Tar shards that a test may change."""
    return write_tars(tmp_path / "tars")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Any]]:
    """The batches of two epochs, read without workers."""
    epochs = read("sync", OPTIONS, RemoteMapDataset(f"{folder}/"), 2)
    for epoch in epochs:
        assert sorted(numbers_of(epoch)) == [*range(TOTAL)]
    return epochs


def numbers_of(batches: Sequence[Any]) -> list[int]:
    return [int(number) for numbers, _ in batches for number in numbers]


async def samples_of(dataset: Any) -> list[Any]:
    return [sample async for sample in dataset]


def compared(samples: Sequence[Any]) -> list[Any]:
    """Samples as what compares by `==`, of whatever columns."""
    plain = [
        {name: value.tolist() for name, value in each.items() if isinstance(value, np.ndarray)} for each in samples
    ]
    return [each | arrays for each, arrays in zip(samples, plain, strict=True)]


def test_the_samples_are_those_of_the_stream(folder: Path) -> None:
    """Sample by sample, in any order, repeated, by negative numbers; and beyond the end there is none."""

    async def run() -> None:
        whole = compared(await samples_of(RemoteIterableDataset(f"{folder}/")))
        dataset = RemoteMapDataset(f"{folder}/")
        assert len(dataset) == len(whole) == TOTAL
        async with dataset:
            assert compared([await dataset[n] for n in range(TOTAL)]) == whole
            asked = [5, 46, 0, 5, -1, 20, 21, 19]
            assert compared(await dataset.__getitems__(asked)) == [whole[n] for n in asked]
        assert compared(await dataset.__getitems__(np.arange(TOTAL)[::-1])) == whole[::-1]  # type: ignore[arg-type]
        assert await dataset.__getitems__([]) == []
        for wrong in (TOTAL, -TOTAL - 1, 1 << 62):
            with pytest.raises(IndexError, match=f"sample {wrong} of 47 samples"):
                await dataset[wrong]

    run_async(run())


@pytest.mark.parametrize(
    ("kind", "way"), [("sync", "fork"), ("asyncio", "forkserver"), ("uvloop", None), ("sync", "threads")]
)
def test_by_workers(folder: Path, kind: str, way: str | None, expected: list[list[Any]]) -> None:
    """However many workers there are, and however they are started, the batches are those without workers."""
    options: dict[str, Any] = OPTIONS | {"num_workers": 0 if way is None else 2}
    options |= {"workers": way} if way == "threads" else {"multiprocessing_context": way}
    assert_same(read(kind, options, RemoteMapDataset(f"{folder}/"), 2), expected)


def test_a_worker_that_dies_after_a_state_was_taken(tars: Path) -> None:
    """The state has the digest of the shards. Its being known then keeps no worker from being replaced."""
    (expected,) = read("sync", OPTIONS, RemoteMapDataset(f"{tars}/"), 1)
    options: dict[str, Any] = {**OPTIONS, "num_workers": 1, "multiprocessing_context": "fork"}
    with DataLoader(RemoteMapDataset(f"{tars}/"), **options) as loader:
        batches: Any = iter(loader)
        got = [next(batches)]
        assert loader.state_dict()["step"] == 1
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        assert_same([*got, *batches], expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_cut_off(folder: Path, workers: int, tmp_path: Path) -> None:
    """Reading what is missing raises, and names the shard; all other shards are read, and the loss is recorded."""
    for path in folder.iterdir():
        data = path.read_bytes()
        damaged = path.name.startswith(("s1.", "shard.00001"))
        (tmp_path / path.name).write_bytes(data[: len(data) - len(data) // 4] if damaged else data)
    dataset = RemoteMapDataset(f"{tmp_path}/")
    options: dict[str, Any] = OPTIONS | {"num_workers": workers}
    with DataLoader[Any](dataset, **options) as loader, pytest.raises(ShardError, match=r"s1\.|shard\.00001"):
        list(loader)
    with DataLoader[Any](dataset, **options, on_error="skip") as loader:
        found = numbers_of(list(loader))
        assert loader.skipped_samples
    others = {*range(SIZES[0]), *range(sum(SIZES[:2]), TOTAL)}
    assert others <= {*found} < {*range(TOTAL)}
    assert len(found) == len({*found})


def test_shards_that_are_missing_empty_or_of_one_sample(tars: Path) -> None:
    """A missing shard counts as one bad sample, an empty one as none."""
    (tars / "s2.tar").unlink()
    (tars / "s1.tar").write_bytes(bytes(10240))
    (tars / "s3.tar").write_bytes(tar([7]))
    dataset = RemoteMapDataset([f"{tars}/s{number}.tar" for number in range(4)])
    assert len(dataset) == SIZES[0] + 2

    async def run() -> None:
        assert (await dataset[-1])["n"] == b"7"
        with pytest.raises(ObjectNotFound, match=r"s2\.tar"):
            await dataset[SIZES[0]]

    run_async(run())
    (tars / "s0.tar").write_bytes(bytes(10240))
    nothing = RemoteMapDataset([f"{tars}/s0.tar"])
    assert len(nothing) == 0
    assert list(DataLoader[Any](nothing, seed=3, shuffle=True)) == []


def test_lines_that_are_bad_or_blank(tmp_path: Path) -> None:
    """A line that is no JSON has a number and raises; a blank line has none. The last line needs no end."""
    shard = tmp_path / "s.jsonl"
    shard.write_bytes(b'\xef\xbb\xbf{"n":0}\n\n  \nnonsense\r\n\n{"n":1}\r\n[]\n\n{"n":2}')
    dataset = RemoteMapDataset(shard)
    assert len(dataset) == 5

    async def run() -> None:
        assert [(await dataset[n])["n"] for n in (0, 2, 4)] == [0, 1, 2]
        for bad, line, match in ((1, b"nonsense", "no JSON"), (3, b"[]", "JSON list")):
            with pytest.raises(ShardError, match=match) as raised:
                await dataset[bad]
            assert raised.value.offset == shard.read_bytes().index(line)

    run_async(run())


def test_samples_that_are_too_large(tmp_path: Path) -> None:
    """They raise; they are never read as a whole, and the samples before them are read."""
    (tmp_path / "s.jsonl").write_bytes(jsonl([0, 1]) + jsonl([2], size=4000) + jsonl([3]))
    (tmp_path / "s.tar").write_bytes(tar([4, 5], size=100_000))
    dataset = RemoteMapDataset([tmp_path / "s.jsonl", tmp_path / "s.tar"], max_sample_bytes=3000)
    assert len(dataset) == 2 + 1 + 1

    async def run() -> None:
        assert [sample["n"] for sample in await dataset.__getitems__([0, 1])] == [0, 1]
        for number in (2, 3):
            with pytest.raises(ShardError, match="max_sample_bytes"):
                await dataset[number]

    run_async(run())


def put_all(store: HttpStore, folder: Path) -> list[str]:
    """Put the files of a folder into a store. Returns the URLs to read."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, data in files.items():
        store.put(name, data)
    return [f"{store.url}/{name}" for name in (["index.json"] if "index.json" in files else sorted(files))]


def test_from_a_cache(folder: Path, tmp_path: Path, expected: list[list[Any]]) -> None:
    """The first epoch fills the cache, in which another dataset finds shards and indexes: it requests no bytes."""

    async def run() -> None:
        async with serving_http() as store:
            urls = put_all(store, folder)
            for epoch in range(2):
                dataset = RemoteMapDataset(urls, cache_dir=tmp_path)
                await dataset.prepare()
                async with AsyncDataLoader[Any](dataset, **OPTIONS, num_workers=epoch) as loader:
                    found = [batch async for batch in loader]
                    assert numbers_of(found) == numbers_of(expected[0])
                index = [asked for asked in store.asked if asked.path == "index.json"]
                asked = [each for each in store.asked if each not in index]
                assert epoch == 0 or {each.method for each in asked} <= {"HEAD"}
                store.asked.clear()

    run_async(run())


def test_an_index_that_is_forgotten(tmp_path: Path) -> None:
    """While a read from the cache waits for its thread, another read may need the memory of its index."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "s.tar").write_bytes(tar(range(4)))

    async def run() -> None:
        async with (
            serving_http() as store,
            RemoteMapDataset(put_all(store, folder), cache_dir=tmp_path / "cache") as dataset,
        ):
            await dataset.__getitems__([0])
            reader = dataset._stores.here().reader
            assert reader is not None
            gate = threading.Event()
            holding = [asyncio.ensure_future(reader._local_reads.run(gate.wait)) for _ in range(THREADS)]
            reading = asyncio.ensure_future(dataset.__getitems__([3, 1]))
            await asyncio.sleep(0)
            for opened in reader._open.values():
                reader._forget(opened)
            gate.set()
            assert [int(sample["n"]) for sample in await reading] == [3, 1]
            await asyncio.gather(*holding)

    run_async(run())


def test_files_of_a_read_that_fails(tmp_path: Path) -> None:
    """They are kept no longer than those of other reads: when they are evicted, their room is free."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "s.jsonl").write_bytes(jsonl([0]) + b"bad\n")

    async def run() -> None:
        async with (
            serving_http() as store,
            RemoteMapDataset(put_all(store, folder), cache_dir=tmp_path / "cache") as dataset,
        ):
            await dataset[0]
            with pytest.raises(ShardError, match="no JSON"):
                await dataset[1]
            assert len(dataset._open_files) == 1
            reader = dataset._stores.here().reader
            assert reader is not None
            assert reader._timer is not None

    run_async(run())


def test_neighbours_come_in_one_request(folder: Path) -> None:
    """Without a cache a batch takes one request of each shard; none, if its chunk was decoded."""

    async def run() -> None:
        async with serving_http() as store:
            dataset = RemoteMapDataset(put_all(store, folder))
            async with dataset:
                await dataset.__getitems__(range(TOTAL))
                store.asked.clear()
                await dataset.__getitems__([0, 1, 2, 30, 13, 14, 8, 20, 19, 40])
                assert sum(asked.method == "GET" for asked in store.asked) <= 4

    run_async(run())


def test_cancelled(tars: Path) -> None:
    """A read or an indexing that is cancelled at any await leaves a dataset that works."""

    async def run() -> None:
        async with serving_http() as store:
            urls = put_all(store, tars)
            store.latency_s = 0.001
            for turns in (1, 3, 10, 30, 60, 100):
                dataset = RemoteMapDataset(urls)
                for call in (dataset.prepare(), dataset.__getitems__([0, 40])):
                    task = asyncio.ensure_future(call)
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                assert [sample["n"] for sample in await dataset.__getitems__([0, 40])] == [b"0", b"40"]

    run_async(run())


def test_arguments(tars: Path) -> None:
    """What cannot be is refused, and what does nothing is warned of."""
    with pytest.raises(TypeError, match="a reader of one's own"):
        RemoteMapDataset(f"{tars}/", format=lambda url, part: None)  # type: ignore[arg-type]
    with pytest.warns(NoEffectWarning, match="cache_revalidate= does nothing without cache_dir="):
        RemoteMapDataset(f"{tars}/", cache_revalidate=False)
    with pytest.raises(ValueError, match="max_sample_bytes"):
        RemoteMapDataset(f"{tars}/", max_sample_bytes=0)
    with pytest.raises(TypeError, match="integer"):
        run_async(RemoteMapDataset(f"{tars}/").__getitems__(["a"]))  # type: ignore[list-item]
