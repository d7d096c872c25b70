"""Reads the dataset of an epoch without workers: its streams in turn, as if by workers; samples ahead of the consumer.

Data path: sampler -> inline: [inline_reader -> reader: fetch -> collate] -> the user.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.base.shielding import retrieve_error
from asyncloader.epoch.plan import InlineAssignments, worker_setup
from asyncloader.epoch.stream_scheduler import StreamTurns
from asyncloader.epoch.torch_iterator import shared_seed
from asyncloader.errors import interrupts, is_tried_again
from asyncloader.state.progress import Progress
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.slow_samples import SlowSamples
from asyncloader.workers.fetch.context import DatasetContext
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.seeding import RngState, rng_state, set_rng_state
from asyncloader.workers.fetch.setup import WorkerSetup, call_worker_init, seed_cpu_generators
from asyncloader.workers.fetch.worker_info import answering_with
from asyncloader.workers.ipc.inline_collate import inline_collate
from asyncloader.workers.ipc.ring_manager import CREDIT_BYTES
from asyncloader.workers.stream_readers import StreamReaders, copies, infos_of


def make_reader(
    torch_iter: _BaseDataLoaderIter, progress: Progress, recorder: Recorder
) -> DatasetReader | StreamReaders:
    """Make the dataset's reader for this process, at the iterator's position."""
    config, dataset = progress.config, torch_iter._dataset
    collate = config.collate_fn
    if collate is default_collate:
        collate = inline_collate()
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        # As in torch's own iterator without workers.
        apply_sharding(dataset, torch_iter._world_size, torch_iter._rank)
    drawn = shared_seed(torch_iter)
    base_seed, (start,) = progress.starts(1, int(torch_iter._base_seed), drawn)
    # torch's base has seeded the datapipe with `drawn`; an epoch that resumes has the seed of its first run.
    if isinstance(dataset, IterDataPipe) and start.shared_seed not in (None, drawn):
        generator = torch.Generator()
        generator.manual_seed(start.shared_seed or 0)
        dataset = apply_random_seed(dataset, generator)
    setup = worker_setup(config, torch_iter, base_seed, [start])
    if start.streams:
        return _read_streams(setup, dataset, collate, progress, recorder)
    assignments = InlineAssignments(progress, start) if config.assigns_shards else None
    reader = DatasetReader(
        *(setup, dataset, collate),
        in_worker=False,
        assignments=assignments,
        time=recorder.time,
        samples=SlowSamples(recorder.slow),
    )
    reader.begin(start)
    progress.begun(0, *reader.first_cursors())
    return reader


def _read_streams(
    setup: WorkerSetup, dataset: Any, collate: Callable[[Any], Any], progress: Progress, recorder: Recorder
) -> StreamReaders:
    """Make the reader of a dataset that says that it has streams."""
    slow = SlowSamples(recorder.slow)

    def make(copy: Any, stream: int) -> DatasetReader:
        return DatasetReader(
            *(setup, copy, collate),
            worker_id=stream,
            in_worker=False,
            time=recorder.time,
            samples=slow,
        )

    reader = StreamsInTurn(dataset, setup, make, progress.next_worker, progress.ends)
    for stream, cursor in enumerate(reader.first_cursors()):
        progress.begun(stream, cursor)
    return reader


class StreamsInTurn(StreamReaders):
    """Reads all streams of a dataset, each time that whose turn it is.

    Args:
        dataset: the dataset, which stays as it is: each stream has a copy.
        setup: the loader's options, with a single start that has those of all streams.
        make: makes the reader of a stream, from its copy and its number.
        first: the stream whose turn it is first.
        ends: gets the final cursor of each stream that ends.
    """

    def __init__(
        self,
        dataset: Any,
        setup: WorkerSetup,
        make: Callable[[Any, int], DatasetReader],
        first: int,
        ends: dict[int, PackedCursor | None],
    ) -> None:
        (start,) = setup.starts
        datasets = copies(dataset, range(len(start.streams)), first_is_own=False)
        readers = {stream: make(each, stream) for stream, each in datasets.items()}
        super().__init__(dataset, readers, _InlineIdentities(setup, datasets))
        self._turns = StreamTurns(len(readers), first)
        self._ends = ends
        if setup.worker_init_fn is not None:
            self.initialize(partial(_init, setup.worker_init_fn))
        self.begin(start)

    def fetch(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the next batch of the stream whose turn it is, whatever the index.

        Raises:
            EndOfData: all streams have ended.
        """
        del index
        while (stream := self._turns.turn) is not None:
            try:
                return super().fetch(stream, records)
            except EndOfData:
                self._end(stream)
        raise EndOfData

    def taken(self) -> None:
        """`DatasetReader.taken`, after which the next stream has its turn."""
        super().taken()
        self._turns.passed(self.copy)

    def _end(self, stream: int) -> None:
        self._ends[stream] = self.last_cursor()
        self._turns.end(stream)


