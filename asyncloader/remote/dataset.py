"""`RemoteIterableDataset`: reads samples from shards in a remote store.

Data path: discovery, shard_sizes, catalog -> [dataset: plan] -> assignment -> worker_stream -> batches.

The main process finds the shards and plans an epoch (`plan`); each worker reads the ranges that are assigned to it
(`open_worker_stream`). Nothing is read before the first iteration or the first request for a length.
"""

from __future__ import annotations

import copy
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from asyncloader.base.bridge import run_in_thread
from asyncloader.base.sizes import Size, size
from asyncloader.formats import MAX_SAMPLE_BYTES, Located, OnBad, Sample, ShardFormat
from asyncloader.remote.assignment import AssignmentLog, ShardAssigner, StreamStart
from asyncloader.remote.catalog import CUSTOM, PARQUET, Shard, fingerprint_of
from asyncloader.remote.discovery import asks_a_store, find_shards
from asyncloader.remote.fixed_streams import FixedStreams
from asyncloader.remote.index_counts import SampleOffsets, with_recorded_sizes
from asyncloader.remote.parquet_reading import SharedRows
from asyncloader.remote.prefetch import AnyRange
from asyncloader.remote.reading import READ_AHEAD, MakeReader, Pins, read_shard_range
from asyncloader.remote.sample_counts import Counted, Counting, count_samples, count_together, list_together
from asyncloader.remote.shard_sizes import (
    RAISED_WHEN_READ,
    trim,
    with_counts,
    with_edges,
    with_sizes,
)
from asyncloader.remote.shard_splitting import (
    RANGES_PER_WORKER,
    CatalogRange,
    EpochPlan,
    EpochShares,
    can_cut,
    cut,
    group_ranges,
    log_left_out,
    part_left_out,
    sample_numbers,
    stretch_of,
)
from asyncloader.remote.stores import LoopStores, Stores, names_of, warn_without_effect
from asyncloader.remote.stream_blocks import Shards
from asyncloader.remote.stream_order import LANES
from asyncloader.remote.worker_stream import LocalAssignments, WorkerStream
from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.positions import ShardStream
from asyncloader.transports import InvalidPath, SizeUnknown, Transport
from asyncloader.workers.fetch.assignment_client import AssignmentSource

if TYPE_CHECKING:
    from asyncloader.ranks.agreement import Agreement
    from asyncloader.ranks.exchange import RankExchange

SHUFFLE_BUFFER = 1000
"""Samples that are shuffled together with the loader's ``shuffle=True`` and no `shuffle_buffer`."""

MAX_SIZE_REQUESTS = 1024
"""With at most this number of shards, their sizes are requested, so that small shards can be assigned in groups."""

_LEAST_AHEAD = 1 << 18  # bytes that each of many streams fetches ahead, at least


