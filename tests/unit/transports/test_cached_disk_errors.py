"""`CachedTransport` with failing disks, and closed during a read."""

from __future__ import annotations

import asyncio
import os
import warnings
from contextlib import aclosing
from pathlib import Path

import pytest

from asyncloader.transports import MemoryTransport, TransportClosed
from asyncloader.transports.cache_layout import ROOT_NAME
from asyncloader.transports.testing.subject import CONTENT, drain
from tests.unit.transports.cached_subject import CHUNKS, OTHER, Asked, around, copied, files

# ------------------------------------------------------------------------------------------------- a bad disk


@pytest.mark.parametrize("size", [0, 100, 16384])
async def test_a_cut_file_is_read_again(tmp_path: Path, size: int) -> None:
    """A truncated file is deleted, and the object is read from the store, without a warning."""
    store = Asked({"a": CONTENT})
    async with around(store, tmp_path) as transport:
        await transport.read("a")
        os.truncate(files(tmp_path)[0], size)
        store.taken()
        assert await transport.read("a") == CONTENT
        assert store.taken() == ["info", "read_range", "info"]
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
