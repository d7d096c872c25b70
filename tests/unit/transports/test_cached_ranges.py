"""Ranges in the cache: requests, concurrent downloads, and blocks that are lost, old or incomplete."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports import CachedTransport, MemoryTransport, ReadFailed
from asyncloader.transports.cache_blocks import CachedBlocks
from asyncloader.transports.cache_layout import BLOCK_BYTES, block_length, split_range
from asyncloader.transports.testing.subject import CONTENT, drain
from tests.unit.transports.cached_subject import OTHER, Asked, around, files

KIB = 1024
SIZE = 5 * BLOCK_BYTES + 700 * KIB
LARGE = os.urandom(SIZE)
LATER = os.urandom(SIZE)


class Ranged(Asked):
    """A store that records the requested bytes, as whole KiB."""

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        self._note("read_range", f"{start / KIB:g}+{length / KIB:g}")
        return await MemoryTransport.read_range(self, path, start, length)

    def ranges(self) -> list[str]:
        return [each for each in self.taken() if each not in {"info", "size"}]


class Held(Ranged):
    """A store whose responses to range requests wait for `go_on`."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.waiting, self.go_on = asyncio.Event(), asyncio.Event()

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        data = await super().read_range(path, start, length)
        self.waiting.set()
        await self.go_on.wait()
        return data


def edges(*ranges: tuple[float, float]) -> list[tuple[int, int]]:
    """Ranges of KiB in bytes."""
    return [(int(start * KIB), int(length * KIB)) for start, length in ranges]


async def got(transport: CachedTransport, *ranges: tuple[float, float]) -> bool:
    """Whether ranges of KiB are read rightly."""
    wanted = edges(*ranges)
    expected = [LARGE[start : start + length] for start, length in wanted]
    return list(await transport.read_ranges("a", wanted)) == expected


@given(st.integers(0, 4 * BLOCK_BYTES), st.integers(0, 4 * BLOCK_BYTES))
def test_pieces_are_the_range(start: int, length: int) -> None:
    """The pieces follow each other, and each lies in one block."""
    at = start
    for piece in split_range(start, length):
        assert piece.start == at
        assert 0 < piece.length <= block_length(piece.block, start + length) - piece.offset
        at += piece.length
    assert at == start + length


# ------------------------------------------------------------------------------------------------ requests to the store


async def test_a_block_that_is_cached_while_it_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read from the cache, and not from the store a second time."""
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as first, around(store, tmp_path) as second:
        assert await got(first, (0, 1))
        store.taken()
        opened, looked = CachedBlocks.open, list[int]()

        def late(self: CachedBlocks, block: int) -> Any:
            if not looked:  # the other reader has not written it yet
                looked.append(block)
                return None
            return opened(self, block)

        monkeypatch.setattr(CachedBlocks, "open", late)
        assert await got(second, (0, 1))
        assert store.ranges() == []


async def test_a_range_is_downloaded_once(tmp_path: Path) -> None:
    """The rest of its blocks is downloaded with it; neighbouring blocks are one request, without cached blocks."""
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport:
        assert await got(transport, (5 * 1024 + 699, 1))
        assert store.taken() == ["info", "5120+700", "info"]
        assert await got(transport, (1025, 2000))
        assert store.ranges() == ["1024+2048"]
        assert await got(transport, (10, 4000), (5000, 800))
        assert store.ranges() == ["0+1024", "3072+2048"]
        assert await got(transport, (0, SIZE / KIB), (7, 1), (7, 0))
        assert store.taken() == ["info"]
        counts = transport.cache_counts
        assert (counts.hits, counts.misses) == (9, 6)
        assert counts.bytes_saved == SIZE + KIB + (2048 + 680) * KIB  # and the blocks that the third read found


@pytest.mark.parametrize("chunk_size", [1000, 300_000, 1 << 21])
async def test_streams_of_a_part(tmp_path: Path, chunk_size: int) -> None:
    """A stream from the middle, or to a stop, reads blocks; none behind the stop's block unless it is wanted."""
    store = Ranged({"a": LARGE})
    start, stop = 1500 * KIB, 2500 * KIB
    async with around(store, tmp_path) as transport:
        for turn in range(2):
            async with aclosing(transport.pinned("a").stream(start=start, stop=stop, chunk_size=chunk_size)) as chunks:
                data = b""
                while len(data) < stop - start:
                    chunk = await anext(chunks)
                    assert 0 < len(chunk) <= chunk_size
                    data += chunk
            assert data == LARGE[start : start + len(data)]
            assert store.ranges() == ["1024+2048"] * (1 - turn)
        assert (transport.cache_counts.hits, transport.cache_counts.misses) == (2, 2)
        for expected in (["0+1024"], []):
            async with aclosing(transport.pinned("a").stream(stop=10, chunk_size=chunk_size)) as chunks:
                assert LARGE.startswith(await anext(chunks))
            assert store.ranges() == expected
        for expected in (["3072+1024", "4096+1024", "5120+700"], []):
            given = await drain(transport.pinned("a").stream(start=start, stop=stop, chunk_size=chunk_size))
            assert b"".join(given) == LARGE[start:]
            assert store.ranges() == expected
        assert b"".join(await drain(transport.stream("a", start=SIZE))) == b""


