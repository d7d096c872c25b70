"""Makes the dataset's reader of an epoch without workers.

Data path: sampler -> inline: [inline_reader -> reader: fetch -> collate] -> the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from asyncloader.epoch.plan import InlineAssignments, worker_setup
from asyncloader.epoch.torch_iterator import shared_seed
from asyncloader.state.progress import Progress
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.slow_samples import SlowSamples
from asyncloader.workers.fetch.decoding import make_decode_threads
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.memory.inline_collate import inline_collate

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
    from asyncloader.epoch.inline_streams import StreamsInTurn  # late: few datasets have streams

    threads = make_decode_threads(setup.decode, setup.decode_threads)
    slow = SlowSamples(recorder.slow)

    def make(copy: Any, stream: int) -> DatasetReader:
        return DatasetReader(
            *(setup, copy, collate),
            worker_id=stream,
            in_worker=False,
            time=recorder.time,
            samples=slow,
            decode_threads=threads,
        )

    reader = StreamsInTurn(dataset, setup, make, progress.next_worker, progress.ends)
    for stream, cursor in enumerate(reader.first_cursors()):
        progress.begun(stream, cursor)
    return reader
