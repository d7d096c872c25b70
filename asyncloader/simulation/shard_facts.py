"""Gathers sizes and sample counts of shards before a run, from listings, indexes, and the first bytes of a shard.

Data path: URLs -> remote.dataset, which plans the epoch as a run does -> [shard_facts] -> contents -> epoch_simulation.

All that is read is bounded, whatever the number of shards: sizes of `MOST_SIZES` shards that the plan does not ask for,
footers of `MOST_FOOTERS` Parquet files, and the first megabytes of one shard.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.bridge import in_thread
from asyncloader.cpus import cpu_limit
from asyncloader.formats import ShardError
from asyncloader.remote.assignment import Assignment
from asyncloader.remote.catalog import PARQUET, Shard
from asyncloader.remote.dataset import RemoteIterableDataset
from asyncloader.remote.index_counts import read_records
from asyncloader.remote.parquet_reading import read_footer
from asyncloader.remote.stores import Stores
from asyncloader.simulation.busy_cpus import busy_cpus
from asyncloader.simulation.contents import Contents
from asyncloader.simulation.parquet_layout import ParquetLayout, layout_of
from asyncloader.simulation.sample_costs import MeasuredSamples, measure
from asyncloader.telemetry.counters import Recorder, recording, total
from asyncloader.transports import ObjectNotFound, SizeUnknown, Transport, plan_ranges
from asyncloader.transports.base import gather_all

MOST_SIZES = 64
MOST_FOOTERS = 16
MOST_INDEXED = 100_000
_PINGS = 5
_AT_ONCE = 16  # requests

MOST_SAMPLES = 1 << 40
"""Of a shard: the sum of a million of these still fits in 64 bits."""

MOST_BYTES = 1 << 43
"""Of a shard, for the same reason."""


class ShardFacts(NamedTuple):
    """The facts that a simulation starts from.

    Attributes:
        contents: of the shards.
        assignments: of an epoch that the loader has planned.
        planning: requests that this took; every run sends them once.
        requests: that a worker may have in flight.
        range_requests: of one file, for Parquet.
        rtt_s: of the fastest of a few requests for an object's size; None: not measured.
        estimated: shards whose numbers of samples, or sizes, are estimates.
        unreadable: errors of shards that were looked at.
        measured: costs of the first samples; None: not measured.
    """

    contents: Contents
    assignments: Sequence[Assignment]
    planning: int
    requests: int
    range_requests: int
    rtt_s: float | None
    estimated: int
    unreadable: Sequence[str]
    measured: MeasuredSamples | None


async def gather_facts(
    urls: Sequence[str],
    format: str | None,
    *,
    workers: int,
    batch_size: int,
    read_ahead: int,
    read: bool,
    ping: bool,
    decode: Callable[[Any], Any] | None,
) -> ShardFacts:
    """Gather the facts that a simulation starts from.

    Args:
        urls: as `RemoteIterableDataset` takes them.
        format: of all shards; None: by the extension.
        workers: of the run.
        batch_size: of the run.
        read_ahead: of the run.
        read: the first samples of a shard, to measure their cost; and to estimate the samples without an index.
        ping: measure the round trip.
        decode: is called with a few of these samples, to measure its cost.

    Raises:
        ValueError: there are no shards; or neither an index nor samples that may be read say how many they have; or
            `decode` raised.
        ShardError, TransportError: the store, or the first samples, cannot be read.
    """
    dataset, recorder = RemoteIterableDataset(urls, format=format, read_ahead=read_ahead), Recorder()
    with recording(recorder):
        plan = await dataset.plan(workers, 0, 1, None)
    planning = round(total(recorder.block, "requests"))
    assert dataset.planned_shards is not None
    catalog = dataset.planned_shards
    async with aclosing(Stores()) as stores:
        looking = _Looking(catalog, stores)
        await looking.read_footers(read_ahead)
        await looking.read_sizes()
        await looking.read_indexes()
        sizes = looking.all_sizes()
        measured = None
        if read:
            with busy_cpus(min(workers, int(cpu_limit())) - 1):
                measured = await looking.measure(decode, batch_size, sizes)
        samples = looking.all_samples(sizes, measured)
        transport, path = stores.find(catalog[looking.shown].url)
        rtt_s = await _round_trip(transport, path) if ping and hasattr(transport, "requests") else None
        return ShardFacts(
            Contents(catalog, sizes, samples, looking.layouts),
            plan.assignments,
            planning,
            getattr(transport, "requests", 256),
            transport.range_requests,
            rtt_s,
            looking.estimated,
            looking.unreadable,
            measured,
        )


async def _round_trip(transport: Transport, path: str) -> float:
    await transport.info(path)  # the first request opens the connection
    times: list[float] = []
    for _ in range(_PINGS):
        began = perf_counter()
        await transport.info(path)
        times.append(perf_counter() - began)
    return min(times)


class _Looking:
    """The sizes and counts found so far; -1: not known."""

    def __init__(self, catalog: Sequence[Shard], stores: Stores) -> None:
        self._catalog = catalog
        self._stores = stores
        self._sizes = np.fromiter((_bounded(each.size, MOST_BYTES) for each in catalog), np.int64, len(catalog))
        self._samples = np.fromiter((_bounded(each.samples, MOST_SAMPLES) for each in catalog), np.int64, len(catalog))
        self.layouts: dict[int, ParquetLayout] = {}
        self.unreadable: list[str] = []
        self.estimated = 0
        self.shown = 0
        """A shard that can be read."""

    async def read_indexes(self) -> None:
        """Take the numbers that `write_shards` has written beside its shards, unless there are very many: each shard's
        name says where an index could be.
        """
        if len(self._catalog) > MOST_INDEXED:
            return
        promises, _ = await read_records(self._catalog, self._stores)
        for number, promise in promises.items():
            known = int(self._sizes[number])
            if known not in (-1, promise.size):
                url = self._catalog[number].url
                self.unreadable.append(f"{url} has {known:,} bytes, but its index says {promise.size:,}")
                continue
            self._sizes[number] = _bounded(promise.size, MOST_BYTES)
            self._samples[number] = _bounded(promise.samples, MOST_SAMPLES)

    async def read_footers(self, read_ahead: int) -> None:
        """Read the footers of a few Parquet files, spread over all."""

        async def read(number: int) -> None:
            url = self._catalog[number].url
            transport, path = self._stores.find(url)
            plan = partial(plan_ranges, max_gap=transport.range_gap, max_size=transport.range_size)
            footer, info = await read_footer(transport.pinned(path), url)
            self.layouts[number] = await in_thread(partial(layout_of, footer, plan, read_ahead))
            self._sizes[number] = _bounded(info.size, MOST_BYTES)
            self._samples[number] = _bounded(footer.rows, MOST_SAMPLES)

        parquet = [number for number, shard in enumerate(self._catalog) if shard.format == PARQUET]
        await self._each(_spread(parquet, MOST_FOOTERS), read)

    async def read_sizes(self) -> None:
        """Ask for the sizes of a few shards, spread over all whose sizes are not known."""

        async def read(number: int) -> None:
            transport, path = self._stores.find(self._catalog[number].url)
            try:
                self._sizes[number] = _bounded((await transport.info(path)).size, MOST_BYTES)
            except SizeUnknown:
                return

        await self._each(_spread(np.flatnonzero(self._sizes < 0).tolist(), MOST_SIZES), read)

    async def _each(self, numbers: Sequence[int], read: Callable[[int], Awaitable[None]]) -> None:
        """Call a function for each shard, some at a time; note those that cannot be read."""
        waiting = iter(numbers)

        async def work() -> None:
            for number in waiting:
                try:
                    await read(number)
                except (ObjectNotFound, ShardError) as error:
                    self.unreadable.append(str(error))

        await gather_all(work() for _ in range(min(_AT_ONCE, len(numbers))))

    def all_sizes(self) -> npt.NDArray[np.int64]:
        """Return the sizes, those that are not known being as large as the others on average.

        Raises:
            ValueError: no size is known.
        """
        known = self._sizes >= 0
        if not known.any():
            why = self.unreadable[0] if self.unreadable else "the store does not say how large they are"
            raise ValueError(f"no shard's size is known: {why}")
        self.shown = int(np.flatnonzero(known)[0])
        self.estimated = int((~known).sum())
        return np.where(known, self._sizes, round(float(self._sizes[known].mean())))

    async def measure(
        self, decode: Callable[[Any], Any] | None, batch_size: int, sizes: npt.NDArray[np.int64]
    ) -> MeasuredSamples | None:
        """Measure the first samples of the first shard that has some; None: of Parquet, or if none has any.

        Raises:
            ShardError, TransportError: they cannot be read.
        """
        for number in np.flatnonzero((self._sizes > 0) & (sizes > 0)).tolist()[:MOST_SIZES]:
            if self._catalog[number].format == PARQUET:
                return None
            shard = self._catalog[number]._replace(size=int(sizes[number]))
            if (found := await measure(shard, self._stores, decode, batch_size)) is not None:
                return found
        return None

    def all_samples(self, sizes: npt.NDArray[np.int64], measured: MeasuredSamples | None) -> npt.NDArray[np.int64]:
        """Return the numbers of samples, those that are not known in proportion to the sizes.

        Raises:
            ValueError: nothing is known of any shard's samples.
        """
        known = self._samples >= 0
        if known.all():
            return self._samples
        if measured is not None:
            each = measured.sample_bytes
        elif known.any() and (counted := int(self._samples[known].sum())):
            each = float(sizes[known].sum()) / counted
        elif not sizes.any():
            return np.zeros_like(sizes)
        else:
            raise ValueError("nothing says how many samples the shards have: they have no index, and none was read")
        self.estimated = max(self.estimated, int((~known).sum()))
        guess = np.maximum(np.round(sizes / max(each, 1.0)).astype(np.int64), (sizes > 0).astype(np.int64))
        return np.where(known, self._samples, guess)


def _bounded(number: int | None, most: int) -> int:
    return -1 if number is None else min(number, most)


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most this number of them, at even distances."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[len(numbers) * place // most] for place in range(most)]
