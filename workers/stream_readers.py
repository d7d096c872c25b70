"""Reads several streams of one dataset in one process: each has a copy, and is read as if a worker had it alone.

Data path: scheduler -> worker: [stream_readers -> reader: fetch -> collate] -> codec -> ring.

A dataset that says by `loader_streams` that it is a number of streams (`dataset_streams.py`) is the same whatever the
number of workers. So each stream has all that a worker has that reads a copy of a dataset: the number that
`get_worker_info` gives, a seed, generators that the seed belongs to, a call of `worker_init_fn`, an async context, and
a cursor.

The generators of a process serve its blocking streams in turn. `StreamIdentities` exchanges their states where the
stream changes. In seeded mode each sample seeds them, and nothing is exchanged. Async streams are awaited at the same
time, so each has generators of its own, which `sample_rng` and `get_worker_info` give it (`ContextIdentities`); those
of the process belong to none.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from asyncloader.workers.fetch.context import EXIT_SECONDS, DatasetContext
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset
from asyncloader.workers.fetch.dataset_state import PackedCursor
from asyncloader.workers.fetch.decoding import make_decode_threads
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.fetch.seeding import GlobalDrawCheck, RngState, rng_state, set_rng_state
from asyncloader.workers.fetch.setup import (
    EpochStart,
    WorkerSetup,
    drop_awaitable,
    make_worker_info,
    seed_worker,
    set_worker_info,
)
from asyncloader.workers.fetch.worker_info import ContextInfo, answer_by_context, answering_with


class StreamContexts(DatasetContext):
    """The contexts of several streams, which are entered and exited together: connecting takes as long as for one.

    Each stream has a copy of the dataset, whose `__aenter__` runs as the stream's code, as in a worker that has it
    alone.

    Args:
        contexts: that of each stream, by the stream's number.
        identify: makes the process's code that of a stream.
    """

    def __init__(
        self, contexts: Mapping[int, DatasetContext], identify: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(None)
        self._contexts = {stream: context for stream, context in contexts.items() if context.needed}
        self._identify = identify
        self._entered = False

    @property
    def needed(self) -> bool:
        """Whether there is anything to await."""
        return bool(self._contexts)

    @property
    def uninitialized(self) -> bool:
        """Whether `worker_init_fn` failed in one of the streams. Entering raises the same again."""
        return any(context.uninitialized for context in self._contexts.values())

    async def open(self) -> None:
        """Enter the contexts, once. If one fails, all are exited, and the next call tries again. Several tasks may wait
        here, and go on in the order in which they came.

        Raises:
            Exception: what entering the first of those that failed raised.
        """
        if not self._contexts:
            return
        # Also once they are entered: a task that comes now must not overtake those that waited.
        async with self._order:
            if self._entered:
                return
            errors = await self._each(self._open_one)
            if errors:
                await self._close_all(EXIT_SECONDS)
                try:
                    raise errors[0]
                finally:
                    errors.clear()  # they refer to this frame
            self._entered = True

    async def close(self, seconds: float = EXIT_SECONDS) -> BaseException | None:
        """Exit the contexts, at the same time. See `DatasetContext.close`."""
        self._entered = False
        return await self._close_all(seconds)

    async def _close_all(self, seconds: float) -> BaseException | None:
        found: list[BaseException | None] = []

        async def close_one(stream: int) -> None:
            found.append(await self._contexts[stream].close(seconds))

        await self._each(close_one)
        return next(filter(None, found), None)

    def close_soon(self) -> None:
        """Have the loop exit the contexts. See `DatasetContext.close_soon`."""
        for context in self._contexts.values():
            context.close_soon()

    async def _open_one(self, stream: int) -> None:
        await self._contexts[stream].open()

    async def _each(self, call: Callable[[int], Any]) -> list[BaseException]:
        """Await this for each stream, as its code, at the same time. Returns the errors."""

        async def one(stream: int) -> None:
            with self._identify(stream):
                await call(stream)

        results = await asyncio.gather(*map(one, self._contexts), return_exceptions=True)
        return [result for result in results if result is not None]


Identify: TypeAlias = Callable[[int], AbstractContextManager[Any]]
"""Returns a context in which the process's code is that of a stream: `get_worker_info` and the generators."""


