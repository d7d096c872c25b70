from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
import pytest_asyncio

from asyncloader.transports import ObjectStoreTransport, Transport
from asyncloader.transports.testing import TransportConformance, WritingConformance
from tests.helpers.object_stores import KEYS, Moto, moto_server, sockets, sockets_closed

pytestmark = pytest.mark.network

numbers = count()


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with moto_server() as server:
        yield server


class TestObjectStore(TransportConformance, WritingConformance):
    @pytest_asyncio.fixture(autouse=True)
    async def bucket(self, moto: Moto) -> AsyncIterator[None]:
        before = sockets()
        self.moto = moto
        self.name = f"bucket-{next(numbers)}"
        moto.make_bucket(self.name)
        yield
        moto.reset()
        await sockets_closed(before)

    moto: Moto
    name: str

    def make(self) -> Transport:
        return ObjectStoreTransport(f"s3://{self.name}/some/root/", endpoint=self.moto.url, config=KEYS)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, ObjectStoreTransport)
        self.moto.put(f"{self.name}/some/root/{path}", data)
