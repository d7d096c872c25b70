"""The ways to read the objects of the store, for the loaders that are compared: blocking, and with asyncio.

A sample is a uint8 array of an object's bytes. Blocking clients are `http.client`'s, which costs less CPU time than
urllib3 and requests; one connection a thread, which stays open. asynchronous ones are aiohttp's.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from asyncloader.transports import HttpTransport

from .remote_content import LARGE

Bytes = npt.NDArray[np.uint8]

_THREAD = threading.local()  # of the module, so that datasets pickle


def as_array(data: bytes | bytearray) -> Bytes:
    """The sample of these bytes."""
    return np.frombuffer(data, np.uint8)


class BlockingObjects(Dataset[Bytes]):
    """Each sample is read by a blocking request, on the thread's own connection.

    Args:
        store: URL of the store with its latency.
        samples: how many.
    """

    def __init__(self, store: str, samples: int) -> None:
        self.store = store
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Bytes:
        connection = getattr(_THREAD, "connection", None)
        if connection is None:
            connection = _THREAD.connection = http.client.HTTPConnection(urlsplit(self.store).netloc)
        connection.request("GET", f"{urlsplit(self.store).path}/objects/{index}")
        with connection.getresponse() as answer:
            data = bytearray(LARGE)
            if answer.status != 200 or answer.readinto(data) != LARGE or answer.read(1):
                raise OSError(f"object {index}: status {answer.status}, or not {LARGE} bytes")
        return as_array(data)


async def open_session() -> Any:
    """An aiohttp session with a connection for each request in flight."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def get(session: Any, url: str) -> bytes:
    """The body of an answer."""
    async with session.get(url) as answer:
        data: bytes = await answer.read()
        if answer.status != 200 or len(data) != LARGE:
            raise OSError(f"{url}: status {answer.status}, {len(data)} bytes")
        return data


class AsyncioBatches(BlockingObjects):
    """Each batch is read by one run of an event loop of the worker's own, in `__getitems__`."""

    loop: Any = None
    session: Any = None

    def __getitems__(self, indices: Sequence[int]) -> list[Bytes]:
        if self.loop is None:
            import uvloop

            self.loop = uvloop.new_event_loop()
            self.session = self.loop.run_until_complete(open_session())
        found: list[Bytes] = self.loop.run_until_complete(self._read(indices))
        return found

    async def _read(self, indices: Sequence[int]) -> list[Bytes]:
        urls = [f"{self.store}/objects/{index}" for index in indices]
        return [as_array(data) for data in await asyncio.gather(*(get(self.session, url) for url in urls))]


class FetchAlone:
    """A coroutine function from an index to a sample, for pipelines that run a loop of their own.

    Args:
        store: URL of the store with its latency.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.session: asyncio.Future[Any] | None = None

    async def __call__(self, index: int) -> Bytes:
        if self.session is None:
            self.session = asyncio.ensure_future(open_session())
        return as_array(await get(await self.session, f"{self.store}/objects/{index}"))


class AsyncObjects(Dataset[Any]):
    """Ours: the dataset's method is a coroutine, and the transport is the library's.

    Args:
        store: URL of the store with its latency.
        samples: how many.
    """

    def __init__(self, store: str, samples: int) -> None:
        self.transport = HttpTransport(store)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    async def __getitem__(self, index: int) -> Bytes:
        return as_array(await self.transport.read(f"objects/{index}"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.transport.aclose()


async def read_bare(store: str, samples: int, in_flight: int, took: Callable[[int, bytes], bool]) -> None:
    """Read objects 0, 1, ... on one event loop, `in_flight` at a time, until none is left or `took` returns True."""
    indices = iter(range(samples))
    over = False

    async def read(session: Any) -> None:
        nonlocal over
        for index in indices:
            data = await get(session, f"{store}/objects/{index}")
            if over:
                return
            over = took(index, data)

    async with await open_session() as session, asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(read(session))
