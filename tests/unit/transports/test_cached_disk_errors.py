"""`CachedTransport` with failing disks, and closed during a read."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import warnings
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from asyncloader.transports import MemoryTransport, ReadFailed, TransportClosed
from asyncloader.transports.cache_layout import MARKER_NAME, ROOT_NAME
from asyncloader.transports.testing.subject import CONTENT, drain
from tests.unit.transports.cached_subject import CHUNKS, OTHER, Asked, around, copied, files

# ------------------------------------------------------------------------------------------------- a bad disk


async def test_a_file_cut_under_a_stream(tmp_path: Path) -> None:
    """The rest is read from the store, and cached again."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        await transport.read("a")
        store.taken()
        async with aclosing(transport.stream("a", chunk_size=1000)) as chunks:
            got = [await anext(chunks) for _ in range(3)]
            os.truncate(files(tmp_path)[0], 3500)
            got += await drain(chunks)
        assert b"".join(got) == CONTENT
        assert store.taken() == ["info", "read_range", "info"]
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["info"]


async def test_a_file_cut_under_a_stream_of_an_object_that_changed(tmp_path: Path) -> None:
    """The bytes of two versions are never mixed: an error is raised."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        await transport.read("a")
        async with aclosing(transport.stream("a", chunk_size=1000)) as chunks:
            await anext(chunks)
            os.truncate(files(tmp_path)[0], 1500)
            store.put("a", OTHER)
            with pytest.raises(ReadFailed, match=r"'a' changed while it was read.*never mixed"):
                await drain(chunks)


@pytest.mark.parametrize("size", [0, 100, 16384])
async def test_a_cut_file_is_read_again(tmp_path: Path, size: int) -> None:
    """A truncated file is deleted, and the object is read from the store, without a warning."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        await transport.read("a")
        os.truncate(files(tmp_path)[0], size)
        store.taken()
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["info", "read"]
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["info"]


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


async def test_a_foreign_directory(tmp_path: Path) -> None:
    """A directory with the cache's name but without its mark is not used: there is a warning, and reads succeed."""
    root = tmp_path / ROOT_NAME
    root.mkdir()
    (root / "mine").write_text("x")
    async with around(MemoryTransport({"a": CONTENT}), tmp_path) as transport:
        with pytest.warns(RuntimeWarning, match=MARKER_NAME):
            assert await transport.read("a") == CONTENT
        assert await drain(transport.stream("a", chunk_size=1000)) == CHUNKS
    assert [each.name for each in root.iterdir()] == ["mine"]


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


async def test_a_disk_that_fails_under_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a write fails in the middle, only the copy is lost."""
    data = os.urandom(4 << 20)
    async with around(MemoryTransport({"a": data, "b": data}), tmp_path) as transport:
        chunks = transport.stream("a", chunk_size=1 << 20)
        async with aclosing(chunks):
            got = [await anext(chunks)]
            write = os.writev

            def full(descriptor: int, parts: Any) -> int:
                if threading.current_thread().name.startswith("asyncloader-cache"):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(descriptor, parts)

            monkeypatch.setattr(os, "writev", full)
            with pytest.warns(RuntimeWarning, match="No space left"):
                got += await drain(chunks)
        assert b"".join(got) == data
        assert files(tmp_path) == []
        assert await transport.read("b") == data


# --------------------------------------------------------------------------------------------------- closing


async def test_closing_under_a_hit(tmp_path: Path) -> None:
    """A stream from the cache raises TransportClosed, and its file is closed."""
    async with around(MemoryTransport({"a": CONTENT}), tmp_path) as transport:
        await transport.read("a")
        async with aclosing(transport.stream("a", chunk_size=10)) as chunks:
            await anext(chunks)
            await transport.aclose()
            with pytest.raises(TransportClosed):
                await drain(chunks)


async def test_closing_under_a_fill(tmp_path: Path) -> None:
    """A stream that was being cached leaves nothing in the directory."""
    async with around(MemoryTransport({"a": CONTENT}), tmp_path) as transport:
        async with aclosing(transport.stream("a", chunk_size=10)) as chunks:
            await anext(chunks)
            await transport.aclose()
            with pytest.raises(TransportClosed):
                await drain(chunks)
        assert files(tmp_path) == []
