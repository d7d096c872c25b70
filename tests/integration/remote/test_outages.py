"""An error of a transport is no bad sample: no sample is left out for it, whatever `on_error` is."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from asyncloader import AsyncDataLoader, DataLoader, Dataset, RemoteIterableDataset, RemoteMapDataset
from asyncloader.formats.compressed import ZSTD_MODULES
from asyncloader.transports import (
    AccessDenied,
    InvalidPath,
    MemoryTransport,
    ObjectInfo,
    ObjectNotFound,
    ReadFailed,
    RetryPolicy,
    SizeUnknown,
)
from tests.helpers.http_store import HttpStore, broken, serving, status
from tests.unit.remote.shards import MAKERS, jsonl, mds_index, number_of

pytestmark = pytest.mark.network

SOON = RetryPolicy(budget_s=0.3, first_delay_s=0.001, cap_s=0.01)
EVENTUALLY = RetryPolicy(budget_s=30, first_delay_s=0.001, cap_s=0.01)
COUNT = 400


@pytest_asyncio.fixture
async def store() -> AsyncIterator[HttpStore]:
    async with serving() as store:
        yield store


def loader_of(store: HttpStore, urls: list[str], retry: RetryPolicy = SOON, **options: Any) -> AsyncDataLoader[Any]:
    dataset = RemoteIterableDataset([f"{store.url}/{url}" for url in urls], storage_options={"retry": retry})
    return AsyncDataLoader(dataset, batch_size=10, seed=1, decode=number_of, **options)


def minus_one(index: Any, error: Exception) -> int:
    return -1


def put(store: HttpStore, url: str) -> tuple[str, str]:
    """Serve a shard of `COUNT` samples; return the dataset's URL and the shard's."""
    data, shard = MAKERS[url](range(COUNT)), url
    if url == "a.mds":
        url, shard = "set/index.json", "set/shard.00000.mds"
        store.put(url, mds_index(data, counts=[COUNT]))
    store.put(shard, data, etag='W/"1"')
    return url, shard


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("on_error", ["skip", minus_one], ids=["skip", "function"])
@pytest.mark.parametrize("url", sorted(MAKERS))
async def test_a_reset_loses_nothing(store: HttpStore, url: str, on_error: Any, workers: int) -> None:
    """The connection breaks in the middle of a shard, and the server has only a weak ETag."""
    url, shard = put(store, url)
    store.faults[shard] += [broken(len(store.objects[shard].data) // 2)] * (1 if workers else 3)
    async with loader_of(store, [url], EVENTUALLY, on_error=on_error, num_workers=workers) as loader:
        got = [number async for batch in loader for number in batch.tolist()]
        assert sorted(got) == list(range(COUNT))
        assert not loader.skipped_samples


@pytest.mark.parametrize("on_error", ["raise", "skip", minus_one], ids=["raise", "skip", "function"])
async def test_an_outage_is_raised_and_reading_goes_on(store: HttpStore, on_error: Any) -> None:
    """An outage while shards are opened is longer than the budget: it is raised, and then all samples are delivered."""
    urls = [f"{n}.jsonl" for n in range(4)]
    for number, url in enumerate(urls):
        store.put(url, jsonl(range(100 * number, 100 * number + 100)))
    got: list[int] = []
    async with loader_of(store, urls, on_error=on_error) as loader:
        batches = aiter(loader)
        got += (await anext(batches)).tolist()
        for url in urls:
            store.faults[url].extend([status(503)] * 10_000)

        async def read_on() -> None:
            while True:
                got.extend((await anext(batches)).tolist())

        with pytest.raises(ReadFailed, match="503"):
            await read_on()
        store.faults.clear()
        async for batch in batches:
            got += batch.tolist()
        assert sorted(got) == list(range(400))
        assert not loader.skipped_samples


class Away(MemoryTransport):
    """Has a part that cannot be read while `away` is set. A read of it waits until `gone` is set, and raises."""

    def __init__(self, objects: Mapping[str, bytes], part: range) -> None:
        super().__init__(objects)
        self.part, self.away = part, True
        self.gone, self.failed = asyncio.Event(), asyncio.Event()

    async def look(self, position: int) -> None:
        if self.away and position in self.part:
            await self.gone.wait()
            self.failed.set()
            raise ReadFailed("the store is away")

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().stream(path, start=start, chunk_size=self.part.start)) as chunks:
            async for chunk in chunks:
                await self.look(start)
                yield chunk
                start += len(chunk)

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        wanted = list(ranges)
        await self.look(wanted[0][0])
        return await super().read_ranges(path, wanted)


async def extend(got: list[int], batches: AsyncIterator[Any]) -> None:
    async for batch in batches:
        got += batch.tolist()


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("url", ["a.jsonl", "a.tar", "a.parquet"])
async def test_what_failed_while_the_consumer_was_away(url: str, lasts: bool) -> None:
    """The consumer trains a step. An outage that is over when it returns is not raised; an outage that lasts is."""
    data, part = MAKERS[url](range(COUNT)), range(1024 if url == "a.jsonl" else 8192, 1 << 30)  # behind some samples
    if url == "a.parquet":
        footer = pq.read_metadata(io.BytesIO(data))
        rows = footer.row_group(1).column(0)
        part = range(rows.dictionary_page_offset or rows.data_page_offset, len(data) - footer.serialized_size - 8)
    transport = Away({url: data}, part)
    dataset = RemoteIterableDataset(url, transport=transport, read_ahead=1, shuffle_buffer=0)
    async with AsyncDataLoader[Any](dataset, batch_size=3, seed=1, decode=number_of) as loader:
        batches = aiter(loader)
        got = (await anext(batches)).tolist()
        transport.gone.set()
        await transport.failed.wait()
        transport.away = lasts
        if lasts:
            with pytest.raises(ReadFailed, match="the store is away"):
                await extend(got, batches)
            transport.away = False
        await extend(got, batches)
        assert sorted(got) == list(range(COUNT))


class Unready(MemoryTransport):
    """Nothing is said about its shards while it is away."""

    away = False  # the class's, because a plan is made with a copy of the transport

    async def info(self, path: str) -> ObjectInfo:
        if self.away:
            raise ReadFailed("the store is away")
        return await super().info(path)


@pytest.mark.parametrize("taken", [0, 1])
async def test_an_outage_at_the_plan_is_no_batch(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is saved after it says that nothing was delivered for it."""
    transport = Unready({"a.tar": MAKERS["a.tar"](range(10)), "b.tar": MAKERS["a.tar"](range(10, 20))})

    def loader() -> AsyncDataLoader[Any]:
        dataset = RemoteIterableDataset(["a.tar", "b.tar"], transport=transport)
        return AsyncDataLoader(dataset, 3, seed=1, decode=number_of)

    got: list[int] = []
    async with loader() as first:
        batches = aiter(first)
        monkeypatch.setattr(Unready, "away", True)
        for _ in range(2):
            with pytest.raises(ReadFailed, match="the store is away"):
                await anext(batches)
        monkeypatch.setattr(Unready, "away", False)
        for _ in range(taken):
            got += (await anext(batches)).tolist()
        state = first.state_dict()
    async with loader() as second:
        second.load_state_dict(state)
        await extend(got, aiter(second))
    assert sorted(got) == list(range(20))