def _init(init: Callable[[int], Any] | None, stream: int) -> Any:
    try:
        return call_worker_init(init, stream)
    except StopIteration as stop:  # a `for` loop would take it for the end of an empty epoch
        raise not_the_end(stop, "worker_init_fn") from stop


class _InlineIdentities:
    """Makes the training process that of a stream, for the time of a call: see `StreamIdentities`. Its generators, and
    what `get_worker_info` returns in other threads, stay the user's.
    """

    def __init__(self, setup: WorkerSetup, datasets: Mapping[int, Any]) -> None:
        self._base_seed = setup.base_seed
        self._infos = infos_of(setup, datasets)
        self._keeps = setup.seeded is None
        self._states: dict[int, RngState | None] = {}

    def __call__(self, stream: int) -> AbstractContextManager[Any]:
        # In seeded mode the reader keeps the user's generators itself, and seeds them for each sample.
        if not self._keeps and stream in self._states:
            return answering_with(self._infos[stream])
        return self._exchanged(stream)

    @contextmanager
    def _exchanged(self, stream: int) -> Generator[None]:
        outside = rng_state()
        try:
            state = self._states.get(stream)
            if state is None:
                seed_cpu_generators(self._base_seed, stream)
            else:
                set_rng_state(state)
            with answering_with(self._infos[stream]):
                yield
        finally:
            self._states[stream] = rng_state() if self._keeps else None
            set_rng_state(outside)


_UNKNOWN: Any = object()


class _Entry:
    """One batch. `index` is set before `samples` is done."""

    __slots__ = ("index", "records", "samples")

    def __init__(self) -> None:
        self.index: Any = _UNKNOWN
        self.records: list[SkippedSample] = []
        self.samples: asyncio.Future[Any] | None = None


