"""`FixedStreams`: the samples of counted shards as a map dataset, whose indices are positions in an epoch's order.

Data path: sampler -> positions -> [fixed_streams: stream_order -> stream_blocks] -> collate.

The main process counts the samples (`plan_streams`); the copy in each worker computes the epoch's order from the
counts, and reads the streams that its positions lie in. So a loader treats it as any map dataset in seeded mode: its
state is a number of batches, which does not depend on workers or ranks.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
from torch.utils.data import Dataset

from asyncloader.base.shielding import wait_until_done
from asyncloader.formats import Sample
from asyncloader.remote.batch_rows import BatchRows
from asyncloader.remote.sample_counts import Counted
from asyncloader.remote.stream_blocks import Element, StreamBlocks, TableRow, copied
from asyncloader.remote.stream_order import LANES, OrderBefore, StreamOrder, StreamRun, order_of, read_before
from asyncloader.samplers.positions import PlacedSamples
from asyncloader.workers.fetch.seeding import derive

if TYPE_CHECKING:
    from asyncloader.ranks.exchange import RankExchange
    from asyncloader.remote.dataset import RemoteIterableDataset

_READERS = 2  # per stream: one that goes on, and one for positions elsewhere (substitutes of bad samples)


class StreamsPlan(NamedTuple):
    """The values, besides an epoch's number, that its order depends on.

    Attributes:
        counted: of each shard.
        batch: samples in a global batch.
        samples: in all shards.
        digest: of the shards' names and counts.
    """

    counted: Sequence[Counted]
    batch: int
    samples: int
    digest: str


class FixedStreams(PlacedSamples, Dataset[Any]):
    """The samples of a `RemoteIterableDataset` at positions of an epoch's order. Made by a loader with ``seed=``.

    Args:
        source: the shards, with a number of `streams`.
        seed: the loader's.
    """

    lanes = LANES
    """Global batches in a row that are read from different streams."""

    def __init__(self, source: RemoteIterableDataset, seed: int) -> None:
        self.source = source
        self.seed = seed
        self.epoch = 0
        self._planned: list[StreamsPlan] = []  # shared with the copies of the iterators; one plan, or none yet
        self._forget()

    def _forget(self) -> None:
        self._order: StreamOrder | None = None  # of the present epoch, once it is needed
        self._before: tuple[OrderBefore, ...] = ()  # of the present epoch, where it was resumed as a set
        self._readers: dict[int, list[StreamBlocks]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._shards: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "seed": self.seed, "epoch": self.epoch, "_planned": self._planned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def for_iterator(self) -> Self:
        """Return a copy with an epoch and readers of its own."""
        return copy.copy(self)

    def __repr__(self) -> str:
        return f"<FixedStreams of {self.source!r}, streams={self.source.streams}>"

    # ----------------------------------------------------------------------------- in the main process

    async def plan_streams(self, batch: int, ranks: RankExchange | None = None) -> None:
        """Count the samples for global batches of this size, unless that was done.

        Args:
            batch: samples in a global batch.
            ranks: the other ranks, which count together with this one: each calls this within `RankExchange.planning`,
                also if it has counted before. None: this rank counts alone.

        Raises:
            TransportError: a shard cannot be counted, and the error is not about its samples.
            RanksDisagree: another rank would read other samples, or could not count.
            The errors of `find_shards`.
        """
        if ranks is None and self._planned and self._planned[0].batch == batch:
            return
        about = {**self.described(), "shards": None, "seed": self.seed, "global batch": batch}
        counted = await self.source.counted(ranks, about)
        digest = hashlib.blake2b(digest_size=16)
        for name, each in zip(self.source.shard_urls, counted, strict=True):
            digest.update(f"{name}\n{each.samples}\n".encode(errors="surrogatepass"))
        samples = sum(each.samples for each in counted)
        self._planned[:] = [StreamsPlan(counted, batch, samples, digest.hexdigest())]

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch; None before `plan_streams`."""
        return self._planned[0].samples if self._planned else None

    def described(self) -> dict[str, Any]:
        """Return the values that must be the same where a state is loaded. The digest is None before `plan_streams`."""
        source = self.source
        return {
            "streams": source.streams,
            "shuffle_buffer": source.shuffle_buffer,
            "shuffle_shards": source.shuffle_shards,
            "shards": self._planned[0].digest if self._planned else None,
        }

    @property
    def elastic(self) -> bool:
        """Whether a state of other streams, or of another global batch, is resumed as a set."""
        return bool(self.source.elastic == "set")

    def left(self, before: Sequence[Any], epoch: int) -> int:
        """Return the number of samples of an epoch that orders before have not had.

        Raises:
            StateError: they cannot be.
        """
        return self._order_of(epoch, read_before(before)).total

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next positions. Readers of the epoch before are closed with the next call."""
        if epoch != self.epoch or self._before:
            self.epoch, self._order, self._before = epoch, None, ()

    def begin_epoch(self, message: bytes) -> None:
        """Begin an epoch behind the orders that the message has, JSON of a state. Called after `set_epoch`."""
        self._before, self._order = read_before(json.loads(message)), None

    # ---------------------------------------------------------------------------------- in a worker

    def enter(self) -> None:
        """Begin to read in the running loop, until `__aexit__`."""
        self.source.enter()

    async def __aenter__(self) -> Self:
        self.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._close_readers()
        finally:
            await self.source.leave()

    async def __getitem__(self, position: int) -> Sample:
        """Return the sample at a position. See `__getitems__`."""
        (sample,) = await self.__getitems__([position])
        return sample

    async def __getitems__(self, positions: Sequence[int]) -> Sequence[Sample]:
        """Return the samples at these positions of the epoch's order. Quick for positions that follow one another.

        Rows of tables are made later, when they are asked for.

        Raises:
            ShardError, ObjectNotFound: a sample cannot be read.
            TransportError: the store cannot be read.
            IndexError: the epoch has no such position.
        """
        order = self._present_order()
        runs = order.runs(positions)
        found = [self._found(*run) for run in runs]
        parts = [each for each in found if each]
        if len(parts) < len(runs):
            parts = await self._read_missing(order, runs, found)
        samples = list(chain.from_iterable(parts))
        kinds = {*map(type, samples)}
        if kinds == {TableRow}:
            return BatchRows(cast("list[TableRow]", samples))
        if kinds != {dict}:
            for number, sample in enumerate(samples):
                if isinstance(sample, Exception):
                    raise copied(sample)
                if type(sample) is TableRow:  # beside samples of other formats
                    samples[number] = sample.table.sample(sample.row)
        return cast("list[Sample]", samples)

    def _found(self, stream: int, first: int, size: int) -> list[Element] | None:
        """Return the samples of a run, if its stream's newest reader has them: mostly it does."""
        readers = self._readers.get(stream)
        return readers[-1].found(first, first + size) if readers else None

    async def _read_missing(
        self, order: StreamOrder, runs: Sequence[StreamRun], found: Sequence[list[Element] | None]
    ) -> list[list[Element]]:
        """Return the samples of each run. Of those that were not found, each gets a reader, and is waited for."""
        readers = [None if each else self._reader(order, run) for run, each in zip(runs, found, strict=True)]
        try:
            # All of them, before the first is waited for: they load at the same time.
            for (_, first, size), reader in zip(runs, readers, strict=True):
                if reader is not None:
                    reader.prepare(first + size)
            return [
                (each or []) if reader is None else await reader.read(first, first + size)
                for (_, first, size), reader, each in zip(runs, readers, found, strict=True)
            ]
        finally:
            for (stream, _, _), reader in zip(runs, readers, strict=True):
                if reader is not None:
                    self._release(stream, reader)

    def _present_order(self) -> StreamOrder:
        if self._order is None:
            (plan,) = self._planned  # the loader plans the streams before its workers start
            for readers in self._readers.values():  # of the epoch before
                for reader in readers:
                    self._close_soon(reader)
            self._readers = {}
            self._shards = self.source.counted_shards(plan.counted)
            self._order = self._order_of(self.epoch, self._before)
        return self._order

    def _order_of(self, epoch: int, before: Sequence[OrderBefore]) -> StreamOrder:
        (plan,), source = self._planned, self.source
        counts = np.fromiter((each.samples for each in plan.counted), np.int64, len(plan.counted))
        now = OrderBefore(plan.batch, source.streams or 1, source.shuffle_buffer, source.shuffle_shards, 0)
        return order_of(counts, before, now, derive(self.seed, "streams", epoch))

    def _reader(self, order: StreamOrder, run: StreamRun) -> StreamBlocks:
        """Return the reader of the run's stream that has its first sample or comes to it soon, else a new reader. The
        caller must `_release` it.
        """
        readers = self._readers.setdefault(run.stream, [])
        if not (readers and readers[-1].serves(run.first)):  # mostly the newest, which is the last, does
            at = next((at for at, reader in enumerate(readers) if reader.serves(run.first)), None)
            other = StreamBlocks(order, run.stream, run.first, self._shards) if at is None else readers.pop(at)
            readers.append(other)
        reader = readers[-1]
        reader.users += 1
        return reader

    def _release(self, stream: int, reader: StreamBlocks) -> None:
        reader.users -= 1
        readers = self._readers.get(stream, [])
        while len(readers) > _READERS and (idle := next((each for each in readers if not each.users), None)):
            readers.remove(idle)
            self._close_soon(idle)

    def _close_soon(self, reader: StreamBlocks) -> None:
        closing = asyncio.create_task(reader.aclose(), name="asyncloader-close-stream")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_readers(self) -> None:
        for readers in self._readers.values():
            for reader in readers:
                self._close_soon(reader)
        self._readers, self._order = {}, None
        await wait_until_done(list(self._closing))
