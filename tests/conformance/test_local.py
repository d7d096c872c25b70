from __future__ import annotations

from pathlib import Path

import pytest

from asyncloader.transports import LocalTransport, Transport
from asyncloader.transports.testing import TransportConformance, WritingConformance


class TestLocal(TransportConformance, WritingConformance):
    """Files of a disk."""

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
