from __future__ import annotations

import asyncio
import os
import pickle
import warnings
from contextlib import aclosing
from pathlib import Path

import pytest

from asyncloader.transports import (
    CachedTransport,
    LocalTransport,
    MemoryTransport,
    ObjectNotFound,
    ObjectTooLarge,
    RangeOutOfBounds,
    ReadFailed,
    Transport,
)
from asyncloader.transports.cache_layout import ROOT_NAME
from asyncloader.transports.testing.subject import CONTENT, drain
from tests.unit.transports.cached_subject import CHUNKS, OTHER, Asked, around, copied, files

# ------------------------------------------------------------------------------------------------ requests to the store


async def test_requests_of_reads(tmp_path: Path) -> None:
    """A miss is one request, a hit asks for the version, and a read of a changed object does both."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["read"]
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["info"]
        store.put("a", OTHER)
        assert await transport.read("a") == OTHER
        assert store.taken() == ["info", "read_range", "info"]
        assert await transport.read("a") == OTHER
        assert store.taken() == ["info"]


async def test_requests_without_revalidation(tmp_path: Path) -> None:
    """The newest cached version is returned without any request, and so are its size and version."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path, revalidate=False) as transport:
        assert await transport.size("a") == len(CONTENT)
        assert store.taken() == ["info"]
        info = await store.info("a")
        await transport.read("a")
        store.taken()
        store.put("a", OTHER[:-1])
        assert await transport.read("a") == CONTENT
        assert await transport.read_range("a", 3, 5) == CONTENT[3:8]
        assert b"".join(await drain(transport.stream("a", start=7))) == CONTENT[7:]
        assert await transport.info("a") == info
        assert await transport.size("a") == len(CONTENT)
        assert store.taken() == []
    async with around(copied(store), tmp_path) as asking:
        assert await asking.read("a") == OTHER[:-1]
    async with around(MemoryTransport(), tmp_path, revalidate=False) as transport:
        assert await transport.read("a") == OTHER[:-1]
        with pytest.raises(ObjectNotFound):
            await transport.read("b")


async def test_objects_without_a_version_are_not_cached(tmp_path: Path) -> None:
    """A store without versions is used as without a cache; no directory is created."""

    class Plain(Asked):
        info = Transport.info
        read_with_info = Transport.read_with_info

    store = Plain({"a": CONTENT})
    async with around(store, tmp_path / "cache") as transport:
        for _ in range(2):
            assert await transport.read("a") == CONTENT
            assert await drain(transport.stream("a")) == [CONTENT]
            assert await transport.info("a") == (len(CONTENT), None)
        assert store.taken() == ["read", "stream 0", "size"] * 2
        assert transport.cache_counts.snapshot() == {
            "hits": 0,
            "misses": 0,
            "bytes_saved": 0,
            "evictions": 0,
            "damaged": 0,
        }
    assert not (tmp_path / "cache").exists()


async def test_an_object_belongs_to_its_url(tmp_path: Path) -> None:
    """The same path below another root is another object, even if the versions have equal names."""
    async with (
        CachedTransport(MemoryTransport({"a": CONTENT}), "memory://one", tmp_path, revalidate=False) as one,
        CachedTransport(MemoryTransport({"a": OTHER}), "memory://two", tmp_path, revalidate=False) as two,
    ):
        for _ in range(2):
            assert (await one.read("a"), await two.read("a")) == (CONTENT, OTHER)
        assert (one.cache_counts.hits, two.cache_counts.hits) == (1, 1)


async def test_limits_hold_for_hits(tmp_path: Path) -> None:
    """Reads that the store would refuse are refused for cached objects as well, which stay cached."""
    async with around(MemoryTransport({"a": CONTENT}), tmp_path, revalidate=False) as transport:
        await transport.read("a")
        with pytest.raises(ObjectTooLarge, match="'a' has 16,384 bytes"):
            await transport.read("a", max_bytes=100)
        with pytest.raises(RangeOutOfBounds):
            await transport.read_range("a", 16384, 1)
        with pytest.raises(RangeOutOfBounds):
            await drain(transport.stream("a", start=16385))
        assert await transport.read("a", max_bytes=16384) == CONTENT


