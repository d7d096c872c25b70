from __future__ import annotations

from pathlib import Path

import pytest

from asyncloader.transports import CachedTransport, HttpTransport, LocalTransport, MemoryTransport, Transport
from asyncloader.transports.testing import TransportConformance
from asyncloader.transports.testing.subject import CONTENT, drain
from tests.conformance.http_subject import HttpSubject
from tests.helpers.http_store import LISTING


class CachedConformance(TransportConformance):
    """The contract of a transport, in which everything is read once before it is read for the test."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.cache_dir = tmp_path / "cache"

    async def test_a_second_read_is_a_hit(self) -> None:
        """The tests of this class do use the cache: an object that was read whole is read from it."""
        async with self.make() as transport:
            assert isinstance(transport, CachedTransport)
            self.put(transport, "a", CONTENT)
            self.put(transport, "b", CONTENT)
            await transport.read("a")
            await drain(transport.stream("b", chunk_size=1000))
            assert transport.cache_counts.snapshot() == {
                "hits": 0,
                "misses": 2,
                "bytes_saved": 0,
                "evictions": 0,
                "damaged": 0,
            }
            assert await transport.read("a") == await transport.read("b") == CONTENT
            assert await transport.read_range("a", 5, 3) == CONTENT[5:8]
            assert await transport.read_ranges("a", [(5, 3), (0, 1)]) == [CONTENT[5:8], CONTENT[:1]]
            assert b"".join(await drain(transport.stream("a", start=5))) == CONTENT[5:]
            saved = 2 * len(CONTENT) + 3 + 4 + len(CONTENT) - 5
            assert transport.cache_counts.snapshot() == {
                "hits": 5,
                "misses": 2,
                "bytes_saved": saved,
                "evictions": 0,
                "damaged": 0,
            }


@pytest.mark.slow  # the same checks run over HTTP
class TestCachedMemory(CachedConformance):
    def make(self) -> Transport:
        return CachedTransport(MemoryTransport(), "memory://", self.cache_dir, threads=4)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, CachedTransport)
        assert isinstance(transport.inner, MemoryTransport)
        transport.inner._objects[path] = data


@pytest.mark.slow
class TestCachedSmall(TestCachedMemory):
    """A cache with room for a few objects only, so that fills evict others and are refused."""

    def make(self) -> Transport:
        return CachedTransport(MemoryTransport(), "memory://", self.cache_dir, 60_000, threads=4)


@pytest.mark.network
class TestCachedHttp(HttpSubject, CachedConformance):
    def make(self) -> Transport:
        return CachedTransport(HttpTransport(self.store.url, listing=LISTING), self.store.url, self.cache_dir, 1 << 30)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, CachedTransport)
        super().put(transport, path, data)


@pytest.mark.slow  # the same checks run over HTTP
class TestCachedLocal(TransportConformance):
    """Files so young that they have no version yet: nothing is cached, and the contract holds."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root, self.cache_dir = tmp_path / "data", tmp_path / "cache"
        self.root.mkdir()

    def make(self) -> Transport:
        return CachedTransport(LocalTransport(self.root, threads=4), f"file://{self.root}", self.cache_dir, threads=4)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, CachedTransport)
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
