from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asyncloader.transports import HuggingFaceTransport, Transport
from asyncloader.transports.testing import TransportConformance
from tests.helpers.hub import ROOT, Hub, serving_hub

pytestmark = pytest.mark.network


class TestHuggingFace(TransportConformance):
    hub: Hub

    @pytest_asyncio.fixture(autouse=True)
    async def server(self) -> AsyncIterator[None]:
        async with serving_hub() as hub:
            hub.commits[hub.main].clear()
            self.hub = hub
            yield
        del self.hub

    def make(self) -> Transport:
        return HuggingFaceTransport(ROOT, endpoint=self.hub.url)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        # Into the commit that is read, and into the CDN: the tests change objects, which no commit does.
        self.hub.commits[self.hub.main][path] = data
        self.hub.cdn.put(f"{self.hub.main}/{path}", data)

    async def test_info_stands_for_the_bytes(self) -> None:
        """A file's version is its commit, whatever the CDN says: another commit's is another version."""
        async with self.make() as transport:
            self.put(transport, "a", b"one")
            first = (await transport.info("a")).etag
        self.hub.put("a", b"two")
        async with self.make() as transport:
            assert (await transport.info("a")).etag not in (None, first)
            assert await transport.read("a") == b"two"