class RemoteIterableDataset(ShardStream, IterableDataset[Any]):
    """Samples from shards in a remote store: tar (WebDataset's naming), JSON lines, Parquet, MDS, TFRecord.

    A sample is a dictionary: ``__key__`` (str), ``__url__`` (str) and its fields, raw bytes unless the format decodes
    them; the loader collates the results of its `decode`. Without `decode` and `collate_fn`, columns of Parquet become
    the tensors of a batch as a whole, in a fraction of the time. Each sample is read once per epoch, on any number of
    workers; every batch is full, except the last batch of the epoch. Several ranks share the samples evenly with
    `streams`, or if the number in each shard is known (MDS, Parquet). Otherwise they share the shards, and an epoch
    ends for all with the smallest share: the rest of the other shares is not read (`on_uneven`), in each epoch other
    samples. Order, states and the replacement of dead workers: see
    ``docs/explanation/order-and-resume-in-streams.md``.

    Use it with asyncloader's loaders, or iterate over it alone: ``async for sample in dataset``. Its worker processes
    are started by "forkserver" unless `multiprocessing_context` says otherwise.

    Args:
        urls: one or several of: the URL of a shard, or a local path; a brace pattern
            (``"s3://bucket/train-{000..127}.tar"``); a pattern with ``*`` or ``**/``, or a prefix, ending with ``/``,
            whose shards are listed, without those in folders below it that begin with ``.`` or ``_``; a folder or an
            ``index.json`` of an MDS dataset. Without a `transport`, the schemes are those of `open_transport`.
        format: of all shards, as an extension without its dot (``"tar"``, ``"jsonl.gz"``, ``"parquet"``); or a function
            that makes a `ShardReader` of a URL and a `ShardRange`. None: by the extension.
        shuffle_buffer: samples that are shuffled together in each worker (see ``asyncloader/remote/shuffle.py``); 0: no
            shuffling of samples, or 1,000 with the loader's ``shuffle=True``.
        shuffle_shards: read the shards in another order each epoch. None: with a `shuffle_buffer`.
        transport: reads all shards; URLs are then paths below its root.
        cache_dir: directory in which shards of every format are cached for the next epoch: a shard that is read from
            end to end as a file, others (Parquet, shards that are cut, the rest of a shard after a resume) in blocks of
            1 MiB. None: no caching. Local files are not cached, nor are objects without a version (`CachedTransport`).
        cache_bytes: maximum size of that directory, in bytes or as a text (``"200GB"``); None: no limit.
        cache_revalidate: ask the store on each read whether a cached object is current; False: never ask.
        max_sample_bytes: refuse a sample with more (decompressed) bytes; default ``"1GiB"``.
        read_ahead: bytes of a shard that each worker fetches ahead; default ``"8MiB"``.
        columns: the columns of Parquet to read; None: all.
        storage_options: keyword arguments for the transports that are opened (credentials, endpoint, retry).
        streams: streams that each global batch is read from. With it, and the loader's ``seed=``, an epoch's batches
            and their order depend neither on the number of workers nor of ranks, no rank leaves out samples, and a
            state fits any of these numbers. Ranks up to this number that divide it read no byte twice. The samples of
            shards without an index are counted before the first epoch, for which they are read once; a `cache_dir`
            keeps the numbers, also of local shards. None: each worker reads a stream of its own.
        elastic: what a state of other `streams`, `shuffle_buffer` or `shuffle_shards`, or of another global batch,
            means: "order": an error; "set": the samples that were not delivered, in another order. Needs `streams`.

    Raises:
        ValueError: an argument is out of range, or incompatible with another.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        format: str | ShardFormat | MakeReader | None = None,
        shuffle_buffer: int = 0,
        shuffle_shards: bool | None = None,
        transport: Transport | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: Size | None = None,
        cache_revalidate: bool = True,
        max_sample_bytes: Size = MAX_SAMPLE_BYTES,
        read_ahead: Size = READ_AHEAD,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        streams: int | None = None,
        elastic: Literal["order", "set"] = "order",
    ) -> None:
        if not isinstance(shuffle_buffer, int) or shuffle_buffer < 0:
            raise ValueError(
                f"shuffle_buffer should be a number of samples, 0 for none, but got shuffle_buffer={shuffle_buffer!r}"
            )
        if streams is not None and (not isinstance(streams, int) or isinstance(streams, bool) or streams < 1):
            raise ValueError(f"streams should be a number of at least 1, or None, but got streams={streams!r}")
        if elastic not in ("order", "set"):
            raise ValueError(f"elastic should be 'order' or 'set', but got elastic={elastic!r}")
        if elastic == "set" and streams is None:
            raise ValueError("elastic='set' is about states of fixed streams: give streams=, too")
        self.urls = urls if isinstance(urls, str | os.PathLike) else list(urls)
        self.format = format
        self.shuffle_buffer = shuffle_buffer
        self.shuffle_shards = bool(shuffle_buffer) if shuffle_shards is None else bool(shuffle_shards)
        self.max_sample_bytes = size("max_sample_bytes", max_sample_bytes)
        self.read_ahead = size("read_ahead", read_ahead)
        self.columns = columns
        self.streams = streams
        self.elastic = elastic
        self._stores = LoopStores(
            Stores(
                storage_options,
                transport=transport,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                cache_revalidate=cache_revalidate,
            )
        )
        if cache_dir is None or streams is None:  # with streams, also the numbers of local shards are kept
            warn_without_effect(self.urls, cache_dir, cache_bytes, cache_revalidate)
        self._listed: Sequence[Shard] | None = None  # the result of `find_shards`
        self._counted_shards: Sequence[Shard] | None = None  # with sizes or counts, for `len`
        self.planned_shards: Sequence[Shard] | None = None  # with sizes and cut points, for the latest plan
        self._parts: tuple[int, int] | None = None  # the number of ranges that this plan asked for, and of ranks
        self._counts: npt.NDArray[np.int64] | None = None  # samples in each of its ranges, if known
        self._logged = False  # the part that the ranks' shares leave out
        self._all_counted: Sequence[Counted] | None = None  # of the shards of `_listed`, for fixed streams

    def __repr__(self) -> str:
        found = "" if self._listed is None else f", {len(self._listed)} shards"
        return f"<RemoteIterableDataset {self.urls!r}{found}>"

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a RemoteIterableDataset is read by asyncloader's DataLoader or AsyncDataLoader, or with 'async for'"
        )

    async def __aiter__(self) -> AsyncGenerator[Sample, None]:
        """Read all samples, in the order of the shards."""
        plan = await self.plan(1, 0, 1, None)
        self._stores.enter()
        assigner = ShardAssigner(AssignmentLog(plan.assignments), [StreamStart()])
        worker = self.open_worker_stream(LocalAssignments(assigner, 0))
        try:
            while True:
                worker.next_batch()
                try:
                    samples = await worker.take(1)
                except StopAsyncIteration:
                    return
                yield samples[0]
        finally:
            try:
                await worker.aclose()
            finally:  # also if the caller is cancelled meanwhile
                await self._stores.leave()

    def shuffled(self) -> Self:
        """Return this dataset if it shuffles samples and shards, else a copy that does. A loader's ``shuffle=True``."""
        if self.shuffle_buffer and self.shuffle_shards:
            return self
        other = copy.copy(self)
        other.shuffle_buffer, other.shuffle_shards = self.shuffle_buffer or SHUFFLE_BUFFER, True
        return other

    async def __aenter__(self) -> Self:
        self.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    def enter(self) -> None:
        """Begin to read in the running loop."""
        self._stores.enter()

    async def leave(self) -> None:
        """Stop reading in the running loop. Raises the errors of `Stores.aclose`."""
        await self._stores.leave()

    def __len__(self) -> int:
        """Number of samples in all shards, if indexes provide it (MDS, Parquet). Blocks: reads these indexes once.

        Raises:
            TypeError: a shard has no index; or its index is missing or damaged: not its own error, because
                `list(loader)` calls this first, and the shard raises it when it is read.
            TransportError: the store cannot be read.
            The errors of `find_shards`.
        """
        shards = run_in_thread(self._count_samples())
        counts = [shard.samples for shard in shards if shard.samples is not None]
        if len(counts) < len(shards):
            unread = next((shard.url for shard in shards if shard.format == PARQUET and shard.samples is None), None)
            if unread is not None:
                raise TypeError(f"{self!r} has no len(): the footer of {unread!r} cannot be read")
            raise TypeError(
                f"{self!r} has no len(): only MDS and Parquet say how many samples a shard holds; with streams= a "
                "loader counts them"
            )
        return sum(counts)

    def estimated_len(self) -> int:
        """Raise AttributeError: it was removed."""
        raise AttributeError(
            "estimated_len() was removed: `asyncloader inspect URL...` counts the samples of shards, and so does a "
            "loader's len() with streams="
        )

    # ---------------------------------------------------------------------------------------- for the loaders

    def fixed_streams(self, seed: int) -> FixedStreams | Self:
        """Return the dataset as a loader with this seed reads it: with a number of `streams`, as `FixedStreams`."""
        return self if self.streams is None else FixedStreams(self, seed)

    async def plan(self, workers: int, rank: int, ranks: int, key: int | None, *, common: bool = True) -> EpochPlan:
        """Return the assignments of this rank in an epoch, in the order in which its workers get them.

        Args:
            workers: per rank, at least 1.
            rank: of this process.
            ranks: number of ranks; `rank_shares` has the rules by which they share the samples.
            key: of the epoch: the seed of the order, if `shuffle_shards`. Otherwise, with several ranks, it determines
                the range with which a rank begins, so that each epoch leaves out other samples. None: no shuffling.
            common: all ranks have the same key. If not, each rank shuffles its own part.

        Raises:
            TransportError: the sizes or cut points of a shard cannot be read.
            The errors of `find_shards`.
        """
        parts = RANGES_PER_WORKER * workers * ranks
        shards = await self._with_known_sizes(parts, ranks)
        in_place = cut(shards, parts)
        order = np.arange(len(in_place), dtype=np.int64)
        shuffle = key if self.shuffle_shards else None
        # Ranks with different keys keep the common order: with different orders, two could read the same range.
        if shuffle is not None and common:
            order = Permutation(len(order), shuffle, 0)(order)
        ordered = [in_place[at] for at in order.tolist()]
        if ranks == 1:
            shares, mine = EpochShares(1, None, 0.0), ordered
        elif (counts := self._sample_counts(shards, in_place)) is not None:
            shares = EpochShares(ranks, int(counts.sum()), 0.0)
            stretch = stretch_of(counts[order], rank, ranks)
            async with aclosing(self._own_stores()) as stores:
                mine = await trim(ordered[stretch.first : stretch.stop], shards, stretch, stores)
        else:
            part = part_left_out(shards, ordered, ranks)
            shares, mine = EpochShares(ranks, None, part), ordered[rank::ranks]
            if not rank and not self._logged:
                self._logged = True
                log_left_out(part, len(shards), ranks)
        if shuffle is not None and not common:
            mine = [mine[at] for at in Permutation(len(mine), shuffle, 0)(np.arange(len(mine))).tolist()]
        elif shuffle is None and ranks > 1 and mine:
            # Otherwise each epoch would leave out the same samples, those at the end of a rank's share.
            first = (key or 0) % len(mine)
            mine = mine[first:] + mine[:first]
        return EpochPlan(group_ranges(mine, shards, workers), shares)

    async def fingerprint(self, workers: int, ranks: int) -> str:
        """Return a digest of the names, sizes and cut points of the shards on which a `plan` for these numbers of
        workers and ranks is based.

        Raises:
            The errors of `plan`.
        """
        shards = await self._with_known_sizes(RANGES_PER_WORKER * workers * ranks, ranks)
        return fingerprint_of(self.shard_urls, shards)

    @property
    def shard_urls(self) -> list[str]:
        """The URLs that identify the shards in a state, without signatures. Empty before `plan`."""
        return names_of(self._listed or [])

    def open_worker_stream(self, source: AssignmentSource) -> WorkerStream:
        """Open one worker's stream. `plan` must have been called, here or before this dataset was pickled."""
        assert self.planned_shards is not None
        return WorkerStream(self.planned_shards, partial(self._open, Pins()), source, self.shuffle_buffer)

    async def counted(
        self, ranks: RankExchange | None = None, about: Mapping[str, Any] | None = None
    ) -> Sequence[Counted]:
        """Return the count of each shard's samples; counts those that are not known, once.

        Args:
            ranks: other ranks that share the work; None: there are none.
            about: with `ranks`: plain values that must be the same on all of them.

        Raises:
            TransportError: a shard cannot be counted, and the error is not about its samples.
            RanksDisagree: another rank has other shards or values, or could not count.
            The errors of `find_shards`.
        """
        if self._all_counted is None or ranks is not None:
            async with aclosing(self._own_stores()) as stores:
                if ranks is None:
                    await self._list_and_count(stores)
                else:
                    about = {**(about or {}), "urls": self._absolute_urls(stores)}
                    self._listed, self._all_counted = await count_together(
                        partial(self._list_and_count, stores), about, ranks
                    )
        assert self._all_counted is not None
        return self._all_counted

    async def _list_and_count(self, stores: Stores) -> tuple[Sequence[Shard], Sequence[Counted]]:
        shards = await self._find(stores)
        if self._all_counted is None:
            counting = Counting(
                stores,
                partial(self._open_from, stores, Pins(), self.read_ahead),
                None if self._reader else stores.cache_dir,
                (self.format, self.max_sample_bytes),
            )
            self._all_counted = await count_samples(counting, shards)
        return shards, self._all_counted

    def _absolute_urls(self, stores: Stores) -> list[str]:
        urls = [self.urls] if isinstance(self.urls, str | os.PathLike) else self.urls
        return [stores.name(os.fspath(url)) for url in urls]

    def take_counts(self, other: RemoteIterableDataset) -> None:
        """Take what another dataset of the same arguments knows of the samples of its shards."""
        self._listed, self._all_counted = other._listed, other._all_counted

    def counted_shards(self, counted: Sequence[Counted]) -> Shards:
        """Return how the streams of one epoch are read in the running loop, which must have been entered."""
        stores, ahead = self._stores.here().stores, max(_LEAST_AHEAD, self.read_ahead // LANES)
        assert self._listed is not None
        open_range = partial(self._open_from, stores, Pins(), ahead, shared=SharedRows())
        return Shards(self._listed, counted, open_range, SampleOffsets(stores))

    def _open(
        self, pins: Pins, shard: Shard, shard_range: AnyRange, on_bad: OnBad
    ) -> AsyncGenerator[Sequence[Located], None]:
        return self._open_from(self._stores.here().stores, pins, self.read_ahead, shard, shard_range, on_bad)

    def _open_from(
        self,
        stores: Stores,
        pins: Pins,
        read_ahead: int,
        shard: Shard,
        shard_range: AnyRange,
        on_bad: OnBad,
        shared: SharedRows | None = None,
    ) -> AsyncGenerator[Sequence[Located], None]:
        return read_shard_range(
            stores,
            shard,
            shard_range,
            max_sample_bytes=self.max_sample_bytes,
            on_bad=on_bad,
            reader=self._reader,
            read_ahead=read_ahead,
            columns=self.columns,
            pins=pins,
            shared=shared,
        )

    def _sample_counts(
        self, shards: Sequence[Shard], shard_ranges: Sequence[CatalogRange]
    ) -> npt.NDArray[np.int64] | None:
        """Return the number of samples in each range of the latest plan; None if a number is unknown."""
        if self._counts is None and all(shard.samples is not None for shard in shards):
            numbers = (sample_numbers(shards[each.shard], each) for each in shard_ranges)
            self._counts = np.fromiter((stop - first for first, stop in numbers), np.int64, len(shard_ranges))
        return self._counts

    # ------------------------------------------------------------------------------------- facts about shards

    async def list_together(self, agreement: Agreement) -> None:
        """Take rank 0's list of the shards, unless this rank has one. Each rank calls this before its first plan.

        Raises:
            RanksDisagree: rank 0 could not list them, or another rank left.
            The errors of `find_shards`, on rank 0.
        """
        async with aclosing(self._own_stores()) as stores:
            find = partial(self._find, stores) if asks_a_store(self.urls, stores) else None
            about = self.urls, self.format, sorted(stores.options.items())
            found = await list_together(find, about, agreement)
        self._listed = self._listed or found

    async def _find(self, stores: Stores) -> Sequence[Shard]:
        if self._listed is None:
            form = CUSTOM if self._reader else cast("ShardFormat | str | None", self.format)
            found = await find_shards(self.urls, stores, form)
            self._listed = await with_recorded_sizes(found, stores)
        return self._counted_shards or self._listed

    async def _with_known_sizes(self, parts: int, ranks: int) -> Sequence[Shard]:
        """Return the shards with the sizes, numbers of samples and cut points that a plan of `parts` ranges for `ranks`
        ranks is based on.

        The result depends on the shards and on the arguments alone, not on earlier calls: other ranks plan the same
        epoch, and a later process that resumes must make the same plan.
        """
        if self.planned_shards is not None and self._parts == (parts, ranks):
            return self.planned_shards
        async with aclosing(self._own_stores()) as stores:
            found = await self._find(stores)
            assert self._listed is not None
            few, shards = len(found) <= MAX_SIZE_REQUESTS, self._listed
            if few and ranks > 1:
                shards = found = await with_counts(found, stores, leave=RAISED_WHEN_READ)
            if len(found) < parts and any(map(can_cut, found)):
                shards = await with_edges(found, stores, parts, leave=RAISED_WHEN_READ)
            elif few:
                sized = await with_sizes(found, stores, leave=(*RAISED_WHEN_READ, InvalidPath, SizeUnknown))
                # Only the sizes: counts from an earlier `len()` must not change the plan.
                shards = [shard._replace(size=of.size) for shard, of in zip(shards, sized, strict=True)]
            self.planned_shards, self._parts, self._counts = shards, (parts, ranks), None
            return shards

    async def _count_samples(self) -> Sequence[Shard]:
        async with aclosing(self._own_stores()) as stores:
            self._counted_shards = await with_counts(await self._find(stores), stores, leave=RAISED_WHEN_READ)
            return self._counted_shards

    @property
    def _reader(self) -> MakeReader | None:
        # A function that makes the reader of a user's own format.
        return self.format if callable(self.format) and not isinstance(self.format, ShardFormat) else None

    def _own_stores(self) -> Stores:
        return self._stores.template.for_another_loop()
