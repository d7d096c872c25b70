"""The other loaders, each set up as its documentation advises for this kind of work.

Those whose workers do not outlive an epoch read an endless repetition of the epoch, and an epoch is so many
of its batches: they are spared the start of an epoch, which the others pay.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, default_collate

from .workloads import Workload

IN_FLIGHT = 4  # batches ahead of the consumer: torch's prefetch_factor of 2 in each of 2 workers


class Endless(Iterable[list[int]]):
    """Index batches of the epoch, again and again. Every iterator starts at the first batch."""

    def __init__(self, batches: int, batch_size: int) -> None:
        self.batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in itertools.cycle(range(self.batches)):
            yield list(range(batch * self.batch_size, (batch + 1) * self.batch_size))


class Fetch:
    """From a list of indices to a collated batch; picklable with its dataset."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


class Stream:
    """A running endless iterator, given out in epochs of `batches` batches."""

    def __init__(self, batches: int, endless: Iterable[Any], keep: Any = None) -> None:
        self.batches = batches
        self.iterator = iter(endless)
        self.keep = keep  # objects that must live as long as the iterator

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.iterator, self.batches)


class ArraySource:
    """Random access for Grain, which collates NumPy arrays: the same views, as arrays."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return sample if isinstance(sample, dict | int) else np.asarray(sample)


def _stateful(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(dataset, batch_size=workload.batch_size, num_workers=workers, persistent_workers=True)


def _nodes(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    nodes = importlib.import_module("torchdata.nodes")
    source = nodes.IterableWrapper(Endless(batches, workload.batch_size))
    mapper = nodes.ParallelMapper(source, Fetch(dataset), num_workers=workers, method="process")
    return Stream(batches, nodes.Loader(nodes.Prefetcher(mapper, prefetch_factor=IN_FLIGHT)))


def _grain(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    # Grain reads absl's flags, which a program that is no absl app must mark as parsed.
    importlib.import_module("absl.flags").FLAGS(["benchmark"])
    grain = importlib.import_module("grain")
    # Batches are elements of the map dataset; no reader threads, which only slow samples in memory down.
    endless = grain.MapDataset.source(ArraySource(dataset)).batch(workload.batch_size).repeat()
    endless = endless.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=IN_FLIGHT // workers)
    return Stream(batches, endless.mp_prefetch(options))


def _spdl_drop_in(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    spdl = importlib.import_module("spdl.dataloader")
    loader = spdl.get_pytorch_dataloader(
        dataset,
        batch_size=None,
        batch_sampler=Endless(batches, workload.batch_size),
        num_workers=workers,
        multiprocessing_context="fork",
        in_order=True,
    )
    return Stream(batches, loader)


def _spdl_builder(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    builder = spdl.PipelineBuilder().add_source(Endless(batches, workload.batch_size))
    builder = builder.pipe(Fetch(dataset), concurrency=workers, output_order="input")
    return builder.add_sink(IN_FLIGHT)


def _spdl_threads(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    pipeline = _spdl_builder(dataset, workload, batches, workers).build(num_threads=workers)
    pipeline.start()
    return Stream(batches, pipeline.get_iterator(), keep=pipeline)


def _spdl_arena(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    sample: Any = Fetch(dataset)([0])
    leaves: list[Any] = list(sample.values()) if isinstance(sample, dict) else [sample]
    unit = workload.batch_size * sum(leaf.nbytes for leaf in leaves)
    # Twice the batches in flight: the pool frees its segments in order, so a held batch must not stall it.
    arena = spdl.SharedMemorySegmentPool(segment_size=unit + 65536, count=2 * IN_FLIGHT)
    endless = spdl.run_pipeline_in_subprocess(
        _spdl_builder(dataset, workload, batches, workers),
        num_threads=workers,
        buffer_size=IN_FLIGHT,
        mp_context="fork",
        arena=arena,
    )
    return Stream(batches, endless)


def _webdataset(dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    # Its readers of tar files have no part in this; its loader moves the batches.
    loader = importlib.import_module("webdataset").WebLoader
    return loader(dataset, batch_size=workload.batch_size, num_workers=workers, persistent_workers=True)


PEERS: dict[str, Callable[[Dataset[Any], Workload, int, int], Any]] = {
    "torchdata StatefulDataLoader": _stateful,
    "torchdata nodes": _nodes,
    "grain": _grain,
    "spdl drop-in": _spdl_drop_in,
    "spdl threads": _spdl_threads,
    "spdl arena": _spdl_arena,
    "webdataset WebLoader": _webdataset,
}
PEER_MODULES = ("torchdata.stateful_dataloader", "torchdata.nodes", "grain", "spdl.pipeline", "webdataset")


def open_peer(name: str, dataset: Dataset[Any], workload: Workload, batches: int, workers: int) -> Any:
    """The peer called `name`; an ImportError where it is not installed."""
    return PEERS[name](dataset, workload, batches, workers)