class NoSize(MemoryTransport):
    """Raises `error` when it is asked for the size of shard 3."""

    error: Exception | None = None  # the class's, because a plan is made with a copy of the transport

    async def info(self, path: str) -> ObjectInfo:
        if path == "3.tar" and self.error is not None:
            raise self.error
        return await super().info(path)


async def test_a_plan_without_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage fails the plan: with fewer sizes it would be another plan, which no saved state fits. A shard that has
    no size leaves the sizes of the others.
    """
    names = [f"{number}.tar" for number in range(24)]

    async def planned() -> list[int]:
        dataset = RemoteIterableDataset(names, transport=NoSize(dict.fromkeys(names, MAKERS["a.tar"](range(3)))))
        return [len(assignment) for assignment in (await dataset.plan(2, 0, 1, None)).assignments]

    assert await planned() == [3] * 8
    monkeypatch.setattr(NoSize, "error", ReadFailed("the store is away"))
    with pytest.raises(ReadFailed, match="away"):
        await planned()
    for error in (SizeUnknown("no size"), ObjectNotFound("gone"), InvalidPath("no path")):
        monkeypatch.setattr(NoSize, "error", error)
        assert await planned() == [3, 1, *[3] * 6, 2]


def only_even(sample: Any) -> int:
    number = number_of(sample)
    if number % 2:
        raise ValueError(number)
    return number


async def test_a_batch_that_an_outage_interrupts_keeps_its_samples() -> None:
    """Bad samples have been replaced in the batch, by samples behind them, when the next of these cannot be read."""
    transport = Away({"a.jsonl": jsonl(range(COUNT))}, range(1024, 1 << 30))
    transport.gone.set()
    dataset = RemoteIterableDataset("a.jsonl", transport=transport, shuffle_buffer=0)
    got: list[int] = []
    async with AsyncDataLoader[Any](dataset, 3, seed=1, decode=only_even, on_error="skip") as loader:
        batches = aiter(loader)
        with pytest.raises(ReadFailed, match="the store is away"):
            await extend(got, batches)
        assert got
        transport.away = False
        await extend(got, batches)
    assert sorted(got) == list(range(0, COUNT, 2))


async def test_refused_credentials_and_missing_shards(store: HttpStore) -> None:
    """Refused credentials prove nothing about the shard, and are raised; a missing shard is skipped."""
    for number in range(2):
        store.put(f"{number}.jsonl", jsonl(range(10 * number, 10 * number + 10)))
    async with loader_of(store, ["0.jsonl", "gone.jsonl", "1.jsonl"], on_error="skip") as loader:
        got = [number async for batch in loader for number in batch.tolist()]
        assert sorted(got) == list(range(20))
        assert len(loader.skipped_samples) == 1
    store.faults["1.jsonl"].extend([status(403)] * 20)
    async with loader_of(store, ["0.jsonl", "1.jsonl"], on_error="skip") as loader:
        with pytest.raises(AccessDenied):
            async for _ in loader:
                pass


class Raising(Dataset[Any]):
    """Its samples 3 and 5 cannot be read, for different reasons."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ObjectNotFound("it is not there")
        if index == 5:
            raise self.error
        return index


