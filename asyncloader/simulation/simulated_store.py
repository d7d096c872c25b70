"""A store whose answers take simulated time. Its objects are zeros: only their sizes matter.

Data path: [simulated_store] -> remote.reading -> remote.prefetch -> remote.worker_stream, which are the loader's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from asyncloader.simulation.machine import PIECE, SharedLink, Traffic
from asyncloader.transports import ObjectTooLarge, RangeOutOfBounds, Transport

_ZEROS = bytes(PIECE)


class WorkerNetwork:
    """One worker's connections to the store.

    Args:
        requests: that may be in flight.
        rtt_s: from a request to the first byte of its answer.
        link: the network, which all workers share.
        traffic: counts.
        request: called for each request; returns when the worker has sent it.
        receive: called with the number of bytes that have arrived; returns when the worker has received them.
    """

    def __init__(
        self,
        requests: int,
        rtt_s: float,
        link: SharedLink,
        traffic: Traffic,
        request: Callable[[], Awaitable[None]],
        receive: Callable[[int], Awaitable[None]],
    ) -> None:
        self._slots = asyncio.Semaphore(requests)
        self._rtt_s = rtt_s
        self._link = link
        self._traffic = traffic
        self._request = request
        self._receive = receive

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[None, None]:
        """Context of an answer: entered when its first byte arrives, and left when it is not read any more."""
        async with self._slots:
            self._traffic.request()
            await self._request()
            await asyncio.sleep(self._rtt_s)
            yield

    async def arrive(self, nbytes: int) -> None:
        """Wait for a piece of an answer, of at most `PIECE` bytes."""
        await self._link.carry(nbytes)
        self._traffic.piece(nbytes)
        await self._receive(nbytes)

    async def fetch(self, nbytes: int) -> None:
        """Wait for a whole answer."""
        async with self.request():
            for at in range(0, nbytes, PIECE):
                await self.arrive(min(PIECE, nbytes - at))


class SimulatedTransport(Transport):
    """A store in which every path names an object of the same size.

    Args:
        network: of the worker that reads.
        nbytes: of each object.
    """

    def __init__(self, network: WorkerNetwork, nbytes: int) -> None:
        self._network = network
        self._nbytes = nbytes

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Refuse: a simulated store has no URL."""
        raise ValueError(f"{url!r} cannot be opened as a simulation, with or without {sorted(options)}")

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Return zeros, like `Transport.read`."""
        if max_bytes is not None and self._nbytes > max_bytes:
            raise ObjectTooLarge(f"{path!r} has {self._nbytes:,} bytes, more than {max_bytes:,}", path=path)
        return await self.read_range(path, 0, self._nbytes)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Return zeros, like `Transport.read_range`."""
        self._check(path, start + length)
        await self._network.fetch(length)
        return bytes(length)

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Return chunks of zeros as they arrive, like `Transport.stream`."""
        self._check(path, start)
        left = self._nbytes - start
        async with self._network.request():
            while left:
                size = min(left, chunk_size, PIECE)
                await self._network.arrive(size)
                left -= size
                yield _ZEROS[:size]

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:  # noqa: ARG002 - the contract's
        """Return no path, although every path is an object, like `Transport.list`."""
        nothing: tuple[str, ...] = ()
        for path in nothing:
            yield path

    async def size(self, path: str) -> int:  # noqa: ARG002 - all are of one size
        """Return an object's size, like `Transport.size`."""
        await self._network.fetch(0)
        return self._nbytes

    async def aclose(self) -> None:
        """Do nothing: nothing is open, like `Transport.aclose`."""

    def _check(self, path: str, end: int) -> None:
        if end > self._nbytes:
            raise RangeOutOfBounds(f"{path!r} has {self._nbytes:,} bytes", path=path, size=self._nbytes)
