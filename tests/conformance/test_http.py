from __future__ import annotations

import pytest

from asyncloader.transports import HttpTransport, Transport
from asyncloader.transports.testing import TransportConformance
from tests.conformance.http_subject import HttpSubject
from tests.helpers.http_store import LISTING

pytestmark = pytest.mark.network


class TestHttp(HttpSubject, TransportConformance):
    def make(self) -> Transport:
        return HttpTransport(self.store.url, listing=LISTING)

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, HttpTransport)
        super().put(transport, path, data)
