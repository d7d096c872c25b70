"""What memory has is read at once; a thread reads the rest, with the same result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

from asyncloader.transports import LocalTransport, RangeOutOfBounds
from asyncloader.transports.page_cache import MOST_BYTES, NotCached, open_cached, pread_cached

FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)


def answers(folder: Path) -> bool:
    """Whether the folder lies on a disk, and the system says what memory has of a file in it."""
    if not os.major(folder.stat().st_dev):
        return False
    (folder / "probe").write_bytes(b"1")
    try:
        descriptor = open_cached(str(folder / "probe"), FLAGS)
    except NotCached:
        return False
    try:
        return pread_cached(descriptor, 2, 0) == b"1"
    except NotCached:
        return False
    finally:
        os.close(descriptor)


def evict(path: Path) -> None:
    """Take the file's bytes out of the page cache, on file systems that have it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def no_thread(*_: object) -> None:
    raise AssertionError("a thread was asked")


def no_opening(*_: object) -> None:
    raise AssertionError("a file was opened in the loop's thread")


async def test_cached_files_take_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on, when the links of the root are known. A longer file takes a thread."""
    if not answers(tmp_path):
        pytest.skip("this system does not say what is cached")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "large").write_bytes(bytes(2 * MOST_BYTES))
    async with LocalTransport(tmp_path) as transport:
        # A link's first use may write its time of access.
        assert await transport.read("a") == await transport.read("link") == b"0123456789"
        with monkeypatch.context() as patch:
            patch.setattr(transport._pool, "run", no_thread)
            assert await transport.read("a") == await transport.read("link") == b"0123456789"
            assert await transport.read("empty") == b""
            assert await transport.read_ranges("a", [(8, 2), (0, 1)]) == [b"89", b"0"]
            assert await transport.size("large") == (await transport.info("large")).size == 2 * MOST_BYTES
            with pytest.raises(RangeOutOfBounds):
                await transport.read_range("a", 8, 3)
            with pytest.raises(AssertionError, match="a thread was asked"):
                await transport.read("large")
            with pytest.raises(AssertionError, match="a thread was asked"):
                await transport.read_ranges("large", [(0, MOST_BYTES), (MOST_BYTES, 1)])
        assert await transport.read("large") == bytes(2 * MOST_BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can drop a file from its page cache")
@pytest.mark.parametrize("known", [0, 4096, 40_000])
async def test_what_is_not_cached_comes_whole(known: int, tmp_path: Path) -> None:
    """Files that are cached in no part, or in the first part, are read by a thread; no descriptor stays open."""
    content = os.urandom(100_000)
    file = tmp_path / "a"
    async with LocalTransport(tmp_path) as transport:
        file.write_bytes(content)
        await transport.read("a")
        evict(file)
        before = open_descriptors()
        with file.open("rb", buffering=0) as opened:
            assert len(opened.read(known)) == known
        assert await transport.read("a") == content
        evict(file)
        assert await transport.read_range("a", 50_000, 49_999) == content[50_000:99_999]
        assert open_descriptors() == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and /dev/shm")
@pytest.mark.parametrize("elsewhere", ["/proc/version", "/dev/shm"])
async def test_only_a_disk_is_asked(elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without a disk, such as a network's, may wait in `open`: a thread reads all files beside it."""
    with contextlib.ExitStack() as stack:
        if elsewhere == "/dev/shm":
            elsewhere = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm")).name
        (tmp_path / "a").write_bytes(b"1")
        async with LocalTransport("/") as transport:
            here = str(tmp_path / "a")[1:]
            assert await transport.read(here) == b"1"
            await transport.read(elsewhere[1:])
            monkeypatch.setattr("asyncloader.transports.local.open_cached", no_opening)
            assert await transport.read(here) == b"1"


async def test_other_tasks_have_their_turn(tmp_path: Path) -> None:
    """A task that reads one cached file after the other does not keep the loop to itself."""
    (tmp_path / "a").write_bytes(b"1")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with LocalTransport(tmp_path) as transport:
        await transport.read("a")
        counting = asyncio.create_task(count())
        for _ in range(1000):
            await transport.read("a")
        counting.cancel()
    assert turns >= 30


def test_what_is_left_to_a_thread(tmp_path: Path) -> None:
    """Missing files and long reads; and a null byte, which C would take for the name's end."""
    file = tmp_path / "a"
    file.write_bytes(b"1")
    for path in (str(tmp_path / "missing"), f"{file}\0b"):
        with pytest.raises(NotCached):
            open_cached(path, FLAGS)
    with file.open("rb") as opened, pytest.raises(NotCached):
        pread_cached(opened.fileno(), MOST_BYTES + 1, 0)
