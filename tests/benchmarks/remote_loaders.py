"""The loaders that read from the store, each set up as its documentation advises for this kind of work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

import asyncloader
from asyncloader.remote.dataset import RemoteIterableDataset

from .plan import ASYNC, FACADE
from .remote_clients import AsyncioBatches, AsyncObjects, BlockingObjects, FetchAlone, as_array
from .remote_content import SHARDS
from .remote_plan import (
    BATCH,
    GRAIN,
    NODES,
    OBJECTS_KIND,
    OURS_TAR,
    SPDL,
    TORCH_ASYNCIO,
    TORCH_BLOCKING,
    WEBDATASET,
    WORKERS,
)

AHEAD = 4  # batches that the loaders without workers of torch's kind hold ready, as torch's prefetch_factor does


def shard_urls(store: str, folder: str, samples: int) -> list[str]:
    """The tar files that hold this number of samples, or a few more. ValueError: the store has fewer."""
    shards = SHARDS[folder]
    if samples > shards.objects:
        raise ValueError(f"{samples} samples of the {shards.objects} in {folder!r}")
    return [f"{store}/{folder}/{number:04}.tar" for number in range(-(-samples // shards.each))]


def open_remote(name: str, kind: str, store: str, samples: int, start: str | None = None) -> Any:
    """The loader called `name`, whose batches are uint8 of shape (`BATCH`, bytes of a sample).

    Args:
        name: from `remote_plan`; the bare loops are no loaders.
        kind: "objects", or the folder of tar files.
        store: URL of the store with its latency.
        samples: in an epoch.
        start: start method of the workers of RemoteIterableDataset; None is the library's choice.
    """
    urls = shard_urls(store, "large" if kind == OBJECTS_KIND else kind, samples) if name in TAR else []
    if name == OURS_TAR:
        return _ours(ASYNC, RemoteIterableDataset(urls), decode=_member, multiprocessing_context=start)
    if name == WEBDATASET:
        return _webdataset(urls)
    return LOADERS[name](store, samples)


def _torch(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)


def _ours(name: str, dataset: Any, **more: Any) -> Any:
    return getattr(asyncloader, name)(dataset, batch_size=BATCH, num_workers=WORKERS, **more)


def _spdl(store: str, samples: int) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    builder = spdl.PipelineBuilder().add_source(range(samples))
    builder = builder.pipe(FetchAlone(store), concurrency=256, output_order="completion")
    pipeline = builder.aggregate(BATCH).pipe(default_collate).add_sink(AHEAD).build(num_threads=WORKERS)
    return _spdl_batches(pipeline)


def _spdl_batches(pipeline: Any) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def _nodes(store: str, samples: int) -> Any:
    nodes = importlib.import_module("torchdata.nodes")
    fetch = BlockingObjects(store, samples).__getitem__
    source = nodes.IterableWrapper(range(samples))
    fetched = nodes.ParallelMapper(source, fetch, num_workers=256, method="thread")
    batches = nodes.Mapper(nodes.Batcher(fetched, BATCH, drop_last=False), default_collate)
    return nodes.Loader(nodes.Prefetcher(batches, prefetch_factor=AHEAD))


def _grain(store: str, samples: int) -> Any:
    # Grain reads absl's flags, which a program that is no absl app must mark as parsed.
    importlib.import_module("absl.flags").FLAGS(["benchmark"])
    grain = importlib.import_module("grain")
    source = grain.MapDataset.source(BlockingObjects(store, samples))
    read = source.to_iter_dataset(grain.ReadOptions(num_threads=64, prefetch_buffer_size=256))
    options = grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=AHEAD // WORKERS)
    return read.batch(BATCH).mp_prefetch(options)


def _webdataset(urls: list[str]) -> Any:
    webdataset = importlib.import_module("webdataset")
    samples = webdataset.WebDataset(urls, shardshuffle=False).map(_member)
    return webdataset.WebLoader(
        samples.batched(BATCH, collation_fn=default_collate), batch_size=None, num_workers=WORKERS
    )


def _member(sample: dict[str, Any]) -> Any:
    return as_array(sample["bin"])


LOADERS: dict[str, Callable[[str, int], Any]] = {
    TORCH_BLOCKING: lambda store, samples: _torch(BlockingObjects(store, samples)),
    TORCH_ASYNCIO: lambda store, samples: _torch(AsyncioBatches(store, samples)),
    SPDL: _spdl,
    NODES: _nodes,
    GRAIN: _grain,
    ASYNC: lambda store, samples: _ours(ASYNC, AsyncObjects(store, samples)),
    FACADE: lambda store, samples: _ours(FACADE, AsyncObjects(store, samples)),
}
TAR = frozenset({WEBDATASET, OURS_TAR})
