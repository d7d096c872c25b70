"""The loaders of the inputs, each set up as its documentation advises; and the bare code, which is the limit.

Data path: files -> [loader] -> batches.
"""

from __future__ import annotations

import http.client
import importlib
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from . import inputs_objects
from .inputs_data import (
    IMAGES,
    INPUTS,
    TABLE_ROWS,
    TEXTS,
    Batch,
    Endless,
    Input,
    Lines,
    TableBatches,
    Windows,
    line_files,
    member_sample,
    members,
    row_sample,
    table_files,
    text_sample,
)
from .inputs_plan import (
    DECODING,
    ELASTIC,
    GRAIN,
    NODES,
    OBJECTS,
    OUR_THREADS,
    SPDL_ASYNC,
    STATEFUL,
    STREAMS,
    THREADS,
    TURBO,
    VARIANTS,
    WORKERS,
)
from .peers import IN_FLIGHT, Stream
from .plan import ASYNC, OURS, TORCH

FETCHES = 4
"""Shards that are on their way to each process of the bare code."""


class Fetch:
    """From the numbers of a batch's samples to the batch; picklable with its dataset."""

    def __init__(self, given: Input, dataset: Any) -> None:
        self.dataset = dataset
        self.collate = given.collate

    def __call__(self, numbers: list[int]) -> Batch:
        return self.collate([self.dataset[number] for number in numbers])


class ArrayFetch(Fetch):
    """The same with arrays instead of tensors, which Grain moves through shared memory."""

    def __call__(self, numbers: list[int]) -> Batch:
        torch.set_num_threads(1)  # as torch does in its own workers
        return {name: np.asarray(leaf) for name, leaf in super().__call__(numbers).items()}


class AsyncStream:
    """An endless asynchronous loader, given out in epochs of `batches` batches."""

    def __init__(self, batches: int, loader: Any) -> None:
        self.batches = batches
        self.loader = loader
        self.iterator: Any = None

    async def __aenter__(self) -> Self:
        self.iterator = aiter(await self.loader.__aenter__())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.loader.__aexit__(*error)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(self.batches):
            yield await anext(self.iterator)


def open_input(name: str, row: str, folder: Path, url: str) -> Any:
    """The loader called `name` over an input.

    Args:
        name: torch, ours or a peer's.
        row: a key of `INPUTS`.
        folder: the input's files.
        url: of the store that has the files, with its latency; for the rows that have one.
    """
    given, batches = INPUTS[row], read_batches(folder)
    if row in ("table", "lines", "shards") and name in (*OURS, *VARIANTS):
        return _open_ours_remote(name, row, folder, url)
    if row == "shards":
        return _open_shards(name, shard_urls(folder, url))
    dataset = given.dataset(folder)
    order: dict[str, Any] = {"batch_sampler": Endless(batches)}
    if row == "objects":
        numbers = [number for batch in batches for number in batch]
        if name in inputs_objects.PEERS:
            return Stream(len(batches), inputs_objects.PEERS[name](url, numbers))
        dataset = (inputs_objects.AsyncObjects if name in OURS else inputs_objects.BlockingObjects)(url)
        order = {"sampler": Endless(numbers), "batch_size": OBJECTS}  # a known size, from which ours reads ahead
    if name in (TORCH, STATEFUL, *OURS, *VARIANTS):
        options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
        if name == OUR_THREADS:
            options["workers"] = "threads"
        if not batches:
            return _module(name)(dataset, batch_size=BATCH_SIZES.get(row), **options)
        loader = _module(name)(dataset, collate_fn=given.collate, **order, **options)
        return AsyncStream(len(batches), loader) if name == ASYNC else Stream(len(batches), loader)
    return MAP_PEERS[name](Fetch(given, dataset) if name != GRAIN else ArrayFetch(given, dataset), batches)


def read_batches(folder: Path) -> list[list[int]]:
    """The numbers of the samples of each batch of an epoch; none for a stream."""
    batches: list[list[int]] = json.loads((folder / "batches.json").read_text(encoding="utf-8"))
    return batches


def shard_urls(folder: Path, url: str) -> list[str]:
    """The shards' addresses in the store."""
    return [f"{url}/{path.name}" for path in sorted(folder.glob("*.tar"))]