class Identities(Protocol):
    """An `Identify` of a worker."""

    def __call__(self, stream: int, /) -> AbstractContextManager[Any]:
        """See `Identify`."""
        ...

    def save(self) -> bytes:
        """Return the states of all streams' generators, for `restore` in the worker's replacement."""
        ...

    def restore(self, saved: bytes) -> None:
        """Set the generators of all streams to states from `save`."""
        ...


_NOTHING = contextlib.nullcontext()


class StreamReaders:
    """Reads the streams that a process serves. Has the methods of a `DatasetReader`.

    Args:
        dataset: the dataset that the streams are copies of.
        readers: that of each stream, by the stream's number.
        identify: makes the process that of a stream.
    """

    def __init__(self, dataset: Any, readers: Mapping[int, DatasetReader], identify: Identify) -> None:
        self.dataset = dataset
        self.copy = next(iter(readers))
        """The stream whose batch, or error, came last. In a worker nothing is awaited between that and the answer."""
        self.asynchronous = readers[self.copy].asynchronous
        self._readers = readers
        self._identify = identify
        self._ended: set[int] = set()
        self._context = DatasetContext(None)

    def initialize(self, init: Callable[[int], Any]) -> None:
        """Call this for each stream, as its code. What it returns to be awaited is awaited in the streams' contexts."""
        returned: dict[int, Any] = {}
        try:
            for stream in self._readers:
                with self._identify(stream):
                    returned[stream] = init(stream)
        except BaseException:
            for each in returned.values():
                drop_awaitable(each)
            raise
        contexts = {stream: reader.context(returned[stream]) for stream, reader in self._readers.items()}
        self._context = StreamContexts(contexts, self._identify)

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch, or resume one, in each stream. See `DatasetReader.begin`."""
        # Another set: a task of the epoch before may end late.
        self._ended = set()
        for (stream, reader), each in zip(self._readers.items(), start.streams, strict=True):
            with self._identify(stream):
                reader.begin(each)

    @property
    def begun(self) -> bool:
        """`DatasetReader.begun` of the stream that was read last."""
        return self._readers[self.copy].begun

    async def open(self) -> None:
        """`DatasetReader.open` of each, one after the other."""
        for stream, reader in self._readers.items():
            with self._identify(stream):
                await reader.open()

    def context(self, before: Any = None) -> DatasetContext:
        """Return the context to hold open while reading: of all streams, once `initialize` was called."""
        del before
        return self._context

    def limit(self, concurrency: int) -> None:
        """Do nothing: each stream awaits one sample at a time."""

    def fetch(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the next batch of the stream with this number. See `DatasetReader.fetch`."""
        self.copy = index
        # Not asked again: an iterator may begin anew after its end.
        if index in self._ended:
            raise EndOfData
        with self._identify(index):
            try:
                return self._readers[index].fetch(None, records)
            except EndOfData:
                self._ended.add(index)
                raise

    async def fetch_async(self, index: Any, records: list[SkippedSample] | None = None) -> Any:
        """Return the next batch of the asynchronous stream with this number. See `DatasetReader.fetch_async`."""
        ended = self._ended
        try:
            if index in ended:
                raise EndOfData
            with self._identify(index):
                return await self._readers[index].fetch_async(None, records)
        except EndOfData:
            ended.add(index)
            raise
        finally:
            # Last: other streams' batches may have come meanwhile.
            self.copy = index

    def cursor(self) -> PackedCursor | None:
        """Return the cursor after a batch of the stream that was read last. See `DatasetReader.cursor`."""
        # As the stream's code: a dataset's state may be that of the generators.
        with self._identify(self.copy):
            return self._readers[self.copy].cursor()

    def last_cursor(self) -> PackedCursor | None:
        """Return the cursor at the end of the stream that was read last; None if it has no state."""
        with self._identify(self.copy):
            return self._readers[self.copy].last_cursor()

    def first_cursors(self) -> list[PackedCursor | None]:
        """Return each stream's cursor at the beginning of an epoch; None if it has no state, or was read before."""
        found: list[PackedCursor | None] = []
        for stream, reader in self._readers.items():
            with self._identify(stream):
                found += reader.first_cursors()
        return found

    def resume(self) -> None:
        """`DatasetReader.resume` of each: the main process sends all failed tasks of a worker again together."""
        for reader in self._readers.values():
            reader.resume()

    def taken(self) -> None:
        """`DatasetReader.taken` of the stream that was read last."""
        self._readers[self.copy].taken()

    def recount(self, batches: int) -> None:
        """`DatasetReader.recount` of the stream that was read last."""
        self._readers[self.copy].recount(batches)

    def failed(self) -> None:
        """Count a batch that raised, of the stream that was read last. See `DatasetReader.failed`."""
        self._readers[self.copy].failed()

    @property
    def can_resume(self) -> bool:
        """Whether another process can continue each stream. See `DatasetReader.can_resume`."""
        return all(reader.can_resume for reader in self._readers.values())

    async def aclose(self) -> None:
        """`DatasetReader.aclose` of each, at the same time."""
        await self._each(DatasetReader.aclose)

    async def aclose_resources(self) -> None:
        """`DatasetReader.aclose_resources` of each, at the same time: each may take its seconds."""
        await self._each(DatasetReader.aclose_resources)

    async def _each(self, close: Callable[[DatasetReader], Awaitable[None]]) -> None:
        await asyncio.gather(*map(close, self._readers.values()))

    def close_resources(self) -> None:
        """`DatasetReader.close_resources` of each."""
        for reader in self._readers.values():
            reader.close_resources()

    def close(self) -> None:
        """`DatasetReader.close` of each."""
        for reader in self._readers.values():
            reader.close()


