"""Reads simulated shards: by the loader's own code, down to the parser, which returns units in the place of samples.

Data path: simulated_store -> remote.reading -> [simulated_shards] -> remote.worker_stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress

from asyncloader.formats import Located, OnBad, Sample, ShardRange
from asyncloader.remote.catalog import Shard
from asyncloader.remote.prefetch import AnyRange
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.simulation.contents import Contents
from asyncloader.simulation.parquet_layout import ParquetLayout
from asyncloader.simulation.simulated_store import SimulatedTransport, WorkerNetwork

MOST_AT_ONCE = 512
"""Units that a reader returns at a time: an index may claim any number of samples in a few bytes."""

_UNIT: Sample = {}


class UnitReader:
    """A `ShardReader` of units that are spread evenly over a range's bytes.

    Args:
        start: offset of the range.
        nbytes: of the range.
        units: in the range.
    """

    done = False
    """A range ends with its bytes."""

    def __init__(self, start: int, nbytes: int, units: int) -> None:
        self.feed_from = start
        self._nbytes = nbytes
        self._units = units
        self._fed = 0
        self._given = 0

    @property
    def pending(self) -> bool:
        """Whether units have arrived that were not returned."""
        return self._given < self._due

    @property
    def _due(self) -> int:
        return self._units * self._fed // self._nbytes if self._nbytes else 0

    def feed(self, chunk: bytes) -> list[Located]:
        """Return the units whose last byte has arrived, a number of them at a time."""
        self._fed += len(chunk)
        return self.end()

    def end(self) -> list[Located]:
        """Return units that have arrived."""
        stop = min(self._due, self._given + MOST_AT_ONCE)
        found = located(self.feed_from, self._nbytes, self._units, self._given, stop)
        self._given += len(found)
        return found


def located(start: int, length: int, units: int, first: int, stop: int) -> list[Located]:
    """Return the units from number `first` to before `stop` of those that are spread over positions from `start` on."""
    return [Located(_UNIT, start + length * (number + 1) // units) for number in range(first, stop)]


class SimulatedShards:
    """Opens ranges, like `RemoteIterableDataset`, for one worker.

    Args:
        contents: of the shards.
        grain: samples of a unit.
        network: of the worker.
        read_ahead: bytes of a range that are fetched ahead.
        range_requests: of a file that may be in flight, for Parquet.
    """

    def __init__(
        self, contents: Contents, grain: int, network: WorkerNetwork, read_ahead: int, range_requests: int
    ) -> None:
        self._contents = contents
        self._grain = grain
        self._network = network
        self._read_ahead = read_ahead
        self._range_requests = range_requests

    def open(self, shard: Shard, shard_range: AnyRange, on_bad: OnBad) -> AsyncGenerator[Sequence[Located], None]:
        """Read a range of a shard; `prefetch.Open`."""
        wanted = CatalogRange(shard_range.shard, shard_range.start, shard_range.stop)
        units, (start, stop) = self._contents.units(wanted, self._grain), self._contents.span(wanted)
        layout = self._contents.layout(wanted.shard)
        if layout is not None:
            return self._read_groups(layout, start, stop, units)

        def reader(_: str, part: ShardRange) -> UnitReader:
            return UnitReader(part.start, stop - start, units)

        # The loader does not fetch beyond the end of a range, and neither does an object that ends there.
        stores = Stores(transport=SimulatedTransport(self._network, stop))
        begin, simulated = shard_range._replace(start=start), shard._replace(stated=None)
        return read_shard_range(stores, simulated, begin, on_bad=on_bad, reader=reader, read_ahead=self._read_ahead)

    async def _read_groups(
        self, layout: ParquetLayout, start: int, stop: int, units: int
    ) -> AsyncGenerator[list[Located], None]:
        """Send the requests in the order in which `read_batches` sends them."""
        for nbytes in layout.footer:
            await self._network.fetch(nbytes)
        numbers = layout.wanted(start, stop)
        coming = self._begin(layout, numbers[0]) if numbers else None
        given = 0
        try:
            for place, number in enumerate(numbers):
                assert coming is not None
                present, group = coming, layout.group(number)
                following = numbers[place + 1] if place + 1 < len(numbers) else None
                coming = self._begin(layout, following) if group.whole and following is not None else None
                await present
                for sizes in group.rounds():
                    await self._fetch(sizes)
                if coming is None and following is not None:
                    coming = self._begin(layout, following)
                end = min(stop, layout.edges[number + 1])
                due = units * (end - start) // (stop - start)
                for first in range(given, due, MOST_AT_ONCE):
                    yield located(start, stop - start, units, first, min(due, first + MOST_AT_ONCE))
                given = due
        finally:
            if coming is not None:
                coming.cancel()
                with suppress(asyncio.CancelledError):
                    await coming

    def _begin(self, layout: ParquetLayout, number: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._fetch(layout.group(number).first))

    async def _fetch(self, sizes: Iterable[int]) -> None:
        slots = asyncio.Semaphore(self._range_requests)

        async def fetch(nbytes: int) -> None:
            async with slots:
                await self._network.fetch(nbytes)

        await asyncio.gather(*map(fetch, sizes))
