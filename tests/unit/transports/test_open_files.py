"""Files of the cache that are kept open: they are the same bytes, and take no room when they are evicted."""

from __future__ import annotations

import copy
import os
import pickle
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncloader.transports import open_files
from asyncloader.transports.cache_layout import BLOCK_BYTES, hash_key
from asyncloader.transports.cached_object import CachedObject
from asyncloader.transports.open_files import OpenFile, OpenFiles
from tests.unit.transports.cache_subject import DATA, file_of, opened, put
from tests.unit.transports.cached_subject import Asked, around, files

LARGE = os.urandom(3 * BLOCK_BYTES + 777)
RANGES = [(5, 100), (BLOCK_BYTES - 10, 20), (2 * BLOCK_BYTES, 9), (3 * BLOCK_BYTES + 700, 77), (7, 0)]


def found_in(reader: CachedObject, kept: OpenFiles, ranges: list[tuple[int, int]]) -> list[bytes | None]:
    def use(source: bytes | OpenFile, at: int, end: int, start: int) -> bytes:
        assert (start, end - at) in ranges
        return source[at:end]

    return reader.use_local(ranges, use, kept)


def read(kept: OpenFiles, folder: Path, url: str) -> bytes | None:
    """The bytes of a file, which is opened if it is not open."""
    store = opened(folder)
    file = kept.find(url) or kept.open(url, partial(store.open, hash_key(url), "1"))
    return None if file is None else file[0 : len(DATA)]


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_ranges(tmp_path: Path) -> None:
    """Those in blocks that were read; across blocks, too. None is asked of the store."""
    store = Asked({"a": LARGE})
    kept = OpenFiles()
    async with around(store, tmp_path) as transport:
        reader = transport.pinned("a")
        assert isinstance(reader, CachedObject)
        assert found_in(reader, kept, RANGES[:1]) == [None]  # nobody knows the version yet
        await reader.read_ranges([(0, 1), (BLOCK_BYTES, 1), (3 * BLOCK_BYTES, 1)])
        await reader.info()
        store.taken()
        expected: list[bytes | None] = [LARGE[start : start + length] for start, length in RANGES]
        expected[2] = None
        for _ in range(2):
            assert found_in(reader, kept, RANGES) == expected
            assert len(kept) == 3
        beyond = [(len(LARGE) - 1, 2), (len(LARGE) + 5, 0), (1 << 40, 1)]
        assert found_in(reader, kept, beyond) == [None] * 3
        assert store.taken() == []


def test_an_evicted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read at most a second longer; neither is a file that was replaced, or cut."""
    monkeypatch.setattr(open_files, "_LOOKED_FOR_S", 0.0)
    kept = OpenFiles()
    for url in ("a", "b", "c", "d"):
        put(opened(tmp_path), url)
        assert read(kept, tmp_path, url) == DATA
    file_of(tmp_path, "a").unlink()
    assert kept.find("a") is None
    file_of(tmp_path, "b").unlink()
    put(opened(tmp_path), "b")
    assert kept.find("b") is None
    os.truncate(file_of(tmp_path, "c"), 100)
    assert kept.find("c") is None
    os.utime(file_of(tmp_path, "d"), (1e9, 1e9))
    assert kept.find("d") is not None
    assert file_of(tmp_path, "d").stat().st_mtime > 1.5e9  # so that others are evicted before it
    assert len(kept) == 1


def test_files_that_are_not_read_are_dropped(tmp_path: Path) -> None:
    """Then their room on the disk is free, if they were evicted."""
    kept = OpenFiles()
    put(opened(tmp_path), "a")
    assert read(kept, tmp_path, "a") == DATA
    assert kept.drop_unused(1000.0)
    before = descriptors()
    assert not kept.drop_unused(0.0)
    assert descriptors() == before - 1


def test_their_number_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the descriptors that the process may have; those that were used last stay."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    kept = OpenFiles()
    for number in range(30):
        put(opened(tmp_path), f"u{number}")
        assert read(kept, tmp_path, f"u{number}") == DATA
        assert read(kept, tmp_path, "u0") == DATA
        assert len(kept) <= 10
    assert kept.find("u0") is not None
    assert kept.find("u29") is not None


def test_copies(tmp_path: Path) -> None:
    """Threads share the files, other processes have none."""
    kept = OpenFiles()
    put(opened(tmp_path), "a")
    read(kept, tmp_path, "a")
    holder: dict[str, Any] = {"files": kept}
    assert copy.deepcopy(holder)["files"] is kept
    assert len(pickle.loads(pickle.dumps(kept))) == 0


@pytest.mark.parametrize("left", [0, 4096, BLOCK_BYTES - 5])
async def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path, left: int) -> None:
    """By another program: what is left of it is read, the rest comes from the store, and nobody is killed."""
    kept = OpenFiles()
    length = 100
    async with around(Asked({"a": LARGE}), tmp_path) as transport:
        reader = transport.pinned("a")
        assert isinstance(reader, CachedObject)
        await reader.read_ranges([(0, 1)])
        await reader.info()
        ranges = [(0, length), (BLOCK_BYTES - length, length), (0, BLOCK_BYTES)]
        assert None not in found_in(reader, kept, ranges)
        (path,) = [each for each in files(tmp_path) if each.stat().st_size > BLOCK_BYTES]
        os.truncate(path, left)
        expected = [LARGE[start : start + size] if start + size <= left else None for start, size in ranges]
        assert found_in(reader, kept, ranges) == expected
        assert list(await reader.read_ranges(ranges)) == [LARGE[start : start + size] for start, size in ranges]


async def test_many_blocks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a call reads have no more descriptors at a time than the files that are kept, and two."""
    monkeypatch.setattr(open_files, "MOST_FILES", 4)
    count = 10
    ranges = [(number * BLOCK_BYTES, 5) for number in range(count)]
    kept = OpenFiles()
    async with around(Asked({"a": bytes(count * BLOCK_BYTES)}), tmp_path) as transport:
        reader = transport.pinned("a")
        assert isinstance(reader, CachedObject)
        await reader.read_ranges(ranges)
        before = descriptors()
        found = reader.use_local(ranges, lambda *_: descriptors(), kept)
        assert all(each is not None and each <= before + 6 for each in found)
