"""Keeps account of one epoch that is read without workers: what follows a batch, an error, and the end.

Data path: sampler -> [inline: fetch -> collate] -> sync_inline or async_inline -> the user.

Both inline iterators have an `InlineEpoch`. It advances the sampler, holds the dataset's reader, and records the
deliveries. The iterators decide where the dataset's code runs, and whether it is awaited. An epoch in
which nothing has to wait is read by `step` alone: in a `for` loop, and in an ``async for`` loop over a dataset that is
fast enough to be read on the event loop (`thread_or_loop.py`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter, process_time, thread_time
from typing import Any, Literal, TypeAlias, TypeVar, cast

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.base.topology import without_batch
from asyncloader.delivery.loader_device import transfer_of
from asyncloader.delivery.stage import torch_pin
from asyncloader.epoch.consumer import NO_BATCH
from asyncloader.epoch.inline_reader import BatchPrefetcher, make_reader
from asyncloader.epoch.quarantine import SkippedSampleLog
from asyncloader.epoch.run_reading import tell_verdict
from asyncloader.epoch.sampler_reading import pull_timed
from asyncloader.epoch.torch_iterator import TorchIterator
from asyncloader.errors import TooManySkippedSamples, interrupts
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.index_stream import time_pull
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.state.progress import PendingBatch, Progress
from asyncloader.telemetry.profiler_ranges import in_range, recorded
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.data_end import EndOfData, over_after
from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import NoSamples, dropped_count
from asyncloader.workers.ipc.leaves import batch_nbytes
from asyncloader.workers.processor_use import thread_delay

T = TypeVar("T")
_Call: TypeAlias = Callable[[Any, list[SkippedSample]], Awaitable[Any]]

_END, _TAKEN = object(), object()  # no index is left; the first index was taken
_BEGUN: PendingBatch = (None, 0, None, NO_BATCH)
_LOOK_S = 0.02  # between two batches that are measured more closely


class InlineEpoch:
    """One epoch without workers, for the iterator that delivers its batches.

    Args:
        loader: the loader, to begin again if another epoch is set before the first batch.
        statistics: the loader's counters.
        keeper: the loader's positions.
        torch_iter: torch's iterator base, which has drawn this epoch's random numbers. In the sync loader it is the
            iterator itself, so only a weak reference to it is kept: it must die when it is dropped.
        progress: the iterator's position.
        alone: whether the dataset is read only while the consumer waits, so that its current state may be asked for at
            any other time.
    """

    def __init__(
        self,
        loader: LoaderSpec[Any],
        statistics: Statistics,
        keeper: StateKeeper,
        torch_iter: TorchIterator,
        progress: Progress,
        *,
        alone: bool,
    ) -> None:
        if progress.config.timeout:
            error = AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")  # torch's text
            add_note(error, f"timeout={progress.config.timeout!r} needs workers: set num_workers, or leave it at 0")
            raise error
        self._loader, self._keeper, self._alone = loader, keeper, alone
        self.statistics = statistics
        self._recorder = statistics.recorder
        self._torch_iter = weakref.ref(torch_iter)
        self._indices: AsyncIterator[Any] | None = None
        self._begin(progress, torch_iter)
        self._transfer = transfer_of(loader)
        pins = torch_iter._pin_memory and self._transfer is None
        self._pin = torch_pin(torch_iter._pin_memory_device) if pins else None
        self.copies = pins or self._transfer is not None
        """Whether batches are copied, to a device or to page-locked memory: see `copied`."""
        self._delivered = False
        self._begun = statistics.begin()
        self._run = statistics.epochs  # number of the iterator, in traces
        self._skipped = SkippedSampleLog(self._config.max_skipped_samples, statistics)
        self.over = False
        # Whether more samples raised than are allowed.
        self.closed = False
        # Whether the sync iterator was closed.
        self.fetching: set[asyncio.Task[Any]] = set()
        # What another thread waits for in the bridge's loop, which `close` cancels.
        self.cancellable = False
        # Whether what `read` waits for may be cancelled.

    def _begin(self, progress: Progress, torch_iter: TorchIterator) -> None:
        self.progress = progress
        config = self._config = progress.config
        self.statistics.tell = partial(tell_verdict, weakref.ref(config))
        self.source, self.agreement = config.source, progress.agreement
        self._tasks = 0
        self._read = False  # a batch was read, and is neither delivered nor failed
        self._cursor: PackedCursor | None = None  # after that batch
        self._agreed = self._refused = False  # the ranks have agreed on the batch that is made, or could not
        self._due: tuple[Any] | None = None  # the index of that batch, from an async sampler
        self._fresh = True
        self._broken = ""  # the kind of error with which a store has ended an async sampler
        self._first: Any = _TAKEN
        self.reader = reader = make_reader(torch_iter, progress, self._recorder)
        self._streams = None if isinstance(reader, DatasetReader) else reader
        # The same reader, where the dataset is awaited, or read by threads.
        self._awaited = reader if isinstance(reader, DatasetReader) and reader.asynchronous else None
        if self._alone and isinstance(reader, DatasetReader) and self._awaited is None:
            # Weak, because the loader keeps the position of its newest iterator, which must not keep the dataset's
            # reader.
            progress.live = weakref.WeakMethod(reader.live_cursor)
        self.on_loop = self._awaited is not None or self.source is not None
        """Whether an event loop reads the dataset: in a sync loader the private one."""
        self.opened = not self.on_loop
        """Whether nothing has to be awaited before the first sample, or `open` has done it."""
        self.context = self.reader.context()
        self.prefetcher: BatchPrefetcher | None = None  # blocking datasets and streams have none
        if self._awaited is not None and not config.iterable:
            self.prefetcher = BatchPrefetcher(self._awaited, self.context, config.credits)

    def refresh(self) -> None:
        """Before the first batch: begin once more if another epoch was set since."""
        if self._fresh:
            self.progress.asked = True
            # In seeded mode `set_epoch` may come between `iter()` and the first batch.
            if self.progress.outdated:
                progress = self._keeper.begin(self._loader, self._config)
                torch_iter = self._base()
                self.reader.close()
                torch_iter._begin_order(self._loader, progress)
                self._begin(progress, torch_iter)
            self._fresh = False

    def _base(self) -> TorchIterator:
        torch_iter = self._torch_iter()
        assert torch_iter is not None
        return torch_iter

    async def open(self) -> None:
        """Take an async sampler's first index, for which shards are planned, enter the dataset's context, and begin to
        read. An error of it is no batch's: the next call does it again.
        """
        if self.source is not None and self._indices is None:
            indices = self.source.read(self.progress)
            self._first = await anext(indices, _END)
            self._indices = indices  # only now: the generator ends with an error
        if self._awaited is not None:
            await self.context.open()
            await self._awaited.open()
        self.opened = True

    # -------------------------------------------------------------------------------------------- indices

    def next_index(self) -> Any:
        """Advance a plain sampler. `EndOfData` at its end."""
        return self._pull(self._base(), self._tasks)

    def _pull(self, torch_iter: TorchIterator, task: int) -> Any:
        try:
            if torch_iter.order is None:  # an iterable dataset's index only says how many samples
                return torch_iter.pull()[1]
            # By the task's number, so that a batch that was interrupted gets the same index again.
            return pull_timed(torch_iter, task, self.progress, self.statistics)
        except StopIteration:
            raise EndOfData from None
        except KeyboardInterrupt:
            if torch_iter.order is None:  # torch's, which has no end, is a generator
                torch_iter._sampler_iter = iter(torch_iter._index_sampler)
            raise

    async def next_index_async(self) -> Any:
        """Advance the sampler, which may be async. `EndOfData` at its end."""
        if self.source is None:
            return self.next_index()
        assert self._indices is not None  # by `open`
        began = perf_counter()
        index, self._first = self._first, _TAKEN
        try:
            if index is _TAKEN:
                index = await anext(self._indices, _END)
        except BaseException as error:
            self._broken = type(error).__name__ if interrupts(error) else ""
            self.progress.cut_short = True
            raise
        if index is _END:
            if self._broken:  # the source is a generator, and ends with any error
                raise over_after("the sampler", self._broken)
            raise EndOfData
        time_pull(self.progress.sampler_log, self._recorder, perf_counter() - began)
        return index

    async def read(self, records: list[SkippedSample], call: _Call | None = None) -> tuple[Any, Any]:
        """The next index and its batch, read on this loop, once the epoch is open. `call`: calls a blocking dataset;
        None: it is called here.
        """
        if self.prefetcher is not None:
            self.prefetcher.start(None if self.source is None else self.next_index_async)
            return await self.prefetcher.take(records)
        if self._due is None:  # else the batch of that index was interrupted
            self._due = (await self.cancellably(self.next_index_async()),)
        index = self._due[0]
        if self._awaited is not None:
            return index, await self._awaited.fetch_async(index, records)
        return index, self.reader.fetch(index, records) if call is None else await call(index, records)

    async def cancellably(self, work: Awaitable[T]) -> T:
        """Await something while no call of the dataset is in progress."""
        self.cancellable = True
        try:
            return await work
        finally:
            self.cancellable = False

    def pull_ahead(self) -> None:
        """Take a plain sampler's indices for batches that are read ahead. In the consumer's thread, before `read`."""
        if self.prefetcher is not None and self.source is None:
            self.prefetcher.pull_ahead(partial(self._pull, self._base()))

    # ----------------------------------------------------------------------------------------- per batch

    def step(self, fetch: Callable[[list[SkippedSample]], tuple[Any, Any]], begin: float) -> Any:
        """Fetch a batch in this thread, and deliver it.

        Args:
            fetch: returns the sampler's next index and its batch; adds records of bad samples to its argument.
            begin: when the consumer began to wait.

        Returns:
            The batch; `NO_BATCH` if all of its samples were dropped.

        Raises:
            EndOfData: the epoch has ended.
        """
        progress = self.progress
        if progress.pending is not None and (batch := self._continued(progress.pending)) is not NO_BATCH:
            return batch
        progress.pending = _BEGUN
        records: list[SkippedSample] = []
        statistics = self.statistics
        statistics.waiting_since = begin
        try:
            plain = begin < statistics.look_closely_at or self.on_loop  # on a loop it is measured there
            index, batch = (fetch if plain else self.measured(thread_time)(fetch))(records)
            # Before the cursor, which counts the batch: where another rank has no batch, this batch is not delivered.
            if self.agreement is not None and not self.agreed(self.agreement.batch):
                raise EndOfData
            cursor = self.cursor()
            if self.copies:
                batch = self.taken(self.copied(batch))
        except BaseException as error:
            if self.agreement is not None and not (self.closed or isinstance(error, NoSamples)):
                self.tell_ranks(error)
            if self.instead(error, records):
                return NO_BATCH
            raise
        finally:
            statistics.waiting_since = None
        return self.delivered(index, batch, cursor, records, perf_counter() - begin)

    def _continued(self, pending: PendingBatch) -> Any:
        """Return the batch that was delivered when a call was interrupted; NO_BATCH: it is to be made again."""
        task, copy, cursor, batch = pending
        if task is None:
            # Perhaps it was counted.
            self.reader.recount(self.progress.given(self.copy))
            return batch
        self.progress.delivered(task, copy, cursor)  # no effect if that was done
        self._settle(task + 1)
        return batch

    def _settle(self, tasks: int) -> None:
        """The batch counts as delivered, or has failed."""
        self._tasks, self._agreed, self._due, self._read = tasks, False, None, False
        if self._config.iterable:
            self.reader.taken()

    def agreed(self, agree: Callable[[], bool]) -> bool:
        """Have the ranks agree on the batch, once. Returns whether to deliver it."""
        if not self._agreed:
            self._refused = True  # if this raises, no rank gets the batch
            self._agreed = agree()
            self._refused = False
        return self._agreed

    @property
    def copy(self) -> int:
        """The copy of the dataset that was read last: the number of the stream, or 0."""
        return 0 if self._streams is None else self._streams.copy

    @contextmanager
    def measured(self, clock: Callable[[], float] = process_time) -> Generator[None]:
        """Record how much of the block's time samples compute, if `statistics.look_closely_at` has come. On a loop the
        consumer waits meanwhile, so what this process computes is theirs. Also a decorator, of a function that a thread
        calls, with the clock `thread_time`.
        """
        began = perf_counter()
        if began < self.statistics.look_closely_at:
            yield
            return
        self.statistics.look_closely_at = began + _LOOK_S
        delayed, computed = thread_delay(), clock()
        yield
        recorder = self._recorder
        recorder.add("sampled_s", perf_counter() - began)
        recorder.add("sampled_cpu_s", clock() - computed)
        recorder.add("delayed_s", thread_delay() - delayed)

    def copied(self, batch: Any) -> Any:
        """Begin to copy a batch to the device, or make its pinned copy. Any thread."""
        name: Literal["h2d", "pin"] = "h2d" if self._pin is None else "pin"
        began = perf_counter()
        with in_range(f"asyncloader::{name}") if recorded() else nullcontext():
            if self._transfer is None:
                batch = cast("Callable[[Any], Any]", self._pin)(batch)
            else:
                batch = self._transfer.start(batch, locked=False)
        self._recorder.time(name, perf_counter() - began)
        return batch

    def taken(self, copied: Any) -> Any:
        """The batch that `copied` gave, for the consumer. In its thread."""
        return copied if self._transfer is None else self._transfer.take(copied)

    def tell_ranks(self, error: BaseException) -> None:
        """Let the other ranks not wait for this one, also after Ctrl-C. Blocks."""
        assert self.agreement is not None
        if isinstance(error, EndOfData):
            self.agreement.end()
        else:
            (self.agreement.pause if interrupts(error) else self.agreement.fail)()

    def delivered(
        self, index: Any, batch: Any, cursor: PackedCursor | None, records: list[SkippedSample], waited: float
    ) -> Any:
        """Record that the consumer gets this batch, and return it.

        Raises:
            TooManySkippedSamples: the consumer gets this error instead.
        """
        trace = self.statistics.trace
        ready = 0.0 if trace is None else perf_counter()
        # First: if there are too many, the consumer gets that error, and the batch does not count as delivered.
        if records:
            self._record(records)
        task, copy = self._tasks, 0 if self._streams is None else self._streams.copy
        self.progress.pending = task, copy, cursor, batch
        self.progress.delivered(task, copy, cursor)
        self._tasks, self._agreed, self._due, self._read = task + 1, False, None, False  # `_settle`, without its call
        if self._config.iterable:
            self.reader.taken()
        nbytes = batch_nbytes(batch)
        if self.prefetcher is not None:
            self.prefetcher.note_batch_size(nbytes)
            self.statistics.prefetch_depth = self.prefetcher.credits
        if not self._delivered:
            self._delivered = True
            self.statistics.first_batch(self._begun)
        self.statistics.batch(_count_samples(self._config, index, records), nbytes, 0, waited, waited, 1)
        if trace is not None:
            trace.delivered(self._run, self._tasks - 1, -1, ready - waited, ready, None, -1, 0)
        return batch

    def instead(self, error: BaseException, records: list[SkippedSample]) -> bool:
        """Record what came in place of a batch. Returns whether all samples of the batch were dropped; else the caller
        raises the error again.

        Raises:
            RanksDisagree: they were, and the other ranks have a batch here.
            TooManySkippedSamples: as in `delivered`.
        """
        if isinstance(error, NoSamples):
            self._dropped(self.cursor(), records)
            return True
        if isinstance(error, EndOfData):
            self.finish()
        elif not self.closed:  # else by another thread: this batch was neither delivered, nor did it fail
            self.failed(error, records)
        return False

    def _dropped(self, cursor: PackedCursor | None, records: list[SkippedSample]) -> None:
        ranks = self._config.even_ranks
        if ranks > 1:
            error = without_batch(ranks)
            self.failed(error, records)
            raise error from None
        self.progress.delivered(self._tasks, self.copy, cursor)
        self._settle(self._tasks + 1)
        self.progress.pending = None
        self._record(records)

    def failed(self, error: BaseException, records: list[SkippedSample]) -> None:
        """Record that the consumer gets an error instead of the batch; or before it, if the error interrupts it.

        Raises:
            TooManySkippedSamples: as in `delivered`.
        """
        if not self.opened:
            return  # no batch was begun
        if interrupts(error) or self._refused:
            self.progress.pending = self.progress.pending or _BEGUN
            self.progress.interrupted = True
            return
        if not self._read:  # else the reader has counted the batch, and a later step failed
            self.reader.failed()
        self.progress.failed(self._tasks, self.copy, self._cursor if self._read else None)
        self._settle(self._tasks + 1)
        self.progress.pending = None
        self._record(records)

    def cursor(self) -> PackedCursor | None:
        """`DatasetReader.cursor`, after each batch."""
        self._cursor, self._read = self.reader.cursor(), True
        return self._cursor

    def finish(self) -> None:
        """Record that the consumer sees the end of the epoch."""
        if self._streams is None:  # else each has noted its own end
            self.progress.ends[0] = self.reader.last_cursor()
        self.progress.finish()

    def _record(self, records: list[SkippedSample]) -> None:
        try:
            self._skipped.add(records)
        except TooManySkippedSamples:
            self.over = True
            # The epoch is over for this rank, and the other ranks must not wait for its next batch.
            if self.agreement is not None:
                self.agreement.give_up()
            raise

    # ------------------------------------------------------------------------------------------- closing

    async def aclose(self) -> BaseException | None:
        """Stop reading, and close an async sampler's iterator. No batch may be awaited.

        Returns:
            The error that leaving the dataset's context raised, if any: for `warn_of_exit`.
        """
        if self.prefetcher is not None:
            error = await self.prefetcher.aclose()
        else:
            await self.reader.aclose()
            error = await self.context.close()
        indices, self._indices = self._indices, None
        if isinstance(indices, AsyncGenerator):
            await indices.aclose()
        return error


def _count_samples(config: EpochConfig, index: Any, records: Sequence[SkippedSample]) -> int:
    """Number of samples in a batch of this index (an iterable dataset's last batch may have fewer)."""
    if config.seed is not None and not config.iterable:
        index = index[1]  # seeded mode: (position, index)
    count = len(index) if config.auto_collation and hasattr(index, "__len__") else 1
    return count - dropped_count(records) if records else count
