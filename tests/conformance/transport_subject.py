"""Base class of the conformance tests of transports: makes the transport under test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncloader.transports import Transport

CONTENT = bytes(range(256)) * 64  # 16 KiB in which each place tells where it is, up to 256

Call = Callable[[Transport, str], Awaitable[Any]]


async def drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in stream]


# Every way to ask for one object; it has 5 bytes or more.
CALLS: dict[str, Call] = {
    "read": lambda transport, path: transport.read(path),
    "read_range": lambda transport, path: transport.read_range(path, 0, 1),
    "read_ranges": lambda transport, path: transport.read_ranges(path, [(0, 1), (3, 2)]),
    "stream": lambda transport, path: drain(transport.stream(path)),
    "stream_from": lambda transport, path: drain(transport.stream(path, start=2)),
    "size": lambda transport, path: transport.size(path),
    "info": lambda transport, path: transport.info(path),
    "read_with_info": lambda transport, path: transport.read_with_info(path),
}
call_each = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


class TransportSubject(ABC):
    """One subclass for each transport; its own fixtures set up what the transport needs around it."""

    @abstractmethod
    def make(self) -> Transport:
        """Make a transport over the store that `put` fills. It is closed by the test."""

    @abstractmethod
    def put(self, transport: Transport, path: str, data: bytes) -> None:
        """Store an object without using the transport's own methods."""
