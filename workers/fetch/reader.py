"""Reads one copy of a dataset: begins epochs, fetches batches, and reports the dataset's position.

Data path: scheduler -> worker: [reader: fetch -> collate] -> codec -> ring. Without workers it runs in the consumer's
process.

In torch mode batches are made as torch makes them (`map_fetcher.py`, `stream_fetcher.py`). In seeded mode each sample
is made under its own random numbers (`seeding.py`). The state of a stateful dataset is taken after each batch, and
restored when an epoch begins in the middle (`dataset_state.py`). Samples that raise fail their batch, or are handled by
an error policy (`sample_errors.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from time import perf_counter
from typing import Any

from torch.utils.data._utils import collate as torch_collate

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.errors import StateError, interrupts, is_about_sample, is_tried_again
from asyncloader.telemetry.counters import Recorder, Stage, TimedCollate
from asyncloader.telemetry.slow_samples import SlowSamples
from asyncloader.workers.fetch.assignment_client import AssignmentProvider
from asyncloader.workers.fetch.context import DatasetContext
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.dataset_kinds import assigns_shards, is_concurrent
from asyncloader.workers.fetch.dataset_state import Bookmark, CursorPacker, pickle_cursor
from asyncloader.workers.fetch.map_async import AsyncMapFetcher
from asyncloader.workers.fetch.map_fetcher import MapFetcher, ThreadMapFetcher
from asyncloader.workers.fetch.reader_end import ReaderEnd
from asyncloader.workers.fetch.sample import Decoder, SampleMaker
from asyncloader.workers.fetch.sample_errors import NoSamples, SampleErrorHandler
from asyncloader.workers.fetch.seeding import EpochSeeding, GlobalDrawCheck, SampleSeeder, global_generators_kept
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup, stream_in_words
from asyncloader.workers.fetch.stream_fetcher import StreamFetcher, WorkerStreamFetcher
from asyncloader.workers.fetch.threads import JobThreads


class DatasetReader(ReaderEnd):
    """Reads one copy of a dataset, batch by batch.

    Args:
        setup: the loader's options.
        dataset: the copy: the dataset of `setup`, perhaps reseeded.
        collate: from samples to a batch: the function of `setup`, or a function that also encodes.
        worker_id: number of this copy among those of this rank's loader; 0 without workers.
        in_worker: whether this is a worker.
        alone: whether no code but the worker's runs in its process, whose global generators may then be seeded.
        assignments: provides the shard ranges to read, where the main process assigns them.
        time: records how long fetching, decoding and collating took, per batch. In a worker the first fetch counts as
            its ``first_read``. Where several batches are fetched at a time, fetching includes decoding, and the time of
            decoding is that of all samples that were decoded since the batch before.
        samples: gets the times of single samples. None: they are not kept.
        draw_check: that of all readers of the process whose samples are made at the same time; None: this one's own.
        pack_cursor: packs the cursors.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        dataset: Any,
        collate: Callable[[Any], Any],
        *,
        worker_id: int = 0,
        in_worker: bool,
        assignments: AssignmentProvider | None = None,
        time: Callable[[Stage, float], None] | None = None,
        samples: SlowSamples | None = None,
        draw_check: GlobalDrawCheck | None = None,
        pack_cursor: CursorPacker = pickle_cursor,
        alone: bool = True,
    ) -> None:
        self._setup, self._alone = setup, alone
        self.dataset = dataset
        self._time = time = Recorder().time if time is None else time
        self._slow = SlowSamples() if samples is None else samples
        self._collate = TimedCollate(collate, time)
        self._stage: Stage = "first_read" if in_worker else "fetch"  # of the next fetch
        self._worker_id, self._in_worker = worker_id, in_worker
        self._assignments = assignments
        self.asynchronous = is_concurrent(dataset, setup.fetch_threads)
        self._threads = JobThreads(setup.fetch_threads, "asyncloader-read") if setup.fetch_threads else None
        self._decoder: Decoder | None = None
        if setup.decode is not None:
            apart = self.asynchronous and setup.decode_threads > 0
            threads = JobThreads(setup.decode_threads, "asyncloader-decode") if apart else None
            self._decoder = Decoder(setup.decode, threads)
        # A map dataset's batches cannot be read again without their indices, so its state is needed after every batch.
        self._every = setup.snapshot_every if setup.iterable else min(1, setup.snapshot_every)
        self._pack_cursor = pack_cursor
        self._bookmark = Bookmark(dataset, self._every, pack_cursor)
        self._fetcher: Any = None
        self._start: EpochStart | None = None
        self._watch: GlobalDrawCheck | None = None
        # Not where the consumer's own code draws from the global generators at the same time.
        if in_worker and alone and self.asynchronous and (setup.seeded is not None or draw_check is not None):
            self._watch = draw_check or GlobalDrawCheck()
        self._lock = asyncio.Lock()
        self._ready = False  # the dataset has begun
        self._first = 0  # batches that were answered before
        self._failure: StateError | None = None
        self._known_errors = 0  # errors that come first, and were delivered before
        self._stream_index = None if setup.batch_size is None else range(setup.batch_size)

    def _record(self, began: float) -> None:
        """Record that samples were fetched, and perhaps collated, since `began`."""
        # Collation is timed by itself, and runs within the fetch.
        seconds = perf_counter() - began - self._collate.seconds
        self._collate.seconds = 0.0
        if self._decoder is not None:
            decoded_s = self._decoder.take_seconds()
            self._time("decode", decoded_s)
            if not self.asynchronous:
                seconds -= decoded_s
        self._time(self._stage, seconds)
        self._stage = "fetch"

    # ------------------------------------------------------------------------------------------- beginning

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch, or resume one. An asynchronous dataset begins with the first `fetch_async`.

        Raises:
            StateError: the stream ended before the position to resume from.
        """
        self._start = start
        self._failure = None
        if self.asynchronous:
            self._ready = False
            self._accept_draws()
            return
        self._begin_blocking(start)

    def _begin_blocking(self, start: EpochStart) -> None:
        self._ready = False
        with self._generators():
            self._open(start)
            # `_skipping` asks the same, but to enter it takes time.
            with self._skipping(start) if start.skip else contextlib.nullcontext(range(0)) as batches:
                for _ in batches:
                    try:
                        self._fetcher.fetch(self._stream_index)
                    except EndOfData:
                        raise
                    except Exception as error:  # the batch's answer, unless it is a store's failure
                        if is_tried_again(error):
                            raise
                    # Counted without a cursor: the batch was delivered before.
                    self._bookmark.batches += 1
        self._first, self._ready = self._bookmark.batches, True

    def context(self) -> DatasetContext:
        """Return the context to hold open while reading; an empty one for a blocking dataset."""
        after = self if self.asynchronous and assigns_shards(self.dataset) else None
        return DatasetContext(self.dataset if self.asynchronous else None, after)

    @property
    def begun(self) -> bool:
        """Whether the dataset has begun the epoch: an asynchronous dataset does that with its first fetch."""
        return self._ready or not self.asynchronous

    async def open(self) -> None:
        """Begin the epoch of an asynchronous dataset now, and not with the first fetch. In a task of its own."""
        async with self._lock:
            await self._ensure_begun()

    async def _begin_async(self, start: EpochStart) -> None:
        # The stream of the epoch before may still be reading ahead.
        await self._close_worker_stream()
        if self._assignments is not None:
            await self._assignments.prepare()
        self._open(start)
        self._known_errors = start.errors
        assigned = isinstance(self._fetcher, WorkerStreamFetcher)
        with self._skipping(start) as batches:
            if assigned and batches:
                await self._fetcher.dataset_iter.refill()
            for _ in batches:
                # An error of an assigned shard was no batch, so the batch after it is still to be read.
                while not await self._read_again(errors_count=not assigned):
                    pass
                self._bookmark.batches += 1
        self._first = self._bookmark.batches

    async def _read_again(self, *, errors_count: bool) -> bool:
        """Read an answered batch, or an answered error, again. Returns whether it counts as a batch."""
        try:
            await self._fetcher.fetch_async(self._stream_index)
        except EndOfData:
            raise
        except NoSamples:
            return True
        except Exception as error:
            # The next fetch reads it once more, from its beginning.
            if is_tried_again(error) or not (errors_count or is_about_sample(error)):
                raise
            return errors_count
        return True

    def _open(self, start: EpochStart) -> None:
        setup, cursor = self._setup, start.cursor
        self._bookmark = Bookmark(self.dataset, self._every, self._pack_cursor)
        seeding = self._seeding(start.epoch)
        # It was called on the consumer's copy only.
        if start.epoch_set and callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(start.epoch)
        if start.message:
            self.dataset.begin_epoch(start.message)
        if seeding is not None and setup.iterable:
            seeding.samples.batch(-1)  # for random numbers that `__iter__` draws
        self._bookmark.begin(cursor)
        handler = None
        if setup.policy is not None:
            # In threads the user's `on_error` is called, and not awaited.
            awaited = self.asynchronous and self._threads is None
            handler = SampleErrorHandler(setup.policy, self._worker_id, start.epoch, asynchronous=awaited)
        if setup.iterable:
            self._fetcher = self._stream_fetcher(start, seeding, handler)
        else:
            self._fetcher = self._map_fetcher(seeding, handler)
        self._accept_draws()

    def _accept_draws(self) -> None:
        """Draws in `worker_init_fn` and `__aiter__` are allowed."""
        if self._watch is not None:
            self._watch.rebase()

    def _seeding(self, epoch: int) -> EpochSeeding | None:
        seeded = self._setup.seeded
        if seeded is None:
            return None
        stream = (seeded.first_stream + self._worker_id,) if self._setup.iterable else ()
        samples = SampleSeeder(seeded.seed, epoch, *stream, concurrent=self.asynchronous or not self._alone)
        collation = samples
        if self.asynchronous and self._alone:
            # Of concurrent samples only their contexts are seeded. Collation runs alone, so the global generators are
            # seeded for it.
            collation = SampleSeeder(seeded.seed, epoch, *stream)
        return EpochSeeding(
            samples,
            collation if seeded.seed_collate else None,
            seeded.replicas,
            self._watch,
            keeps_generators=self.asynchronous and not self._in_worker,
        )

    def _map_fetcher(self, seeding: EpochSeeding | None, handler: SampleErrorHandler | None) -> MapFetcher:
        setup, awaited = self._setup, self.asynchronous and self._threads is None
        maker = SampleMaker(self.dataset, seeding, self._decoder, handler, slow=self._slow, asynchronous=awaited)
        if self._threads is not None:
            return ThreadMapFetcher(maker, setup.auto_collation, self._collate, self._threads)
        if not awaited:
            return MapFetcher(maker, setup.auto_collation, self._collate)
        by_column = setup.collate_fn is torch_collate.default_collate
        return AsyncMapFetcher(maker, setup.auto_collation, self._collate, setup.concurrency, by_column=by_column)

    def _stream_fetcher(
        self, start: EpochStart, seeding: EpochSeeding | None, handler: SampleErrorHandler | None
    ) -> StreamFetcher:
        """Make the fetcher of a stream, at the epoch's beginning or where the state says. Calls the dataset's
        `__iter__` or `__aiter__`, and restores the iterator.
        """
        setup, cursor = self._setup, start.cursor
        read = 0
        if cursor is not None:  # in torch mode samples are not counted: computed from full batches
            read = cursor.samples or (0 if seeding is not None else cursor.batches * (setup.batch_size or 1))
        stream: Any
        kind: Callable[..., StreamFetcher] = StreamFetcher
        if assigns_shards(self.dataset):
            assert self._assignments is not None
            stream = self.dataset.open_worker_stream(self._assignments.source(start))
            kind = partial(WorkerStreamFetcher, by_column=setup.collate_fn is torch_collate.default_collate)
        else:
            stream = aiter(self.dataset) if self.asynchronous else iter(self.dataset)
        stream = self._bookmark.restore_iterator(stream, cursor)
        maker = SampleMaker(
            None,
            seeding,
            self._decoder,
            handler,
            slow=self._slow,
            stream=stream_in_words(setup, self._worker_id, in_worker=self._in_worker),
            asynchronous=self.asynchronous,
        )
        fetcher = kind(stream, maker, setup.auto_collation, self._collate, setup.drop_last, read)
        if not self._in_worker:
            fetcher.interrupts, fetcher.keeps = interrupts, not self.asynchronous
        fetcher.ended = cursor is not None and cursor.ended
        return fetcher

    @contextlib.contextmanager
    def _skipping(self, start: EpochStart) -> Generator[range]:
        """Context with a range over the batches to skip: they are fetched, but not collated."""
        if not start.skip or not self._setup.iterable:
            yield range(0)
            return
        fetcher = self._fetcher
        collate, keeps = fetcher.collate_fn, fetcher.keeps
        fetcher.collate_fn, fetcher.keeps = _no_collate, False
        try:
            yield range(start.skip)
        except EndOfData:
            begun = 0 if start.cursor is None else start.cursor.batches
            raise StateError(
                f"the dataset's stream ended after {self._bookmark.batches} batches, but {begun + start.skip} had been "
                "delivered of it when the state was saved: it is not the same stream"
            ) from None
        finally:
            fetcher.collate_fn, fetcher.keeps = collate, keeps

    # --------------------------------------------------------------------------------------------- fetching

    def fetch(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the batch of an index; for a stream: the next batch, whatever the index.

        Args:
            index: from the sampler; in seeded mode ``(position, index)``.
            records: gets those of this batch's samples that raised, however the call ends; only with a policy.

        Raises:
            EndOfData: the stream has ended. Never with records.
            NoSamples: all samples of the batch were dropped. Take the cursor as after a batch.
        """
        if self._setup.iterable:
            index = self._stream_index
        if not self._ready:
            assert self._start is not None
            self._begin_blocking(self._start)
        began = perf_counter()
        try:
            # Tested here, and not by an empty context: entering a context for every batch takes longer.
            if self._setup.seeded is None:
                batch = self._fetcher.fetch(index, records)
            else:
                with self._generators():
                    batch = self._fetcher.fetch(index, records)
        except BaseException:
            self._begin_anew()
            raise
        self._record(began)
        return batch

    async def fetch_async(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the batch of an index, from an asynchronous dataset. See `fetch`. In a task of its own."""
        if not self._setup.iterable:
            if not self._ready:
                await self.open()  # the lock is for this alone: batches of a map dataset are fetched at the same time
            return await self._timed(self._fetcher.fetch_async(index, records))
        # Held over both steps: a task that arrives after the beginning must not overtake tasks that waited for it.
        async with self._lock:
            try:
                await self._ensure_begun()
                return await self._next_of_stream(records)
            except Exception:
                self._begin_anew()
                raise

    async def _next_of_stream(self, records: list[SkippedSample] | None) -> Any:
        while True:
            known = 0 if records is None else len(records)
            try:
                batch = await self._timed(self._fetcher.fetch_async(self._stream_index, records))
            except (EndOfData, NoSamples):
                self._known_errors = 0
                raise
            except Exception as error:
                # A predecessor's answer was this error; not if it did not come again, for then this is a batch.
                if not self._known_errors or not is_about_sample(error):
                    raise
                self._known_errors -= 1
                if records is not None:
                    # The predecessor has sent these records.
                    del records[known:]
                continue
            self._known_errors = 0
            if self._watch is not None and self._setup.seeded is None:
                self._watch.check()
            return batch

    def _begin_anew(self) -> None:
        """A generator that was over before its first batch came begins anew."""
        if not self._setup.iterable or self._fetcher is None or not self._fetcher.broken:
            return
        if self._bookmark.batches == self._first and not assigns_shards(self.dataset):
            self._ready = False

    async def _timed(self, fetching: Awaitable[Any]) -> Any:
        began = perf_counter()
        result = await fetching
        self._record(began)
        return result

    async def samples(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return what `collated` makes the batch of, for callers that collate later. Asynchronous map datasets only. In
        a task of its own.
        """
        if not self._ready:
            await self.open()
        return await self._timed(self._fetcher.samples(index, records))

    def collated(self, index: Any, samples: Any) -> Any:
        """Collate what `samples` returned for this index. In a task of its own."""
        return self._fetcher.collated(index, samples)

    async def _ensure_begun(self) -> None:
        if self._failure is not None:
            raise self._failure
        # Another task may have begun while this one waited for the lock.
        if self._ready:
            return
        assert self._start is not None
        try:
            await self._begin_async(self._start)
        except StateError as error:
            # Kept, because the stream would end too early again. After another error the next fetch begins again.
            self._failure = error
            raise
        self._ready = True

    @property
    def can_resume(self) -> bool:
        """Whether another reader can continue from here without reading a stream again from its beginning."""
        return not self._setup.iterable or self._bookmark.keeps_state

    def first_cursors(self) -> list[PackedCursor | None]:
        """Return the cursor at the beginning of an epoch, of the only copy; None if the dataset has no state."""
        return [self._bookmark.initial()]

    def last_cursor(self) -> PackedCursor | None:
        """Return the cursor at the end of the dataset; None if it has no state."""
        return self._bookmark.final()

    def live_cursor(self) -> PackedCursor | None:
        """Return the cursor of this moment, in the fetching thread; None if the dataset has no state."""
        return self._bookmark.now(self._samples(), ended=self._ended())

    def cursor(self) -> PackedCursor | None:
        """Return the cursor after a fetched batch; None if no cursor is to be saved. Call it exactly once per batch,
        before anything else is awaited.
        """
        # Most datasets have no state, and need neither the clock nor a cursor.
        if not self._bookmark.keeps_state:
            self._bookmark.batches += 1
            return None
        began = perf_counter()
        cursor = self._bookmark.after_batch(self._samples(), ended=self._ended())
        if cursor is not None:
            self._time("snapshot", perf_counter() - began)
        return cursor

    def failed(self) -> None:
        """Count a batch that raised, of a stream: it is an answer like others, so it is read past when resuming.

        Not of assigned shards, which know their position themselves: a transport's error takes no sample from them.
        """
        if self._setup.iterable and not isinstance(self._fetcher, WorkerStreamFetcher):
            self._bookmark.batches += 1

    def _samples(self) -> int:
        """Samples read from the stream; in torch mode they are counted in assigned shards only."""
        if isinstance(self._fetcher, WorkerStreamFetcher):
            return self._fetcher.samples
        return self._fetcher.samples if self._setup.iterable and self._setup.seeded is not None else 0

    def _ended(self) -> bool:
        return bool(getattr(self._fetcher, "ended", False))

    def _generators(self) -> contextlib.AbstractContextManager[None]:
        # Without workers the global generators are the user's.
        if self._in_worker or self._setup.seeded is None:
            return contextlib.nullcontext()
        return global_generators_kept()


def _no_collate(samples: Any) -> None:
    """Replaces collation where batches are skipped."""