@pytest.mark.parametrize("on_error", ["skip", "refill", minus_one], ids=["skip", "refill", "function"])
async def test_map_datasets(on_error: Any) -> None:
    """A missing object is its sample's fault, and so is any error of a user's own client; an outage is not."""
    with pytest.raises(ReadFailed, match="reset"):
        [batch async for batch in AsyncDataLoader(Raising(ReadFailed("reset")), 8, seed=1, on_error=on_error)]
    loader = AsyncDataLoader(Raising(ConnectionResetError("mine")), 8, seed=1, on_error=on_error)
    batches = [batch.tolist() async for batch in loader]
    assert len(batches[0]) == (6 if on_error == "skip" else 8)


class NeedsPackage:
    """A map dataset whose samples need a package that is not installed."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ModuleNotFoundError("No module named 'decoder'")


@pytest.mark.parametrize("way", ["map dataset", "stream", "fixed streams", "random access"])
def test_a_missing_package_is_no_bad_sample(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no sample could be read, and all would be left out."""
    for name in ZSTD_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    shard = tmp_path / "a.jsonl.zst"
    shard.write_bytes(b"\x28\xb5\x2f\xfd")
    dataset: Any
    if way == "map dataset":
        dataset = NeedsPackage()
    elif way == "random access":
        dataset = RemoteMapDataset([shard])
    else:
        dataset = RemoteIterableDataset([shard], streams=2 if way == "fixed streams" else None)
    with DataLoader(dataset, batch_size=2, seed=1, on_error="skip") as loader:
        with pytest.raises(ImportError, match=r"decoder|asyncloader\[shards\]"):
            list(loader)
        assert loader.skipped_samples == []