def _module(name: str) -> Any:
    if name == TORCH:
        return torch.utils.data.DataLoader
    if name == STATEFUL:
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return getattr(importlib.import_module("asyncloader"), name.partition(",")[0])


# ----------------------------------------------------------------------------------- batches of numbered samples


def _nodes(fetch: Fetch, batches: list[list[int]]) -> Any:
    nodes = importlib.import_module("torchdata.nodes")
    source = nodes.IterableWrapper(Endless(batches))
    mapper = nodes.ParallelMapper(source, fetch, num_workers=WORKERS, method="process")
    return Stream(len(batches), nodes.Loader(nodes.Prefetcher(mapper, prefetch_factor=IN_FLIGHT)))


def _grain(fetch: Fetch, batches: list[list[int]]) -> Any:
    # Grain reads absl's flags, which a program that is no absl app must mark as parsed.
    importlib.import_module("absl.flags").FLAGS(["benchmark"])
    grain = importlib.import_module("grain")
    endless = grain.MapDataset.source(batches).map(fetch).repeat()
    endless = endless.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=IN_FLIGHT // WORKERS))
    options = grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=IN_FLIGHT // WORKERS)
    return Stream(len(batches), endless.mp_prefetch(options))


def _threads(fetch: Fetch, batches: list[list[int]]) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    builder = spdl.PipelineBuilder().add_source(Endless(batches))
    builder = builder.pipe(fetch, concurrency=WORKERS, output_order="input")
    return _running(builder.add_sink(IN_FLIGHT).build(num_threads=WORKERS), len(batches))


def _running(pipeline: Any, batches: int) -> Stream:
    pipeline.start()
    return Stream(batches, pipeline.get_iterator(), keep=pipeline)


def _turbo(fetch: Fetch, batches: list[list[int]]) -> Any:
    # Its loader of tar files decodes and crops in C++, with crops that it draws itself: other content than others have.
    ordered = torch.utils.data.Subset(fetch.dataset, [number for batch in batches for number in batch])
    return importlib.import_module("turboloader").MapDataLoader(
        ordered, batch_size=len(batches[0]), num_workers=WORKERS, collate_fn=fetch.collate
    )


MAP_PEERS: dict[str, Callable[[Fetch, list[list[int]]], Any]] = {
    NODES: _nodes,
    GRAIN: _grain,
    THREADS: _threads,
    TURBO: _turbo,
}


# -------------------------------------------------------------------------------------------------------- tables


def _open_ours_remote(name: str, row: str, folder: Path, url: str) -> Any:
    from asyncloader.remote.dataset import RemoteIterableDataset

    files, decode = REMOTE[row]
    elastic = name == ELASTIC
    return _module(name)(
        RemoteIterableDataset(files(folder, url), streams=STREAMS if elastic else None),
        batch_size=BATCH_SIZES[row],
        num_workers=WORKERS,
        persistent_workers=True,
        decode=decode,
        seed=0 if elastic else None,
    )


BATCH_SIZES = {"table": TABLE_ROWS, "lines": TEXTS, "shards": IMAGES}
REMOTE: dict[str, tuple[Callable[[Path, str], Sequence[str | Path]], Callable[[Batch], Batch]]] = {
    "table": (lambda folder, _: table_files(folder), row_sample),
    "lines": (lambda folder, _: line_files(folder), text_sample),
    "shards": (shard_urls, member_sample),
}


# -------------------------------------------------------------------------------------------------------- shards


def _open_shards(name: str, urls: list[str]) -> Any:
    if name == SPDL_ASYNC:
        return _spdl_shards(urls)
    webdataset = importlib.import_module("webdataset")
    samples = webdataset.WebDataset(urls, shardshuffle=False).map(member_sample)
    batched = samples.batched(IMAGES, collation_fn=default_collate)
    return _module(name)(batched, batch_size=None, num_workers=WORKERS, persistent_workers=True)


