"""Reading ranges of shards from any transport: all samples once, from any offset, and no task left."""

from __future__ import annotations

import asyncio
import gzip
import io
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncloader.formats import Located, OnBad, ShardError
from asyncloader.remote.catalog import Shard, format_of
from asyncloader.remote.prefetch import AnyRange, RangeReading
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_sizes import with_edges
from asyncloader.remote.shard_splitting import CatalogRange, SampleEdges, SegmentRange, cut
from asyncloader.remote.stores import Stores
from asyncloader.transports import MemoryTransport, ReadFailed
from tests.unit.remote.shards import MAKERS, drain, jsonl, number_of, parquet, read_all, shard_of, tar

COUNT = 40


class Small(MemoryTransport):
    """Gives streams in chunks of a few bytes, whatever size is asked for, and breaks them at a given offset."""

    breaks_at: int | None = None

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        left = None if self.breaks_at is None else self.breaks_at - start
        async with aclosing(super().stream(path, start=start, chunk_size=97)) as chunks:
            async for chunk in chunks:
                if left is not None and left <= 0:
                    raise ReadFailed("the network is gone", path=path)
                yield chunk
                left = None if left is None else left - len(chunk)


@pytest.mark.thorough
@pytest.mark.parametrize("url", MAKERS)
async def test_every_format_is_read_whole_and_from_everywhere(url: str) -> None:
    """After each sample there is an offset from which a range gives exactly the remaining samples."""
    async with Small({url: MAKERS[url](range(COUNT))}) as transport:
        stores, shard = Stores(transport=transport), shard_of(url, range(COUNT))
        found = await read_all(stores, shard)
        assert [number_of(sample) for sample, _ in found] == list(range(COUNT))
        assert {sample["__url__"] for sample, _ in found} == {url}
        for number in (0, 1, COUNT // 2, COUNT - 1):
            rest = await read_all(stores, shard, CatalogRange(0, found[number].resume))
            assert rest == found[number + 1 :]


async def test_chunks_that_arrive_while_others_are_parsed_count() -> None:
    """A shard of several chunks ends where its listing says, however quickly they come."""
    data = b'{"n": 1}\n' * 100_000
    async with MemoryTransport({"a.jsonl": data}) as transport:
        shard = shard_of("a.jsonl", range(1))._replace(size=len(data), stated=len(data))
        assert len(await read_all(Stores(transport=transport), shard)) == 100_000


@pytest.mark.thorough
async def test_a_bomb_of_many_small_samples() -> None:
    """Each sample is allowed, so all are delivered, some at a time: memory does not grow with the content."""
    inside = tar(range(2000), size=20_000)
    async with MemoryTransport({"a.tar.gz": gzip.compress(inside, 9)}) as transport:
        stores, shard, count = Stores(transport=transport), Shard("a.tar.gz", format_of("a.tar.gz")), 0
        tracemalloc.start()
        async for batch in read_shard_range(stores, shard, CatalogRange(0), max_sample_bytes=1 << 20):
            count += len(batch)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert count == 2000
    assert peak < len(inside) / 2


@pytest.mark.parametrize("url", ["a.jsonl", "a.mds", "a.parquet"])
@pytest.mark.parametrize("parts", [2, 5, 100])
async def test_ranges_have_each_sample_once(url: str, parts: int) -> None:
    """In formats that can be cut the samples are read once, in order; the store gives the size."""
    async with Small({url: MAKERS[url](range(COUNT))}) as transport:
        stores = Stores(transport=transport)
        shards = await with_edges([shard_of(url, range(COUNT))], stores, parts)
        shard_ranges = cut(shards, parts)
        assert len(shard_ranges) >= min(parts, 6 if url == "a.parquet" else COUNT)
        read = [
            number_of(found.sample)
            for shard_range in shard_ranges
            for found in await read_all(stores, shards[0], shard_range)
        ]
    assert read == list(range(COUNT))


@pytest.mark.parametrize("url", [url for url in MAKERS if url != "a.parquet"])
async def test_a_broken_transport_comes_after_the_samples_before_it(url: str) -> None:
    """All samples that were complete are given; then the transport's own error is raised."""
    async with Small({url: MAKERS[url](range(COUNT))}) as transport:
        transport.breaks_at = len(MAKERS[url](range(COUNT))) // 2
        got: list[Any] = []
        with pytest.raises(ReadFailed, match="the network is gone"):
            await drain(
                read_shard_range(Stores(transport=transport), shard_of(url, range(COUNT)), CatalogRange(0)), got
            )
    read = [number_of(found.sample) for found in got]
    assert read == list(range(len(read)))
    assert 0 < len(read) < COUNT or ".tar.gz" in url or ".zst" in url or url == "a.jsonl.gz"


@pytest.mark.parametrize("url", MAKERS)
async def test_a_truncated_shard_says_so(url: str) -> None:
    """A shard cut inside a sample gives the whole samples, then a ShardError with the URL."""
    data = MAKERS[url](range(COUNT))
    if url in {"a.tar", "a.jsonl", "a.tfrecord"}:
        async with MemoryTransport({url: data}) as whole:
            ends = [resume for _, resume in await read_all(Stores(transport=whole), shard_of(url, range(COUNT)))]
        cuts = [ends[0] - 3, ends[20] - 3]
    else:
        cuts = [len(data) // 10, len(data) // 2, len(data) - 30]
    for cut_at in cuts:
        async with Small({url: data[:cut_at]}) as transport:
            got: list[Any] = []
            with pytest.raises(ShardError) as caught:
                await drain(
                    read_shard_range(Stores(transport=transport), shard_of(url, range(COUNT)), CatalogRange(0)), got
                )
            assert caught.value.url == url
            read = [number_of(found.sample) for found in got]
            assert read == list(range(len(read)))


@pytest.mark.parametrize("url", ["a.tar", "a.jsonl", "a.mds", "a.parquet"])
async def test_a_shard_that_shrank_since_it_was_cut(url: str) -> None:
    """A range that begins after the shard's end is an error, not an empty range."""
    data = MAKERS[url](range(COUNT))
    async with Small({url: data[: len(data) // 4]}) as transport:
        with pytest.raises(ShardError, match=r"truncated|no Parquet"):
            await read_all(Stores(transport=transport), shard_of(url, range(COUNT)), CatalogRange(0, len(data) // 2))


@pytest.mark.parametrize("url", MAKERS)
async def test_leaving_early_leaves_nothing_behind(url: str) -> None:
    """Closed after one list, or cancelled while it waits, it leaves no task or thread; the transport can be closed."""
    async with Small({url: MAKERS[url](range(COUNT))}) as transport:
        stores, shard = Stores(transport=transport), shard_of(url, range(COUNT))
        batches = read_shard_range(stores, shard, CatalogRange(0), read_ahead=1)
        assert await anext(batches)
        await batches.aclose()
        assert len(asyncio.all_tasks()) == 1
        for steps in range(0, 60, 7):
            task = asyncio.create_task(read_all(stores, shard))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.result()
            assert len(asyncio.all_tasks()) == 1


async def test_bad_samples_are_told_of_in_the_loop() -> None:
    """`on_bad` is called in the event loop, also for a compressed shard, which is read in a thread."""
    lines = b'{"n": 0}\nnonsense\n{"n": 1}\n[]\n{"n": 2}\n'
    loop = asyncio.get_running_loop()
    for url, data in (("a.jsonl", lines), ("a.jsonl.gz", gzip.compress(lines))):
        async with MemoryTransport({url: data}) as transport:
            told: list[ShardError] = []

            def on_bad(error: ShardError, told: list[ShardError] = told) -> None:
                assert asyncio.get_running_loop() is loop
                told.append(error)

            found = await read_all(Stores(transport=transport), Shard(url, format_of(url)), on_bad=on_bad)
            assert [sample["n"] for sample, _ in found] == [0, 1, 2]
            assert [error.offset for error in told] == [9, 27]


async def everything_of(reading: RangeReading, *, at_once: bool) -> tuple[list[Any], int]:
    """Return what a reading gives, in order, and how often it was waited for."""
    found: list[Any] = []
    waits = 0
    async with aclosing(reading):
        while True:
            samples, resumes = reading.take(3, reading.bad[0].resume if reading.bad else None)
            found += zip(map(number_of, samples), resumes, strict=True)
            if samples or (at_once and not reading.bad and reading.more_at_once()):
                continue
            if reading.bad:
                found.append(str(reading.bad.popleft()))
                continue
            waits += 1
            try:
                await reading.more()
            except StopAsyncIteration:
                return found, waits
            except ShardError as error:
                return [*found, str(error)], waits


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("url", ["a.jsonl", "a.tar"])
async def test_samples_of_bytes_that_are_there_need_no_wait(url: str, indexed: bool) -> None:
    """They, the bad samples between them and the error at the end are as if each step had been waited for."""
    data = jsonl(range(COUNT), size=3000) if url == "a.jsonl" else tar(range(COUNT), size=3000)
    async with MemoryTransport({url: data}) as transport:
        edges = [0, *(found.resume for found in await read_all(Stores(transport=transport), shard_of(url, ())))]
    damaged = bytearray(data)
    if url == "a.jsonl":
        for number in (3, 4, 35):
            damaged[edges[number]] = ord("!")
    else:
        del damaged[edges[-1] - 1000 :]
    part = SegmentRange(0, most=COUNT, edges=SampleEdges(np.array(edges)) if indexed else None)
    async with MemoryTransport({url: bytes(damaged)}) as transport:

        def reading() -> RangeReading:
            def opened(shard: Shard, part: AnyRange, on_bad: OnBad) -> AsyncGenerator[Sequence[Located], None]:
                return read_shard_range(Stores(transport=transport), shard, part, on_bad=on_bad)

            return RangeReading(opened, shard_of(url, ()), part)

        expected, waits = await everything_of(reading(), at_once=False)
        found, fewer = await everything_of(reading(), at_once=True)
    assert found == expected
    assert len(found) == COUNT
    assert sum(isinstance(each, str) for each in found) == (3 if url == "a.jsonl" else 1)
    assert fewer == 2 < waits


async def test_bad_samples_at_the_end_are_told_of() -> None:
    """Bad samples are reported even if no good sample follows, as in a file with bad samples only."""
    table = pa.table({"text": pa.array([b"a"] * 1500 + [b"\xff"] * 3, pa.binary()).view(pa.string())})
    for first, good in ((0, 1500), (1500, 0)):
        file = io.BytesIO()
        pq.write_table(table.slice(first), file)
        async with MemoryTransport({"a.parquet": file.getvalue()}) as transport:
            told: list[ShardError] = []
            shard = Shard("a.parquet", format_of("a.parquet"))
            found = await read_all(Stores(transport=transport), shard, on_bad=told.append)
            assert len(found) == good
            assert [error.resume for error in told] == [good + 1, good + 2, good + 3]


async def test_a_sample_is_bounded() -> None:
    """`max_sample_bytes` holds for tar and Parquet."""
    for url, data in {"a.tar": tar([0], size=10_000), "a.parquet": parquet([1], size=10_000)}.items():
        async with MemoryTransport({url: data}) as transport:
            with pytest.raises(ShardError, match="max_sample_bytes=5,000"):
                await read_all(Stores(transport=transport), Shard(url, format_of(url)), max_sample_bytes=5000)


async def test_impossible_ranges() -> None:
    """A tar cannot be entered in the middle of a sample, and `read_ahead` cannot be 0 bytes."""
    async with MemoryTransport({"a.tar": tar(range(3))}) as transport:
        stores, shard = Stores(transport=transport), Shard("a.tar", format_of("a.tar"))
        with pytest.raises(ValueError, match="only from where a sample begins"):
            await read_all(stores, shard, CatalogRange(0, 1, None, True))
        with pytest.raises(ValueError, match="read_ahead"):
            await read_all(stores, shard, read_ahead=0)