class BatchPrefetcher:
    """Fetches samples of the next batches ahead of the consumer, of map datasets that are async or fetched by threads.

    Only samples are fetched ahead. The sampler is advanced and batches are collated while the consumer waits for a
    batch, so draws from the global generators happen in the same order as without prefetching. An error is raised when
    its batch is due. If a store failed, the batch stays, and is fetched again at the next call, with all others at
    which it failed.

    Belongs to one loop's thread. The consumer's thread may only call `pull_ahead`, while the loop waits.

    Args:
        reader: reads the dataset, which must be a map dataset; must be `asynchronous`.
        context: the dataset's context, entered before the first sample.
        credits: batches in flight while they are small; at least 1.
    """

    def __init__(self, reader: DatasetReader, context: DatasetContext, credits: int) -> None:
        self._reader = reader
        self._context = context
        self.credits = credits
        self._entries: deque[_Entry] = deque()
        self._pulled: deque[tuple[Any, Exception | None]] = deque()  # indices that are not started; or an error instead
        self._given = 0  # of these, so far
        self._index_lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many more batches may be started."""
        return self.credits - len(self._entries)

    def pull_ahead(self, pull: Callable[[int], Any]) -> None:
        """Take as many indices from a plain sampler as there is room for. `pull` gives the index of a number, and the
        same again until the next number. In the consumer's thread.
        """
        failed = False
        while not failed and len(self._pulled) < self.room:
            number, error = self._given, None
            try:
                index = pull(number)
            except EndOfData:
                break
            except Exception as raised:  # raised after the batches that were started before
                index, error, failed = None, raised, True
            # No calls from here on: after Ctrl-C each index must be either kept, or taken again.
            self._pulled += ((index, error),)
            self._given, error = number + 1, None

    def start(self, next_index: Callable[[], Awaitable[Any]] | None) -> None:
        """Start the batches of the indices that were pulled; or, with `next_index`, of those that it gives, in the
        order of its calls. In the loop's thread.
        """
        while self._pulled:
            entry = _Entry()
            entry.index, error = self._pulled.popleft()
            self._entries.append(entry)
            if error is None:
                self._begin(entry, self._fetch(entry))
                continue
            entry.index, entry.samples = _UNKNOWN, asyncio.get_running_loop().create_future()
            entry.samples.set_exception(error)
            entry.samples.exception()  # marks it as retrieved, in case the consumer stops before it
        while next_index is not None and self.room > 0:
            entry = _Entry()
            self._entries.append(entry)
            self._begin(entry, self._fetch_next(entry, next_index))

    def _begin(self, entry: _Entry, coroutine: Any) -> None:
        self._loop = asyncio.get_running_loop()
        entry.samples = self._loop.create_task(coroutine)
        entry.samples.add_done_callback(retrieve_error)

    def _keep(self, entry: _Entry) -> None:
        """Put back a batch that is tried again."""
        self._entries.appendleft(entry)
        for each in self._entries:
            if each is entry or (each.index is not _UNKNOWN and _interrupted(each.samples)):
                each.samples, each.records = None, []

    async def _fetch(self, entry: _Entry) -> Any:
        await self._context.open()
        return await self._reader.samples(entry.index, entry.records)

    async def _fetch_next(self, entry: _Entry, next_index: Callable[[], Awaitable[Any]]) -> Any:
        if self._index_lock is None:
            self._index_lock = asyncio.Lock()
        async with self._index_lock:  # a fair lock: waiters get it in order
            entry.index = await next_index()
        return await self._fetch(entry)

    async def take(self, records: list[SkippedSample]) -> tuple[Any, Any]:
        """The next batch, with its index. Adds to `records` those of its bad samples, also if this raises.

        Raises:
            EndOfData: nothing was started.
            Exception: the batch's.
        """
        if not self._entries:
            raise EndOfData
        for each in self._entries if self._entries[0].samples is None else ():
            if each.samples is None:
                self._begin(each, self._fetch(each))
        # Taken out first: `cancel` leaves this batch to who calls it, and cancels the task that waits here.
        entry = self._entries.popleft()
        assert entry.samples is not None
        try:
            samples = await entry.samples
            try:
                # Only now, while the consumer waits: draws from the global generators keep their order.
                return entry.index, self._reader.collated(entry.index, samples)
            except StopIteration as stop:  # a coroutine cannot raise it
                raise not_the_end(stop, "collate_fn") from stop
        except BaseException as error:
            if entry.index is not _UNKNOWN and interrupts(error):
                self._keep(entry)
            raise
        finally:
            records += entry.records
            # An error's traceback refers to this frame, and so to the entry, which must not refer back to the error.
            entry.samples = None

    def note_batch_size(self, nbytes: int) -> None:
        """Lower `credits` so that batches of this size fit into `CREDIT_BYTES` together; at least one stays."""
        if nbytes:
            self.credits = min(self.credits, max(1, CREDIT_BYTES // nbytes))

    def cancel(self) -> None:
        """Cancel all batches in flight, but for the batch that `take` waits for. In the loop's thread."""
        for entry in self._entries:
            if entry.samples is not None:
                entry.samples.cancel()

    def cancel_soon(self) -> None:
        """`cancel`, and leave the dataset's context. Any thread; does not wait."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self.cancel)
        self._context.close_soon()
        self._reader.close()

    async def aclose(self) -> BaseException | None:
        """`cancel`, wait until the batches have ended, and leave the dataset's context. No `take` may be in progress.

        Returns:
            The error that leaving the context raised, if any.
        """
        self.cancel()
        pending = [entry.samples for entry in self._entries if entry.samples is not None]
        self._entries.clear()
        if pending:
            # Their code may use the dataset's context, which exits below.
            await asyncio.wait(pending)
        await self._reader.aclose_resources()
        self._reader.close()
        return await self._context.close()


def _interrupted(samples: asyncio.Future[Any] | None) -> bool:
    """Whether a store has failed at these samples."""
    if samples is None or not samples.done() or samples.cancelled():
        return False
    error = samples.exception()
    return error is not None and is_tried_again(error)
