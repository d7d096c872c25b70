from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asyncloader.transports import Transport
from asyncloader.transports.http import HttpTransport
from tests.conformance.transport import TransportConformance
from tests.integration.http_store import LISTING, HttpStore, serving

pytestmark = pytest.mark.network


class TestHttp(TransportConformance):
    @pytest_asyncio.fixture(autouse=True)
    async def server(self) -> AsyncIterator[None]:
        async with serving() as store:
            self.store = store
            yield

    store: HttpStore

    def make(self) -> Transport:
        return HttpTransport(self.store.url, listing=LISTING)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, HttpTransport)
        self.store.put(path, data)
