"""Makes the dataset's reader of an epoch without workers; a dataset's streams are read in turn, as if by workers.

Data path: sampler -> inline: [inline_reader -> reader: fetch -> collate] -> the user.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from asyncloader.epoch.plan import InlineAssignments, worker_setup
from asyncloader.epoch.stream_scheduler import StreamTurns
from asyncloader.epoch.torch_iterator import shared_seed
from asyncloader.state.progress import Progress
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.slow_samples import SlowSamples
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.dataset_state import PackedCursor
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.fetch.seeding import RngState, rng_state, set_rng_state
from asyncloader.workers.fetch.setup import WorkerSetup, call_worker_init, seed_cpu_generators
from asyncloader.workers.fetch.worker_info import answering_with
from asyncloader.workers.memory.inline_collate import inline_collate
from asyncloader.workers.stream_readers import StreamReaders, copies, infos_of

if TYPE_CHECKING:
    from asyncloader.workers.stream_readers import StreamReaders


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
