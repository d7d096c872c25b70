from __future__ import annotations

from asyncloader.transports import MemoryTransport, Transport
from asyncloader.transports.testing import TransportConformance, WritingConformance


class TestMemory(TransportConformance, WritingConformance):
    def make(self) -> Transport:
        return MemoryTransport()

    def put(self, transport: Transport, path: str, data: bytes) -> None:
        assert isinstance(transport, MemoryTransport)
        transport._objects[path] = data
