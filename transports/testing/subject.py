"""Makes the transport under test: the base class of the conformance tests, and the data that they read.

Data path: none; see `asyncloader.transports.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from asyncloader.transports.base import Transport

CONTENT = bytes(range(256)) * 64
"""An object of 16 KiB. A slice that begins at the wrong byte differs, unless it is off by a multiple of 256."""

Call = Callable[[Transport, str], Awaitable[Any]]


async def drain(stream: AsyncIterator[Any]) -> list[Any]:
    """Return all that a stream gives."""
    return [each async for each in stream]


def check_bytes(found: bytes, expected: bytes) -> None:
    """Fail at the first byte that differs. pytest's own comparison of some KiB takes hours where `CI` is set: it then
    writes a full diff, whose time is cubic in the lines.
    """
    if found == expected:
        return
    at = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(found), len(expected)) if at is None else at
    pytest.fail(
        f"{len(found)} bytes instead of {len(expected)}. "
        f"At index {at}: {found[at : at + 16]!r} instead of {expected[at : at + 16]!r}"
    )


# Every way to read one object, which has 5 bytes or more.
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


@pytest.mark.asyncio  # where pytest-asyncio runs in its strict mode, which is the default
class TransportSubject(ABC):
    """Makes a transport, and fills its store."""

    @abstractmethod
    def make(self) -> Transport:
        """Make a transport over the store that `put` fills. The test closes it."""

    @abstractmethod
    def put(self, transport: Transport, path: str, data: bytes) -> None:
        """Store an object without using the methods under test; replace an object with the same path.

        Args:
            transport: made by `make`, and open.
            path: a canonical path.
            data: the object's bytes.
        """