async def test_a_copy_shares_the_directory(tmp_path: Path) -> None:
    """A worker's copy finds the objects that its parent cached, and has counts of its own."""
    async with around(MemoryTransport({"a": CONTENT}), tmp_path, 1 << 20, revalidate=False) as transport:
        await transport.read("a")
        async with pickle.loads(pickle.dumps(transport)) as copy:
            assert await copy.read("a") == CONTENT
            assert copy.cache_counts.snapshot() == {
                "hits": 1,
                "misses": 0,
                "bytes_saved": 16384,
                "evictions": 0,
                "damaged": 0,
            }
            assert (copy.cache_bytes, copy.revalidate, copy.url) == (1 << 20, False, "memory://")
        assert (transport.cache_counts.hits, transport.cache_counts.misses) == (0, 1)


async def test_from_url(tmp_path: Path) -> None:
    """A URL and the cache's options give the transport for the URL with a cache around it."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a").write_bytes(CONTENT)
    os.utime(root / "a", (1000, 1000))
    transport = CachedTransport.from_url(f"file://{root}", cache_dir=tmp_path / "c", cache_bytes=1 << 20, threads=3)
    async with transport:
        assert await transport.read("a") == await transport.read("a") == CONTENT
        assert (transport.cache_counts.hits, transport.threads, transport.cache_bytes) == (1, 3, 1 << 20)
        assert isinstance(transport.inner, LocalTransport)


@pytest.mark.parametrize(("name", "value"), [("cache_bytes", 0), ("cache_bytes", -1), ("threads", 0)])
def test_impossible_options(tmp_path: Path, name: str, value: int) -> None:
    """A cache without room or without threads is refused when it is constructed."""
    with pytest.raises(ValueError, match=f"{name} (must be|should be a number of bytes,) at least 1"):
        CachedTransport(MemoryTransport(), "memory://", tmp_path, **{name: value})  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- streams


async def test_a_stream_is_cached(tmp_path: Path) -> None:
    """A stream is downloaded once, and is a hit from then on, from any byte."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        assert await drain(transport.stream("a", chunk_size=1000)) == CHUNKS
        assert store.taken() == ["info", "read_range", "info"]
        assert await drain(transport.stream("a", chunk_size=1000)) == CHUNKS
        assert b"".join(await drain(transport.stream("a", start=16000, chunk_size=100))) == CONTENT[16000:]
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["info"] * 3
        assert transport.cache_counts.bytes_saved == 2 * len(CONTENT) + 384


async def test_a_large_stream_is_cached(tmp_path: Path) -> None:
    """Many megabytes in odd chunks are returned unchanged each time, by requests of 8 MiB."""
    data = os.urandom(19 << 20)
    store = Asked({"a": data})
    async with around(store, tmp_path) as transport:
        for size in [100_003, 3 << 20, 65_536]:
            assert b"".join(await drain(transport.stream("a", chunk_size=size))) == data
        assert transport.cache_counts.hits == 2 * 19
    assert store.asked.count("read_range") == 3


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_stream_left_early(tmp_path: Path, after: int) -> None:
    """No task and no unfinished file is left; what was read is cached, and the next stream goes on there."""
    data = os.urandom(19 << 20)
    store = Asked({"a": data})
    async with around(store, tmp_path) as transport:
        async with aclosing(transport.stream("a", chunk_size=1 << 20)) as chunks:
            for _ in range(after):
                await anext(chunks)
        assert {each.parent.name for each in files(tmp_path)}.isdisjoint({"fills"})
        assert b"".join(await drain(transport.stream("a"))) == data
        assert transport.cache_counts.hits >= (8 if after else 0)


