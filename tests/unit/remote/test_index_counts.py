"""Where samples begin: streams that share shards read each byte once, and a wrong index does not change the order."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from asyncloader import DataLoader, RemoteIterableDataset
from asyncloader.formats import ShardFormat
from asyncloader.loaders.writing import write_shards
from asyncloader.remote.catalog import Shard
from asyncloader.remote.index_counts import SampleOffsets
from asyncloader.remote.stores import Stores
from asyncloader.transports import MemoryTransport

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SHARDS, EACH = 3, 400
INDEXED = ("tar", "tar.gz", "jsonl", "tfrecord")


class Metered(MemoryTransport):
    """Counts the bytes of its answers and the reads of whole objects."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        super().__init__(objects)
        self.nbytes = Counter[str]()
        self.reads = Counter[str]()

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        self.reads[path] += 1
        return await super().read(path, max_bytes=max_bytes)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        self.nbytes[path] += length
        return await super().read_range(path, start, length)

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        async for chunk in super().stream(path, start=start, chunk_size=chunk_size):
            self.nbytes[path] += len(chunk)
            yield chunk

    def size_of(self, path: str) -> int:
        return len(self._objects[path])

    def names(self, ending: str) -> list[str]:
        return sorted(name for name in self._objects if name.endswith(ending))  # shards are uploaded side by side


def sample(ending: str, number: int) -> dict[str, Any]:
    text = f"{number:05d}" + "x" * (300 + number % 7)
    if ending.startswith("tar"):
        return {"__key__": f"{number:05d}", "txt": text.encode()}
    return {"record": text.encode()} if ending == "tfrecord" else {"txt": text, "n": number}


def number_of(sample: dict[str, Any]) -> int:
    return int((sample["record"] if "record" in sample else sample["txt"])[:5])


async def written(ending: str) -> Metered:
    """A store with the shards of a writer, and their indexes."""
    store = Metered()
    samples = (sample(ending, number) for number in range(SHARDS * EACH))
    await write_shards(samples, f"s-{{shard:03d}}.{ending}", max_samples=EACH, transport=store)
    return store


def epoch(store: Metered, ending: str, **options: Any) -> list[list[int]]:
    url = "index.json" if ending == "mds" else f"s-*.{ending}"
    dataset = RemoteIterableDataset(url, transport=store, streams=6, **options)
    with DataLoader[Any](dataset, batch_size=24, seed=3, decode=number_of) as loader:
        len(loader)  # the samples are counted
        store.nbytes.clear()
        store.reads.clear()
        return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("ending", ["tar", "jsonl", "tfrecord", "mds"])
def test_no_byte_is_read_twice(ending: str) -> None:
    """Nor is an index: sixteen streams begin in each shard."""
    store = asyncio.run(written(ending))
    found = epoch(store, ending, shuffle_buffer=48)
    assert sorted(number for batch in found for number in batch) == [*range(SHARDS * EACH)]
    for name in store.names(f".{ending}"):
        # The table of an MDS shard is read once more, with the shard's first sample.
        assert store.nbytes[name] <= store.size_of(name) + (ending == "mds") * 4 * (EACH + 2)
    assert {store.reads[name] for name in store.names(".samples")} == {0 if ending == "mds" else 1}


@pytest.mark.parametrize("ending", INDEXED)
def test_the_order_does_not_depend_on_an_index(ending: str) -> None:
    """Without one, or with one that is damaged or of other samples, shards are read from their beginnings."""
    store = asyncio.run(written(ending))
    expected = epoch(store, ending)
    first, second, _ = store.names(".samples")
    good = store._objects[second]
    short = bytearray(good[:-8])  # one sample less
    short[32:40] = (EACH - 1).to_bytes(8, "little")
    for bad in (b"", good[:-1], good.replace(ending.encode(), b"tax" + ending[3:].encode()), bytes(short)):
        data = bad if not bad else bad[:-4] + zlib.crc32(bad[:-4]).to_bytes(4, "little")
        store.put(first, data)
        assert epoch(store, ending) == expected
    for name in store.names(".samples"):
        del store._objects[name]
    assert epoch(store, ending) == expected
    assert sum(store.nbytes.values()) > 2 * sum(map(store.size_of, store.names(f".{ending}")))


async def test_a_read_that_is_cancelled_is_begun_by_the_next() -> None:
    """And those that wait for one read get its result."""
    store = await written("tar")
    offsets = SampleOffsets(Stores(transport=store))
    shard = Shard("s-000.tar", ShardFormat("tar", None))
    store.reads.clear()
    first, *others = (asyncio.create_task(offsets.find(shard, EACH, True)) for _ in range(4))
    await asyncio.sleep(0)
    first.cancel()
    found = await asyncio.gather(*others)
    assert found[0] is not None
    assert all(each is found[0] for each in found)
    assert (store.reads.total(), len(found[0])) == (2, EACH + 1)


async def test_offsets_are_bounded() -> None:
    """Those of the shard that was asked for longest ago are read again."""
    store = await written("tar")
    offsets = SampleOffsets(Stores(transport=store), most=2 * 8 * (EACH + 1))
    shards = [Shard(name, ShardFormat("tar", None)) for name in store.names(".tar")]
    for at in (0, 1, 0, 2):
        assert await offsets.find(shards[at], EACH, True) is not None
    store.reads.clear()
    assert await offsets.find(shards[0], EACH, True) is not None
    assert not store.reads
    # A shard without an index is not asked for again.
    del store._objects["_s-001.tar.samples"]
    store.reads.clear()
    assert [await offsets.find(shards[1], EACH, True) for _ in range(2)] == [None, None]
    assert store.reads["_s-001.tar.samples"] == 1
