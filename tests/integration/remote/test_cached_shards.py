"""Shards of every format with `cache_dir`, in every way of reading: the second epoch downloads no data."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, RemoteIterableDataset
from asyncloader.transports.cache_layout import BLOCK_BYTES, ROOT_NAME
from tests.helpers.http_store import HttpStore, status
from tests.helpers.http_store import serving as serving_http
from tests.helpers.rank_group import RankGroup
from tests.helpers.running import run_async
from tests.service import definitions
from tests.service.serving import NodeProcess, serving
from tests.unit.formats.mds_writer import shard_entry, write_index, write_shard
from tests.unit.remote.shards import jsonl, number_of, parquet, tar

COUNT = 300
"""Samples in a shard of about 3 MiB: several blocks, and more ranges than blocks."""

FIELD = 10_000
OPTIONS: dict[str, Any] = {"batch_size": 16, "seed": 3, "num_workers": 2}
COLUMNS = {"n": "int", "text": "str"}


def mds(numbers: Sequence[int]) -> bytes:
    return write_shard(COLUMNS, [{"n": number, "text": "x" * FIELD} for number in numbers])


def wide(numbers: Sequence[int]) -> bytes:
    """A Parquet shard of several row groups, whose bytes cannot be compressed."""
    return parquet(numbers, group=64, size=FIELD // 2, compression="none", use_dictionary=False)


MAKERS: dict[str, Callable[[Sequence[int]], bytes]] = {
    "s.parquet": wide,
    "s.jsonl": lambda numbers: jsonl(numbers, size=FIELD),
    "s.mds": mds,
    "s.tar": lambda numbers: tar(numbers, size=FIELD),
}


def fill(store: HttpStore, name: str, first: int = 0) -> str:
    """Put a shard of a format into the store, with an index if the format has one; return the URL to open."""
    data = MAKERS[name](range(first, first + COUNT))
    store.put(name, data)
    if name != "s.mds":
        return f"{store.url}/{name}"
    store.put("index.json", write_index(shard_entry(COLUMNS, COUNT, len(data), name)))
    return f"{store.url}/index.json"


def downloaded(store: HttpStore) -> Counter[str]:
    """The bytes of shards requested since the last call, by path."""
    found: Counter[str] = Counter()
    for asked in store.asked:
        if asked.method == "GET" and asked.path.startswith("s."):
            start, end = (asked.range or "bytes=0-").removeprefix("bytes=").split("-")
            size = len(store.objects[asked.path].data)
            found[asked.path] += (min(size, int(end) + 1) if end else size) - int(start or 0)
    store.asked.clear()
    return found


async def numbers_of(batches: Any) -> list[int]:
    return [int(number) async for batch in batches for number in (batch[0] if isinstance(batch, list) else batch)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), ["listed_files"], "--open", "listed_files") as made:
        yield made


@pytest.mark.parametrize("way", ["no workers", "fork", "spawn", "forkserver", "service"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_second_epoch_is_in_the_cache(name: str, way: str, tmp_path: Path, node: NodeProcess) -> None:
    """The first epoch downloads each byte once, although workers request parts of a shard together."""
    options: dict[str, Any] = dict(OPTIONS)
    if way == "no workers":
        options["num_workers"] = 0
    elif way == "service":
        options["workers"] = node.tcp
    else:  # spawned processes take seconds to start
        options.update(multiprocessing_context=way, persistent_workers=way == "spawn")

    async def run() -> None:
        async with serving_http() as store:
            served = definitions.listed_files([fill(store, name)], str(tmp_path))
            async with AsyncDataLoader[Any](served, **options) as loader:
                for epoch in range(3):
                    assert sorted(await numbers_of(loader)) == [*range(COUNT)]
                    assert downloaded(store) == ({name: len(store.objects[name].data)} if epoch == 0 else {})
                stats = loader.stats()
                if way != "service":
                    assert stats["store/cache_hits"] > 0
                    assert stats["store/cache_bytes"] > COUNT * FIELD

    run_async(run())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.mark.parametrize("name", ["s.parquet", "s.jsonl"])
@pytest.mark.parametrize("apart", [False, True])
def test_two_ranks(name: str, apart: bool, two: RankGroup, tmp_path: Path) -> None:
    """Ranks on one host share their downloads; on two hosts each downloads its ranges, with the blocks at the edges."""

    async def run() -> None:
        async with serving_http() as store:
            url = fill(store, name)
            folder = f"{tmp_path}/{{rank}}" if apart else str(tmp_path)
            size = len(store.objects[name].data)
            for turn in range(2):
                ranks = await asyncio.to_thread(two, "shards", url, num_workers=1, cache_dir=folder)
                found = [int(n) for ((batches, _),) in ranks for batch in batches for n in batch]
                assert len(found) == len({*found}) > COUNT // 2
                loaded = downloaded(store)[name]
                assert loaded <= (2 * size if apart else size)
                assert (loaded > 0) is (turn == 0)

    run_async(run())


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_that_is_resumed(name: str, tmp_path: Path) -> None:
    """Resumed in the middle of a shard, a run continues from the cache, or reads the rest into it."""

    async def run() -> None:
        async with serving_http() as store:
            dataset = RemoteIterableDataset(fill(store, name), cache_dir=tmp_path)
            options: dict[str, Any] = {"batch_size": 16, "seed": 3, "decode": number_of}
            async with AsyncDataLoader[Any](dataset, **options) as loader:
                batches = aiter(loader)
                head = [int(n) for _ in range(7) for n in await anext(batches)]
                state = loader.state_dict()
            dataset = RemoteIterableDataset(fill(store, name), cache_dir=tmp_path)
            async with AsyncDataLoader[Any](dataset, **options) as loader:
                loader.load_state_dict(state)
                assert sorted(head + await numbers_of(loader)) == [*range(COUNT)]
                assert sorted(await numbers_of(loader)) == [*range(COUNT)]
                downloaded(store)
                assert sorted(await numbers_of(loader)) == [*range(COUNT)]
                assert downloaded(store) == {}

    run_async(run())


@pytest.mark.parametrize("name", ["s.parquet", "s.jsonl"])
def test_samples_and_reads_that_fail(name: str, tmp_path: Path) -> None:
    """A sample is skipped, and requests are refused at first: everything is cached nevertheless."""

    def unlucky(sample: Any) -> int:
        if number_of(sample) == 13:
            raise ValueError("unlucky")
        return number_of(sample)

    async def run() -> None:
        async with serving_http() as store:
            dataset = RemoteIterableDataset(fill(store, name), cache_dir=tmp_path)
            await dataset.plan(1, 0, 1, None)
            store.faults[name].extend([status(503), status(503)])
            async with AsyncDataLoader[Any](dataset, batch_size=16, decode=unlucky, on_error="skip") as loader:
                for epoch in range(2):
                    downloaded(store)
                    assert sorted(await numbers_of(loader)) == sorted({*range(COUNT)} - {13})
                    assert (downloaded(store) == {}) is (epoch == 1)

    run_async(run())


@pytest.mark.parametrize("name", MAKERS)
def test_files_of_the_cache_that_are_damaged(name: str, tmp_path: Path) -> None:
    """A truncated or changed block is read from the store again, and no other block is."""
    draw = random.Random(7)

    async def run() -> None:
        async with serving_http() as store:
            for turn in range(3):
                dataset = RemoteIterableDataset(fill(store, name), cache_dir=tmp_path)
                async with AsyncDataLoader[Any](dataset, **OPTIONS, decode=number_of) as loader:
                    assert sorted(await numbers_of(loader)) == [*range(COUNT)]
                    loaded = downloaded(store)[name]
                    assert loaded == len(store.objects[name].data) if not turn else loaded <= 2 << 20
                files = sorted((tmp_path / ROOT_NAME / "objects").rglob("*.*"))
                victims = [draw.choice([file for file in files if file.stat().st_size > BLOCK_BYTES // 4])]
                for file in victims:
                    data = bytearray(file.read_bytes())
                    data[draw.randrange(len(data) - 100)] ^= 1
                    file.write_bytes(data if turn else data[:1000])

    run_async(run())


def test_a_second_plan_downloads_nothing(tmp_path: Path) -> None:
    """Planning reads the index and the edges of MDS shards through the cache."""

    async def run() -> None:
        async with serving_http() as store:
            url = fill(store, "s.mds")
            assert json.loads(store.objects["index.json"].data)["shards"]
            for turn in range(2):
                dataset = RemoteIterableDataset(url, cache_dir=tmp_path)
                await dataset.plan(2, 0, 1, None)
                indexes = [asked for asked in store.asked if (asked.method, asked.path) == ("GET", "index.json")]
                assert len(indexes) == 1 - turn
                assert downloaded(store) == ({} if turn else {"s.mds": BLOCK_BYTES})

    run_async(run())