@pytest.mark.thorough
async def test_a_cancelled_stream_leaves_nothing(tmp_path: Path) -> None:
    """A task that is cancelled anywhere in its stream leaves no incomplete file."""
    store = MemoryTransport({"a": bytes(9 << 20)})
    for turns in range(0, 60, 3):
        folder = tmp_path / str(turns)
        async with around(copied(store), folder) as transport:
            task = asyncio.create_task(drain(transport.stream("a", chunk_size=200_000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled = task.cancel()
            outcomes = await asyncio.gather(task, return_exceptions=True)
        # The transport is closed, so its threads have finished the work that the cancelled call had begun.
        assert not cancelled or isinstance(outcomes[0], asyncio.CancelledError)
        assert [file for file in files(folder) if file.parent.name == "fills"] == []
        async with around(copied(store), folder) as transport:
            assert b"".join(await drain(transport.stream("a"))) == store._objects["a"]


@pytest.mark.parametrize("data", [OTHER, OTHER[:-1], OTHER + b"x"], ids=["same size", "shorter", "longer"])
async def test_an_object_that_changes_before_its_bytes_are_read(tmp_path: Path, data: bytes) -> None:
    """A stream of which nothing was given yet is of the new version; nothing is cached under the old one."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        store.during["read_range"] = lambda: store.put("a", data)
        assert b"".join(await drain(transport.stream("a", chunk_size=1000))) == data
        assert files(tmp_path) == []
        for _ in range(2):
            assert await transport.read("a") == data


async def test_an_object_that_changes_under_a_stream(tmp_path: Path) -> None:
    """The bytes of two versions are never mixed: an error is raised."""
    old, new = os.urandom(20 << 20), os.urandom(20 << 20)
    store = Asked({"a": old})
    async with around(store, tmp_path) as transport, aclosing(transport.stream("a", chunk_size=1 << 20)) as chunks:
        got = [await anext(chunks)]
        store.put("a", new)

        async def rest() -> None:
            async for chunk in chunks:
                got.append(chunk)  # noqa: PERF401 - the error comes in the middle

        with pytest.raises(ReadFailed, match=r"'a' changed while it was read.*never mixed"):
            await rest()
        assert old.startswith(b"".join(got))


async def test_many_at_once(tmp_path: Path) -> None:
    """Readers and streams of one object that start at once all get it, and one file is written."""
    async with around(MemoryTransport({"a": CONTENT}), tmp_path) as transport:

        async def streamed() -> bytes:
            return b"".join(await drain(transport.stream("a", chunk_size=1000)))

        outcomes = await asyncio.gather(*(transport.read("a") if n % 2 else streamed() for n in range(60)))
        assert set(outcomes) == {CONTENT}
        assert len(files(tmp_path)) == 1


# -------------------------------------------------------------------------------------------------- a bad disk


def blocked(folder: Path) -> None:
    """Make a file in the place of the cache's directory, which stops the superuser too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("not a directory")


async def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """Caching ends with one warning that names the directory; all reads succeed, in this transport and others."""
    folder = tmp_path / "cache"
    blocked(folder)
    store = Asked({"a": CONTENT, "b": OTHER})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            async with around(copied(store), folder) as transport:
                assert await asyncio.gather(*(transport.read("a") for _ in range(20))) == [CONTENT] * 20
                assert await drain(transport.stream("a", chunk_size=1000)) == CHUNKS
                assert await transport.read_range("b", 0, 5) == OTHER[:5]
    assert [each.category for each in caught] == [RuntimeWarning]
    assert "caching in" in str(caught[0].message)
    assert str(folder) in str(caught[0].message)


async def test_hits_go_on_when_writing_fails(tmp_path: Path) -> None:
    """Cached objects are served even if no further object can be written."""
    store = Asked({"a": CONTENT, "b": OTHER})
    async with around(store, tmp_path) as transport:
        await transport.read("a")
        fills = tmp_path / ROOT_NAME / "fills"
        fills.rmdir()
        blocked(fills)
        with pytest.warns(RuntimeWarning, match="reads go on without it"):
            assert await transport.read("b") == OTHER
        store.taken()
        assert await transport.read("a") == CONTENT
        assert await transport.read("b") == OTHER
        assert store.taken() == ["info", "read"]
