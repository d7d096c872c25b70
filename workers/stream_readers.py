"""Reads several streams of one dataset in one process: each has a copy, and is read as if a worker had it alone.

Data path: scheduler -> worker: [stream_readers -> reader: fetch -> collate] -> codec -> ring.

A dataset that says by `loader_streams` that it is a number of streams (`dataset_streams.py`) is the same whatever the
number of workers. So each stream has all that a worker has that reads a copy of a dataset: the number that
`get_worker_info` gives, a seed, generators that the seed belongs to, a call of `worker_init_fn`, an async context, and
a cursor.

The generators of a process serve its streams in turn. `StreamIdentities` exchanges their states where the stream
changes. In seeded mode each sample seeds them, and nothing is exchanged. Worker threads, whose process is not theirs
alone, have generators for each stream, which `sample_rng` and `get_worker_info` give it (`ContextIdentities`).
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.workers.fetch.context import DatasetContext
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.seeding import RngState, rng_state, set_rng_state
from asyncloader.workers.fetch.setup import (
    EpochStart,
    WorkerSetup,
    make_worker_info,
    seed_worker,
    set_worker_info,
)
from asyncloader.workers.fetch.worker_info import ContextInfo, answering_with

Identify: TypeAlias = Callable[[int], AbstractContextManager[Any]]
"""Returns a context in which the process's code is that of a stream: `get_worker_info` and the generators."""


_NOTHING = contextlib.nullcontext()


class StreamReaders:
    """Reads the streams that a process serves. Has the methods of a `DatasetReader`.

    Args:
        dataset: the dataset that the streams are copies of.
        readers: that of each stream, by the stream's number.
        identify: makes the process that of a stream.
    """

    asynchronous = False

    def __init__(self, dataset: Any, readers: Mapping[int, DatasetReader], identify: Identify) -> None:
        self.dataset = dataset
        self.copy = next(iter(readers))
        """The stream whose batch, or error, came last. In a worker nothing is awaited between that and the answer."""
        self._readers = readers
        self._identify = identify
        self._ended: set[int] = set()

    def initialize(self, init: Callable[[int], Any]) -> None:
        """Call this for each stream, as its code."""
        for stream in self._readers:
            with self._identify(stream):
                init(stream)

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch, or resume one, in each stream. See `DatasetReader.begin`."""
        self._ended.clear()
        for (stream, reader), each in zip(self._readers.items(), start.streams, strict=True):
            with self._identify(stream):
                reader.begin(each)

    begun = True
    """See `DatasetReader.begun`."""

    def context(self) -> DatasetContext:
        """Return an empty context: the streams are blocking ones."""
        return DatasetContext(None)

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
        """`DatasetReader.aclose` of each."""
        for reader in self._readers.values():
            await reader.aclose()

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
    """Makes the current context's code that of a stream, in a process that is not the worker's own.

    Args:
        setup: of the worker.
        datasets: the copy of each stream.
    """

    def __init__(self, setup: WorkerSetup, datasets: Mapping[int, Any]) -> None:
        self._infos = {stream: ContextInfo(stream, setup, dataset) for stream, dataset in datasets.items()}

    def __call__(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context in which the code is that of this stream."""
        return answering_with(self._infos[stream])
