"""The input of one object for each sample, in a store that is 50 ms away: its clients, and the loaders over them.

Data path: files -> store -> [loader] -> batches.

Blocking clients are `http.client`'s, which costs less CPU time than urllib3 and requests; one connection a thread,
which stays open. Asynchronous ones are aiohttp's, and the transport of this library for its own loaders.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import torch
from torch.utils.data import Dataset, default_collate

from asyncloader.transports import HttpTransport

from .inputs_data import Batch, Endless, object_name, object_sample
from .inputs_plan import NODES, OBJECTS, SPDL_ASYNC, WORKERS

IN_FLIGHT = 256
"""Objects on their way: what our workers have by default, each of them, and what the peers are given."""
READY = 4
"""Batches that the peers hold ready."""

_THREAD = threading.local()  # of the module, so that datasets pickle


class BlockingObjects(Dataset[Batch]):
    """Each sample is read by a blocking request, on the thread's own connection.

    Args:
        store: URL of the store with its latency.
    """

    def __init__(self, store: str) -> None:
        self.store = store

    def __getitem__(self, index: int) -> Batch:
        address = urlsplit(self.store)
        connection = getattr(_THREAD, "connection", None)
        if connection is None:
            connection = _THREAD.connection = http.client.HTTPConnection(address.netloc)
        connection.request("GET", f"{address.path}/{object_name(index)}")
        with connection.getresponse() as answer:
            return object_sample(answer.read())


class AsyncObjects(Dataset[Any]):
    """Ours: the dataset's method is a coroutine, and the transport is the library's."""

    def __init__(self, store: str) -> None:
        self.transport = HttpTransport(store)

    async def __getitem__(self, index: int) -> Batch:
        return object_sample(await self.transport.read(object_name(index)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.transport.aclose()


async def open_session() -> Any:
    """An aiohttp session with a connection for each request in flight."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def get(session: Any, url: str) -> bytes:
    """The body of an answer."""
    async with session.get(url) as answer:
        data: bytes = await answer.read()
        return data


class FetchAlone:
    """A coroutine function from an index to a sample, for pipelines that run a loop of their own."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.session: asyncio.Future[Any] | None = None

    async def __call__(self, index: int) -> Batch:
        if self.session is None:
            self.session = asyncio.ensure_future(open_session())
        return object_sample(await get(await self.session, f"{self.store}/{object_name(index)}"))


def bare(store: str, numbers: list[int]) -> Iterator[int]:
    """Read objects on one event loop, none of which becomes a batch; gives their number when all are read."""
    left = iter(numbers * 16)  # so that the connections' making counts little

    async def read(session: Any) -> None:
        for index in left:
            await get(session, f"{store}/{object_name(index)}")

    async def run() -> None:
        async with await open_session() as session, asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(read(session))

    asyncio.run(run())
    yield 16 * len(numbers)


# -------------------------------------------------------------------------------------------------- peers' loaders


def _nodes(store: str, numbers: list[int]) -> Any:
    nodes = importlib.import_module("torchdata.nodes")
    source = nodes.IterableWrapper(Endless(numbers))
    fetched = nodes.ParallelMapper(source, BlockingObjects(store).__getitem__, num_workers=IN_FLIGHT, method="thread")
    batches = nodes.Mapper(nodes.Batcher(fetched, OBJECTS, drop_last=False), default_collate)
    return nodes.Loader(nodes.Prefetcher(batches, prefetch_factor=READY))


def _spdl(store: str, numbers: list[int]) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    builder = spdl.PipelineBuilder().add_source(Endless(numbers))
    builder = builder.pipe(FetchAlone(store), concurrency=IN_FLIGHT, output_order="input")
    builder = builder.aggregate(OBJECTS).pipe(_collate).add_sink(READY)
    pipeline = builder.build(num_threads=WORKERS)
    pipeline.start()
    return pipeline


def _collate(samples: list[Batch]) -> dict[str, torch.Tensor]:
    collated: dict[str, torch.Tensor] = default_collate(samples)
    return collated


PEERS: dict[str, Callable[[str, list[int]], Any]] = {NODES: _nodes, SPDL_ASYNC: _spdl}
"""Each reads an endless repetition of the epoch."""
