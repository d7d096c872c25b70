"""`RemoteIterableDataset`: shards in a store, as a dataset. Data path: [dataset] -> plan -> leases -> lanes -> batches.

The main process finds the shards and plans an epoch (`plan`); each worker reads what it is leased (`open_lane`).
Nothing is read before the first iteration, or before somebody asks for a length.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch.utils.data import IterableDataset

from asyncloader.bridge import run_in_thread
from asyncloader.formats import MAX_SAMPLE_BYTES, Located, OnBad, Sample, ShardError, ShardFormat
from asyncloader.remote.assignment import LaneStart, Lease, LeaseBook, Ledger
from asyncloader.remote.catalog import Piece, Shard, can_cut, cut, grouped
from asyncloader.remote.discovery import find_shards
from asyncloader.remote.reading import READ_AHEAD, MakeReader, read_piece
from asyncloader.remote.shard_sizes import bytes_per_sample, with_counts, with_edges, with_sizes
from asyncloader.remote.stores import LoopStores, Stores, scheme_of, unsigned
from asyncloader.remote.worker_stream import Lane, LocalLeases
from asyncloader.samplers.permutation import Permutation
from asyncloader.transports import ObjectNotFound, Transport, TransportError
from asyncloader.workers.fetch.assignment_client import LeaseSource

__all__ = ["RemoteIterableDataset"]

PIECES_EACH = 4
"""Pieces for each lane that shards are cut into where there are fewer of them: enough to even out the end."""

MEASURED = 1024
"""Shards of which the store is asked for their sizes, so that small ones are leased, and opened, several at a time."""

CUSTOM = ShardFormat("custom", None)

SAID_WHERE_IT_IS_READ = (ObjectNotFound, ShardError)
"""What is wrong with a shard itself is a matter of `on_error`. (What may be wrong for a moment, or for one rank, is
not: the ranks' plans must be the same.)"""


class RemoteIterableDataset(IterableDataset[Any]):
    """Samples from shards that lie in a store: tar (WebDataset's naming), JSON lines, Parquet, MDS, TFRecord.

    A sample is a dictionary: ``__key__`` (str), ``__url__`` (str) and its fields, raw bytes unless the format says
    more or `decode` does. Each is read once an epoch, whatever the number of workers and of ranks; every batch is full,
    but for the last one of the epoch. Order, states and what happens when a worker dies: see
    ``docs/explanation/order-and-resume-in-streams.md``.

    Use it with asyncloader's loaders, or iterate it alone: ``async for sample in dataset``. It is read by one process
    for each worker, which is started by "forkserver" unless `multiprocessing_context` says otherwise.

    Args:
        urls: one or several of: the URL of a shard, or a local path; a brace pattern
            (``"s3://bucket/train-{000..127}.tar"``); a prefix, ending with ``/``, whose shards are listed; a folder or
            an ``index.json`` of an MDS dataset. Without a `transport`, schemes are those of `open_transport`.
        format: of all shards, as an extension without its dot (``"tar"``, ``"jsonl.gz"``, ``"parquet"``); or a function
            of a URL and a `ShardRange` that makes a `ShardReader`. None: by the extension.
        decode: a function of a sample, for its collated form. It runs in `decode_threads` threads of the loader.
        shuffle_buffer: samples that are shuffled together in each worker (see ``asyncloader/remote/shuffle.py``);
            0: they stay in their order.
        shuffle_shards: read the shards in another order each epoch. None: if there is a `shuffle_buffer`.
        transport: reads everything; URLs are then paths below its root.
        cache_dir: directory in which whole objects are kept for the next epoch. None: nothing is.
            (Shards that are cut, and Parquet, are read by ranges, and not kept.)
        cache_bytes: bound on the size of that directory; None: no bound.
        cache_revalidate: ask the store each time whether an object is still the one that is kept; False trusts that.
        max_sample_bytes: refuse a sample of more (decompressed) bytes; default 1 GiB.
        read_ahead: bytes of a shard that each worker fetches ahead; default 8 MiB.
        columns: of Parquet, the columns to read; None: all.
        storage_options: keyword arguments for the transports that are opened (credentials, endpoint, retry).

    Raises:
        ValueError: an argument is out of range, or excludes another one.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        format: str | ShardFormat | MakeReader | None = None,
        decode: Callable[[Sample], Any] | None = None,
        shuffle_buffer: int = 0,
        shuffle_shards: bool | None = None,
        transport: Transport | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        cache_revalidate: bool = True,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        read_ahead: int = READ_AHEAD,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (
            ("shuffle_buffer", shuffle_buffer, 0),
            ("max_sample_bytes", max_sample_bytes, 1),
            ("read_ahead", read_ahead, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} should be an integer of at least {least}, but got {name}={value!r}")
        if decode is not None and not callable(decode):
            raise ValueError(f"decode should be a function of a sample or None, but got decode={decode!r}")
        self.urls = urls if isinstance(urls, str | os.PathLike) else list(urls)
        self.format = format
        self.decode = decode
        self.shuffle_buffer = shuffle_buffer
        self.shuffle_shards = bool(shuffle_buffer) if shuffle_shards is None else bool(shuffle_shards)
        self.max_sample_bytes = max_sample_bytes
        self.read_ahead = read_ahead
        self.columns = columns
        self._stores = LoopStores(
            Stores(
                storage_options,
                transport=transport,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                cache_revalidate=cache_revalidate,
            )
        )
        self._pieces_each = PIECES_EACH if cache_dir is None else 1  # cut shards are not kept
        self._listed: list[Shard] | None = None  # as they were found
        self._told: list[Shard] | None = None  # with what was asked for a length
        self._shards: list[Shard] | None = None  # with what the newest plan rests on
        self._parts: int | None = None  # that this plan wanted

    def __repr__(self) -> str:
        found = "" if self._listed is None else f", {len(self._listed)} shards"
        return f"<RemoteIterableDataset {self.urls!r}{found}>"

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a RemoteIterableDataset is read by asyncloader's DataLoader or AsyncDataLoader, or with 'async for'"
        )

    async def __aiter__(self) -> AsyncGenerator[Sample, None]:
        """All samples, in the order of the shards; not decoded."""
        plan = await self.plan(1, 0, 1, None)
        self._stores.enter()
        lane = self.open_lane(LocalLeases(LeaseBook(Ledger(plan), [LaneStart()]), 0))
        try:
            while True:
                lane.next_batch()
                try:
                    samples = await lane.take(1)
                except StopAsyncIteration:
                    return
                yield samples[0]
        finally:
            await lane.aclose()
            await self._stores.leave()

    async def __aenter__(self) -> Self:
        self._stores.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stores.leave()

    def __len__(self) -> int:
        """Samples of all shards, if indexes say so: MDS, Parquet. Blocks: it reads these indexes once.

        Raises:
            TypeError: they do not. `estimated_len` may help.
        """
        shards = run_in_thread(self._counted())
        counts = [shard.samples for shard in shards if shard.samples is not None]
        if len(counts) < len(shards):
            raise TypeError(
                f"{self!r} has no len(): only MDS and Parquet say how many samples a shard holds. estimated_len() "
                "guesses"
            )
        return sum(counts)

    def estimated_len(self) -> int:
        """About how many samples there are: the bytes of all shards over those of the first one's first samples.

        Blocks: it asks the store for the size of each shard, and reads up to 1 MiB of one.
        """
        return run_in_thread(self._estimate())

    # ---------------------------------------------------------------------------------------- for the loaders

    async def plan(self, lanes: int, rank: int, ranks: int, key: int | None, *, common: bool = True) -> list[Lease]:
        """What this rank reads in an epoch, in the order in which it is leased.

        Args:
            lanes: workers of a rank, at least 1.
            rank: of this process.
            ranks: their number; each has every `ranks`-th piece.
            key: chooses the order, if `shuffle_shards`; None: as they are.
            common: all ranks have the same key. If not, each shuffles its own part.

        Raises:
            As `find_shards`; TransportError where a shard cannot be asked for the places to cut it.
        """
        parts = self._pieces_each * lanes * ranks
        shards = await self._measured(parts)
        pieces = cut(shards, parts)
        mine = self._shuffled(pieces, key)[rank::ranks] if common else self._shuffled(pieces[rank::ranks], key)
        return grouped(mine, shards, lanes)

    @property
    def shard_urls(self) -> list[str]:
        """What a state knows the shards by: their URLs, without what signs these. Empty before `plan`."""
        urls = (shard.url for shard in self._listed or [])
        return [unsigned(url) if scheme_of(url) in ("http", "https") else url for url in urls]

    def open_lane(self, source: LeaseSource) -> Lane:
        """One worker's stream. `plan` was called, here or in the process that this dataset came from."""
        assert self._shards is not None
        return Lane(self._shards, self._open, source, self.shuffle_buffer)

    def _open(self, shard: Shard, piece: Piece, on_bad: OnBad) -> AsyncGenerator[list[Located], None]:
        return read_piece(
            self._stores.here(),
            shard,
            piece,
            max_sample_bytes=self.max_sample_bytes,
            on_bad=on_bad,
            reader=self.format if shard.format == CUSTOM and callable(self.format) else None,
            read_ahead=self.read_ahead,
            columns=self.columns,
        )

    def _shuffled(self, pieces: list[Piece], key: int | None) -> list[Piece]:
        if key is None or not self.shuffle_shards:
            return pieces
        return [pieces[at] for at in Permutation(len(pieces), key, 0)(np.arange(len(pieces)))]

    # ------------------------------------------------------------------------------------- what is known of shards

    async def _found(self, stores: Stores) -> list[Shard]:
        if self._listed is None:
            custom = callable(self.format) and not isinstance(self.format, ShardFormat)
            self._listed = await find_shards(self.urls, stores, CUSTOM if custom else self.format)  # type: ignore[arg-type]
        return self._told or self._listed

    async def _measured(self, parts: int) -> list[Shard]:
        """The shards with what a plan of `parts` pieces rests on.

        That depends on the shards and on `parts` alone, not on what else was asked of this object: other ranks plan the
        same epoch, and a state is found again in a later process, with objects that were not asked.
        """
        if self._shards is not None and self._parts == parts:
            return self._shards
        async with aclosing(self._own_stores()) as stores:
            shards, done = await self._found(stores), parts
            assert self._listed is not None
            if len(shards) < parts and any(map(can_cut, shards)):
                shards = await with_edges(shards, stores, parts, leave=SAID_WHERE_IT_IS_READ)
            elif len(shards) > MEASURED:
                shards = self._listed
            else:
                try:
                    shards = await with_sizes(shards, stores)
                except TransportError:  # who reads that shard will say so
                    shards, done = self._listed, 0  # asked again for the next plan
            self._shards, self._parts = shards, done
            return shards

    async def _counted(self) -> list[Shard]:
        async with aclosing(self._own_stores()) as stores:
            self._told = await with_counts(await self._found(stores), stores)
            return self._told

    async def _estimate(self) -> int:
        async with aclosing(self._own_stores()) as stores:
            shards = self._told = await with_sizes(await self._found(stores), stores)
            counted = sum(shard.samples or 0 for shard in shards)
            others = [shard for shard in shards if shard.samples is None]
            if not others:
                return counted
            reader = self.format if callable(self.format) and not isinstance(self.format, ShardFormat) else None
            each = await bytes_per_sample(others[0], stores, reader=reader)
            return counted + (round(sum(shard.size or 0 for shard in others) / each) if each else 0)

    def _own_stores(self) -> Stores:
        """For another loop than the one that reads: a transport belongs to one loop at a time."""
        template = self._stores.template
        if template.transport is None:
            return template.fresh()  # options need not pickle: they may hold functions
        try:
            copy: Stores = pickle.loads(pickle.dumps(template))
        except (pickle.PicklingError, AttributeError, TypeError):
            return template.fresh()  # without workers, the loop that asks is the one that reads
        return copy