def read_copies(
    setup: WorkerSetup,
    worker: int,
    dataset: Any,
    read: Callable[[Any, int], DatasetReader],
    identify: Callable[[WorkerSetup, Mapping[int, Any]], Identify],
) -> DatasetReader | StreamReaders:
    """Return the reader of all streams that a worker serves: with a number of workers, every such stream from its own
    number on. Without streams: that of the worker's copy.

    Args:
        setup: of the worker.
        worker: its number.
        dataset: its own, which the first stream gets.
        read: makes the reader of a copy, by the number of its stream or of the worker.
        identify: makes what makes the worker that of a stream, from the setup and the copies.

    Raises:
        TypeError: the dataset cannot be copied.
        ValueError: the setup has another number of starts.
    """
    begun = len(setup.starts[worker].streams)
    if not begun:
        return read(dataset, worker)
    streams = range(worker, setup.num_workers, setup.workers)
    if begun != len(streams):  # before any is copied: a service's loader may have sent any numbers
        raise ValueError(f"broken stream: {begun} streams begin in a worker that serves {len(streams)}")
    datasets = copies(dataset, streams, first_is_own=True)
    readers = {stream: read(each, stream) for stream, each in datasets.items()}
    return StreamReaders(dataset, readers, identify(setup, datasets))


def copies(dataset: Any, streams: Iterable[int], *, first_is_own: bool) -> dict[int, Any]:
    """Return a copy of the dataset for each of these streams. Call it before anything is read.

    Args:
        dataset: the dataset.
        streams: their numbers.
        first_is_own: the dataset is this process's own, so that the first stream gets it instead of a copy.

    Raises:
        TypeError: it cannot be copied.
    """
    made: dict[int, Any] = {}
    for stream in streams:
        if first_is_own and not made:
            made[stream] = dataset
            continue
        try:
            made[stream] = copy.deepcopy(dataset)
        except Exception as error:
            # Not copied in part: streams that shared an open file would take samples from one another.
            raise TypeError(
                f"each stream needs a {type(dataset).__name__} of its own, which cannot be copied: "
                f"{type(error).__name__}: {error}. Give its class a __deepcopy__, open files in __iter__, or set as "
                "many workers as there are streams: a worker process with a single stream copies nothing"
            ) from error
    return made