def _spdl_shards(urls: list[str]) -> Any:
    spdl = importlib.import_module("spdl.pipeline")
    session: Any = None

    async def fetch(url: str) -> bytes:
        nonlocal session
        if session is None:
            session = await inputs_objects.open_session()
        return await inputs_objects.get(session, url)

    builder = spdl.PipelineBuilder().add_source(Endless(urls)).pipe(fetch, concurrency=2 * FETCHES)
    builder = builder.pipe(lambda shard: list(members(shard))).disaggregate()
    builder = builder.pipe(member_sample, concurrency=WORKERS, output_order="input").aggregate(IMAGES)
    return _running(builder.pipe(default_collate).add_sink(IN_FLIGHT).build(num_threads=WORKERS + 1), len(urls))


# ------------------------------------------------------------------------------------------------------ bare code


def bare(name: str, row: str, folder: Path, url: str, seconds: float) -> float:
    """Samples a second of the bare code, in as many processes as there are workers, all together.

    Each process has its own part of an epoch, and begins again until the time is over.

    Raises:
        EOFError: a process failed.
    """
    context = multiprocessing.get_context("fork")

    def run(part: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        work = _bare_work(name, row, folder, url, part)
        sum(work())  # once without the clock: files are in memory then
        pipe.send(None)
        pipe.recv()
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for samples in work():
                done += samples
                if time.perf_counter() - began >= seconds:
                    break
        pipe.send(done / (time.perf_counter() - began))

    pipes = [context.Pipe() for _ in range(WORKERS)]
    processes = [context.Process(target=run, args=(part, pipe)) for part, (_, pipe) in enumerate(pipes)]
    for process in processes:
        process.start()
    for ours, theirs in pipes:
        theirs.close()
        ours.recv()
    for ours, _ in pipes:
        ours.send(None)
    total = sum(ours.recv() for ours, _ in pipes)
    for process, (ours, _) in zip(processes, pipes, strict=True):
        process.join()
        ours.close()
    return float(total)


def _bare_work(name: str, row: str, folder: Path, url: str, part: int) -> Callable[[], Iterator[int]]:
    """The work of one process on its part of the epoch: gives the numbers of samples that were done."""
    if row == "shards":
        return lambda: _bare_shards(shard_urls(folder, url)[part::WORKERS])
    if row == "table":
        return lambda: (len(batch["id"]) for batch in TableBatches(table_files(folder)[part::WORKERS]))
    if row == "lines":
        return lambda: (_done(sample) for sample in Lines(line_files(folder)[part::WORKERS]))
    dataset, batches = INPUTS[row].dataset(folder), read_batches(folder)[part::WORKERS]
    if row == "objects":
        return lambda: inputs_objects.bare(url, [number for batch in batches for number in batch])
    if name == DECODING:
        return lambda: (_decode(dataset.files[number]) for batch in batches for number in batch)
    if isinstance(dataset, Windows):
        length = dataset.length
        target = np.zeros((2, len(batches[0]), length), np.int64)

        def windows() -> Iterator[int]:
            for batch in batches:
                for place, number in enumerate(batch):
                    target[0, place] = dataset.tokens.raw(number, length)
                    target[1, place] = dataset.tokens.raw(number + 1, length)
                yield len(batch)

        return windows
    if row == "lengths":
        return lambda: _bare_lengths(dataset, batches)
    return lambda: (_done(dataset[number]) for batch in batches for number in batch)


def _done(sample: Any) -> int:
    """One sample, whatever it is."""
    return 1


def _decode(file: str) -> int:
    with Image.open(file) as image:
        image.convert("RGB")
    return 1


def _bare_lengths(dataset: Any, batches: list[list[int]]) -> Iterator[int]:
    target = np.zeros((IMAGES, 2048), np.int64)
    for batch in batches:
        spans = [(dataset.ends[number - 1] if number else 0, dataset.ends[number]) for number in batch]
        longest = max(end - start for start, end in spans)
        for place, (start, end) in enumerate(spans):
            target[place, : end - start] = dataset.tokens.raw(start, end - start)
            target[place, end - start : longest] = 0
        yield len(batch)


def _bare_shards(urls: list[str]) -> Iterator[int]:
    with ThreadPoolExecutor(FETCHES) as pool:
        for shard in pool.map(_download, urls):
            for member in members(shard):
                member_sample(member)
                yield 1


def _download(url: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().read()
    finally:
        connection.close()
