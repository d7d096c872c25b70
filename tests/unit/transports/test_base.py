from __future__ import annotations

import asyncio
import gc
import weakref
from typing import ClassVar

import pytest

from asyncloader.transports import MemoryTransport, RangeOutOfBounds
from asyncloader.transports.base import gather_all

CONTENT = bytes(range(250))


class Gated(MemoryTransport):
    """Holds each request at a gate, and counts requests. `full` is set when `held` requests wait there."""

    range_gap: ClassVar[int] = 4
    range_size: ClassVar[int] = 20
    range_requests: ClassVar[int] = 3

    def __init__(self, held: int = 3) -> None:
        super().__init__({"a": CONTENT})
        self.held = held
        self.gate = asyncio.Event()
        self.full = asyncio.Event()
        self.requests: list[tuple[int, int]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        self.requests.append((start, length))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight == self.held:
            self.full.set()
        try:
            await self.gate.wait()
            return await super().read_range(path, start, length)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1


async def test_near_ranges_are_one_request() -> None:
    """The transport's own gap and size decide which ranges share a request."""
    transport = Gated()
    transport.gate.set()
    answers = await transport.read_ranges("a", [(30, 5), (0, 4), (8, 4), (39, 12)])
    assert answers == [CONTENT[30:35], CONTENT[0:4], CONTENT[8:12], CONTENT[39:51]]
    assert sorted(transport.requests) == [(0, 12), (30, 5), (39, 12)]


async def test_failed_request_cancels_the_others_and_is_raised_as_it_is() -> None:
    """The caller gets the error itself, not a group, and no request is left running."""

    class LastFails(Gated):
        range_requests: ClassVar[int] = 4

        async def read_range(self, path: str, start: int, length: int) -> bytes:
            if start < 300:
                return await super().read_range(path, start, length)
            await self.full.wait()
            return await MemoryTransport.read_range(self, path, start, length)

    transport = LastFails(held=3)
    with pytest.raises(RangeOutOfBounds, match="bytes 300 to 301"):
        await transport.read_ranges("a", [(0, 1), (50, 1), (100, 1), (300, 1)])
    assert (transport.in_flight, transport.cancelled) == (0, 3)


async def test_cancelled_read_ranges_cancels_its_requests() -> None:
    """No request outlives the call that made it."""
    transport = Gated()
    reading = asyncio.create_task(transport.read_ranges("a", [(0, 1), (50, 1), (100, 1)]))
    await transport.full.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (transport.in_flight, transport.cancelled) == (0, 3)


async def test_a_failure_keeps_no_results() -> None:
    """The error and the results of the other calls are freed with the error's last use, not by the collector."""

    class Result:
        pass

    class Failure(Exception):
        pass

    kept: list[weakref.ref[Result | Failure]] = []

    async def succeeds() -> Result:
        result = Result()
        kept.append(weakref.ref(result))
        return result

    async def fails() -> Result:
        error = Failure()
        kept.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.disable()
    try:
        with pytest.raises(Failure):
            await gather_all([succeeds(), fails()])
        await asyncio.sleep(0)  # the loop lets go of the tasks' last calls
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()