def infos_of(setup: WorkerSetup, datasets: Mapping[int, Any]) -> dict[int, Any]:
    """Return what `get_worker_info` gives in each stream, from the copies of the dataset by their streams' numbers."""
    return {
        stream: make_worker_info(stream, setup.num_workers, setup.base_seed + stream, dataset)
        for stream, dataset in datasets.items()
    }


class StreamIdentities:
    """Makes a worker process that of one of its streams.

    Args:
        setup: of the worker.
        datasets: the copy of each stream.
    """

    def __init__(self, setup: WorkerSetup, datasets: Mapping[int, Any]) -> None:
        self._base_seed = setup.base_seed
        self._infos = infos_of(setup, datasets)
        self._exchanges = setup.seeded is None
        self._states: dict[int, RngState] = {}  # of the streams that were present before
        self._seeded: set[int] = set()
        self._present: int | None = None

    def __call__(self, stream: int) -> AbstractContextManager[None]:
        """Make the process that of this stream, until another call."""
        if stream != self._present:
            self._change(stream)
        return _NOTHING

    def _change(self, stream: int) -> None:
        if self._exchanges and self._present is not None:
            self._states[self._present] = rng_state()
        self._present = stream
        if stream not in self._seeded:
            self._seeded.add(stream)
            seed_worker(self._base_seed, stream)
        elif self._exchanges:
            set_rng_state(self._states.pop(stream))
        set_worker_info(self._infos[stream])

    def save(self) -> bytes:
        """Return the states of all streams' generators, for `restore` in the worker's replacement."""
        states = dict(self._states)
        if self._present is not None:
            states[self._present] = rng_state()
        return pickle.dumps(states, 5)

    def restore(self, saved: bytes) -> None:
        """Set the generators of all streams to states from `save`."""
        self._states, self._present = pickle.loads(saved), None
        self._seeded.update(self._states)


class ContextIdentities:
    """Makes the current context's code that of a stream: one of several that are awaited at the same time, or whose
    process is not the worker's own.

    Args:
        setup: of the worker.
        datasets: the copy of each stream.
    """

    def __init__(self, setup: WorkerSetup, datasets: Mapping[int, Any]) -> None:
        self._infos = {stream: ContextInfo(stream, setup, dataset) for stream, dataset in datasets.items()}

    def __call__(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context in which the code is that of this stream."""
        return answering_with(self._infos[stream])

    def save(self) -> bytes:
        """Return the states of all streams' generators, for `restore` in the worker's replacement."""
        return pickle.dumps({stream: info.save() for stream, info in self._infos.items()}, 5)

    def restore(self, saved: bytes) -> None:
        """Set the generators of all streams to states from `save`."""
        for stream, states in pickle.loads(saved).items():
            self._infos[stream].restore(states)


def process_identities(setup: WorkerSetup, datasets: Mapping[int, Any]) -> Identities:
    """Return what makes a worker process that of one of its streams, from the copies of the dataset."""
    if not is_async_dataset(setup.dataset):
        return StreamIdentities(setup, datasets)
    answer_by_context()
    return ContextIdentities(setup, datasets)


def shared_parts(setup: WorkerSetup, start: EpochStart, draw_check: GlobalDrawCheck | None) -> dict[str, Any]:
    """Return the arguments that all `DatasetReader`s of a worker have in common, as its streams are awaited together.

    Args:
        setup: of the worker.
        start: of the worker.
        draw_check: that of the process, if other workers share it.
    """
    if not start.streams or not is_async_dataset(setup.dataset):
        return {"draw_check": draw_check}
    # One check for all: what one stream's collation draws is no draw of another's samples.
    threads = make_decode_threads(setup.decode, setup.decode_threads)
    return {"draw_check": draw_check or GlobalDrawCheck(), "decode_threads": threads}
