"""The loopback server behind the transports that are tested over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from asyncloader.transports import Transport
from asyncloader.transports.testing.subject import TransportSubject
from tests.helpers.http_store import HttpStore, serving


class HttpSubject(TransportSubject):
    """A subject whose objects are on a server of its own."""

    store: HttpStore

    @pytest_asyncio.fixture(autouse=True)
    async def server(self) -> AsyncIterator[None]:
        async with serving() as store:
            self.store = store
            yield
        del self.store  # pytest keeps the test's instance to the end, and the store keeps all requests

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        self.store.put(path, data)