async def test_without_revalidation_nothing_is_asked(tmp_path: Path) -> None:
    """Not even the object's size is asked for, whichever of its blocks is cached."""
    async with around(MemoryTransport({"a": LARGE}), tmp_path) as transport:
        info = await transport.info("a")
        assert await got(transport, (3000, 1))
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path, revalidate=False) as transport:
        assert await transport.info("a") == await transport.pinned("a").info() == info
        assert await got(transport, (3000, 1))
        assert store.taken() == []


# ----------------------------------------------------------------------------------------------------- versions


async def test_a_replaced_object_without_revalidation(tmp_path: Path) -> None:
    """Cached blocks of the old version are returned. The first read that misses a block is an error.

    The next read is of the new version.
    """
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path, revalidate=False) as transport:
        assert await got(transport, (3, 5))
        store.put("a", LATER)
        assert await got(transport, (3, 5))
        with pytest.raises(ReadFailed, match=r"was cached in .* never mixed. Read it again"):
            await transport.pinned("a").read_ranges(edges((3, 1000), (3000, 5)))
        assert await transport.pinned("a").read_ranges([(3, 5)]) == [LATER[3:8]]
        assert await transport.read_ranges("a", [(0, 5), (3 * BLOCK_BYTES, 5)]) == [
            LATER[:5],
            LATER[3 * BLOCK_BYTES :][:5],
        ]


async def test_a_pinned_version_goes_on_in_the_cache(tmp_path: Path) -> None:
    """The version's cached blocks are read; its other blocks are an error. An unpinned read gets the new version."""
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport:
        pinned = transport.pinned("a")
        assert await pinned.read_ranges([(5, 9)]) == [LARGE[5:14]]
        store.put("a", LATER)
        assert await pinned.read_ranges([(7, 9)]) == [LARGE[7:16]]
        with pytest.raises(ReadFailed, match="changed while it was read"):
            await pinned.read_ranges([(7, BLOCK_BYTES)])
        assert await transport.read_range("a", 7, 9) == LATER[7:16]


async def test_an_object_that_changes_during_a_read(tmp_path: Path) -> None:
    """The bytes are not cached under the old version, and a read that is not pinned gets one version."""
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport:
        assert await transport.read_range("a", 0, 1) == LARGE[:1]
        store.during["read_range"] = lambda: store.put("a", LATER)
        ranges = [(0, 9), (BLOCK_BYTES, 9)]
        assert await transport.read_ranges("a", ranges) == [LATER[:9], LATER[BLOCK_BYTES:][:9]]
        assert await transport.read_ranges("a", ranges) == [LATER[:9], LATER[BLOCK_BYTES:][:9]]


# ----------------------------------------------------------------------------------------------- many at a time


async def test_many_ask_and_one_downloads(tmp_path: Path) -> None:
    """Later readers, of this process and of others, wait and are served from the cache."""
    store = Held({"a": LARGE})
    later = [Held({"a": LARGE}) for _ in range(3)]
    async with around(store, tmp_path) as transport:
        first = asyncio.create_task(got(transport, (1500, 1)))
        await store.waiting.wait()
        others = [around(each, tmp_path) for each in later]
        waiting = [asyncio.create_task(got(each, (1100, 100))) for each in [transport, *others]]
        overlapping = asyncio.create_task(got(others[0], (1100, 1000)))
        await later[0].waiting.wait()  # a block that no other reader has claimed is not waited for
        later[0].go_on.set()
        store.go_on.set()
        assert await asyncio.gather(first, *waiting, overlapping) == [True] * 6
        assert store.ranges() == ["1024+1024"]
        assert [each.ranges() for each in later] == [["2048+1024"], [], []]
        assert [each.cache_counts.hits for each in (transport, *others)] == [1, 2, 1, 1]
        for each in others:
            await each.aclose()


