from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncloader.transports import LocalTransport, Transport
from asyncloader.transports.page_cache import NotCached
from asyncloader.transports.testing import TransportConformance, WritingConformance


def find_nothing(path: str, flags: int) -> int:
    raise NotCached


class TestLocal(TransportConformance, WritingConformance):
    """Files that the page cache has, as they were just written."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make(self) -> Transport:
        return LocalTransport(self.root, threads=4)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, LocalTransport)
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


class TestLocalInThreads(TestLocal):
    """Files that the page cache does not have."""

    @pytest.fixture(autouse=True)
    def cold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("asyncloader.transports.local.open_cached", find_nothing)

    async def test_cancelled_reads_wait_for_threads(self) -> None:
        """The conformance test of cancelled calls would prove nothing of a transport that never waits."""
        async with self.make() as transport:
            self.put(transport, "a", b"1" * 256)
            tasks = [asyncio.create_task(transport.read("a")) for _ in range(50)]
            await asyncio.sleep(0)
            cancelled = [task for task in tasks if task.cancel()]
            await asyncio.gather(*tasks, return_exceptions=True)
            assert cancelled