@pytest.mark.parametrize("end", ["cancelled", "fails"])
async def test_a_download_that_ends_is_taken_over(tmp_path: Path, end: str) -> None:
    """A waiting reader takes it over; no incomplete file is left."""
    store = Held({"a": LARGE})
    other = Ranged({"a": LARGE})
    asking = asyncio.Event()
    other.during["info"] = asking.set
    async with around(store, tmp_path) as transport, around(other, tmp_path) as second:
        first = asyncio.create_task(got(transport, (1500, 1)))
        await store.waiting.wait()
        waiting = asyncio.create_task(got(second, (1500, 1)))
        await asking.wait()
        if end == "cancelled":
            first.cancel()
        else:
            store.put("a", LATER)
            store.go_on.set()
        await asyncio.wait([first])
        assert await waiting
        assert other.ranges() == ["1024+1024"]
        assert {file.parent.name for file in files(tmp_path)}.isdisjoint({"fills"})


async def test_who_downloads_and_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other readers wait for the download for a limited time; then they read from the store, without caching."""
    monkeypatch.setattr("asyncloader.transports.cached_object._WAIT_S", 0.0)
    store, other = Held({"a": LARGE}), Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport, around(other, tmp_path) as second:
        first = asyncio.create_task(got(transport, (1500, 1)))
        await store.waiting.wait()
        assert await got(second, (1500, 1))
        assert other.ranges() == ["1500+1"]
        store.go_on.set()
        assert await first


# ------------------------------------------------------------------------------------------------------ the disk


def tear(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [tear, flip, Path.unlink])
async def test_a_block_that_is_lost(tmp_path: Path, damage: Any) -> None:
    """A block that is truncated, damaged or evicted is read again, and no other block is."""
    async with around(MemoryTransport({"a": LARGE}), tmp_path) as transport:
        assert await got(transport, (0, 3000))
    (file, *_) = (each for each in files(tmp_path) if each.stat().st_size > BLOCK_BYTES)
    damage(file)
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport:
        assert await got(transport, (0, 3000))
        (asked,) = store.ranges()
        assert asked.endswith("+1024")
        assert transport.cache_counts.damaged == (damage is not Path.unlink)
        assert await got(transport, (0, 3000))
        assert store.ranges() == []


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one warning; then exactly the wanted bytes are read, and cached blocks are still served."""

    def full(descriptor: int, parts: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport:
        assert await got(transport, (0, 1))
        before = files(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            with pytest.warns(RuntimeWarning, match="No space left"):
                assert await got(transport, (1000, 1000))
        store.taken()
        assert files(tmp_path) == before
        assert await got(transport, (10, 1), (1500, 10), (4000, 5))
        assert store.ranges() == ["1500+10", "4000+5"]
        assert b"".join(await drain(transport.stream("a", start=100))) == LARGE[100:]


@pytest.mark.parametrize("limit", [100_000, BLOCK_BYTES, 2 * BLOCK_BYTES + 30_000])
async def test_a_bound_that_is_smaller_than_a_range(tmp_path: Path, limit: int) -> None:
    """The range is read nevertheless, without the rest of its blocks where they do not fit. The bound holds."""
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path, limit) as transport:
        for _ in range(2):
            assert await got(transport, (1000, 4000))
            assert await got(transport, (3000, 10), (0, 10))
            assert b"".join(await drain(transport.pinned("a").stream(start=77, stop=SIZE))) == LARGE[77:]
            assert sum(-(-file.stat().st_size // 4096) * 4096 for file in files(tmp_path)) <= limit
        if limit < BLOCK_BYTES:
            assert "3000+10" in store.ranges()


async def test_more_blocks_than_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long range claims a few blocks at a time."""
    monkeypatch.setattr("asyncloader.transports.cached_object._MOST_CLAIMED", 2)
    store = Ranged({"a": LARGE})
    async with around(store, tmp_path) as transport:
        assert await got(transport, (10, 5500))
        assert store.ranges() == ["0+2048", "2048+2048", "4096+1724"]


# ---------------------------------------------------------------------------------------------- stores of all kinds


async def test_answers_that_name_no_version(tmp_path: Path) -> None:
    """The store is asked for the version after the read; the bytes are cached if it is the same as before."""

    class Nameless(Ranged):
        def pinned(self, path: str) -> Any:
            reader = super().pinned(path)

            async def read(ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
                return await self.read_ranges(path, ranges)

            reader.read_ranges = read  # type: ignore[method-assign]
            reader.info = lambda: self.info(path)  # type: ignore[method-assign]
            return reader

    store = Nameless({"a": CONTENT, "b": CONTENT})
    async with around(store, tmp_path) as transport:
        for expected in (["info", "0+16", "info"], ["info"]):
            assert await transport.pinned("a").read_ranges([(1, 2)]) == [CONTENT[1:3]]
            assert store.taken() == expected
        store.during["read_range"] = lambda: store.put("b", OTHER)
        assert await transport.pinned("b").read_ranges([(1, 2)]) == [OTHER[1:3]]
        assert len(files(tmp_path)) == 1
