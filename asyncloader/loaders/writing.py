"""`write_shards`: writes samples to shards in a store, for `RemoteIterableDataset` and other readers of these formats.

Data path: samples, or a map dataset and the loader's workers -> [writing] -> remote.shard_writing -> store.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader.base.bridge import in_thread, run_in_thread
from asyncloader.base.sizes import Size, size
from asyncloader.errors import ShardWriteError
from asyncloader.formats.encoder import BadSample, EncodedSamples, EncodingFailure, ShardEncoder, check_names
from asyncloader.formats.jsonl import JsonlEncoder
from asyncloader.formats.mds_writer import MdsEncoder
from asyncloader.formats.parquet_writer import ParquetEncoder
from asyncloader.formats.tar import TarEncoder
from asyncloader.formats.tfrecord import TFRecordEncoder
from asyncloader.loaders.async_loader import AsyncDataLoader
from asyncloader.remote.sample_source import Samples, SampleSource
from asyncloader.remote.shard_cutting import ShardCutter
from asyncloader.remote.shard_index import ShardNames
from asyncloader.remote.shard_writing import ShardWriter, WrittenShard
from asyncloader.remote.stores import Stores
from asyncloader.transports import Transport
from asyncloader.workers.fetch.error_notes import add_note, index_text
from asyncloader.workers.fetch.sample_errors import MissingSample

TASK_BYTES = 1 << 20
"""Encoded bytes that a worker's task should have, by the samples so far."""

MOST_PER_TASK = 256
"""Most samples of a task."""

_PLAIN: dict[str, type[ShardEncoder]] = {"tar": TarEncoder, "jsonl": JsonlEncoder, "tfrecord": TFRecordEncoder}
_TYPED: dict[str, type[MdsEncoder | ParquetEncoder]] = {"mds": MdsEncoder, "parquet": ParquetEncoder}


class MapDataset(Protocol):
    """A dataset whose samples have numbers: ``dataset[number]``, a dictionary; may be asynchronous."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample, or a coroutine of it."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...


async def write_shards(
    samples: Samples | MapDataset,
    url: str,
    *,
    format: str | None = None,
    max_bytes: Size = "256MiB",
    max_samples: int | None = None,
    workers: int = 0,
    multiprocessing_context: Any = None,
    columns: Any = None,
    overwrite: bool = False,
    buffer_bytes: Size = "1GiB",
    transport: Transport | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[WrittenShard]:
    """Write samples to shards, several at a time. `write_shards_sync` does the same for programs without a loop.

        await write_shards(samples, "s3://bucket/train-{shard:06d}.tar", max_bytes="256MiB")

    A shard appears whole or not at all. Beside the shards is their index, ``_train-index.tar.json``, with counts, sizes
    and digests; and for MDS ``index.json``, which MosaicML's readers need. Beside each tar, JSON lines or TFRecord
    shard is the index of its samples, for `RemoteMapDataset`: ``_train-000000.tar.samples``. Called again with the same
    arguments after it was killed, it keeps the shards that are complete and writes the others, byte for byte those of
    an undisturbed run. Of a map dataset it does not ask for the samples of the complete shards again; an iterable must
    give all samples again, from the first, and those of the complete shards are compared. When cancelled, it waits for
    the sample that an iterable is computing.

    Args:
        samples: an iterable or asynchronous iterable of dictionaries, as `RemoteIterableDataset` gives them; or a map
            dataset that gives the same sample for the same number each time. ``__url__`` is not written, ``__key__`` to
            tar only.
        url: of the shards: ``{shard:06d}`` stands for the number. Its extension is that of the format: ``.tar``,
            ``.jsonl``, ``.tfrecord``, ``.mds``, these also with ``.gz`` or ``.zst``; ``.parquet``.
        format: the same, as an extension without its dot; refused if the URL has another.
        max_bytes: of a shard, before compression; for Parquet, of its values. Default ``"256MiB"``.
        max_samples: of a shard. None: no limit.
        workers: processes that compute and encode the samples of a map dataset. 0: this process.
        columns: the types of MDS columns, by MosaicML's names (``{"image": "jpeg", "label": "int"}``), or of Parquet
            columns (a `pyarrow.Schema`, or a dictionary of pyarrow types). None: those of the first sample.
        multiprocessing_context: how these processes are started, as of a loader. Samples that come from an object
            store, through this package, need ``"forkserver"`` or ``"spawn"``.
        overwrite: delete the shards of these names first, also if another program wrote them, and those of a writer
            that was killed: nothing is kept.
        buffer_bytes: of the shards in memory before compression: one that grows, and those that are being written,
            which contain all samples that fit, but at least one sample. Default ``"1GiB"``.
        transport: writes all shards; the URL is then a path below its root.
        storage_options: keyword arguments for the transport that is opened (credentials, endpoint, retry).

    Returns:
        The shards, in order, with those that were kept.

    Raises:
        ShardWriteError: a sample cannot be written; has its number and key. The shards before it are written.
        FileExistsError: shards of these names exist, and are not those that this call would write.
        ValueError: an argument is out of range.
        TransportError: the store cannot be written, or failed.
        Exception: the error of `samples`.
    """
    names = ShardNames.of(url, format)
    limit, buffered = size("max_bytes", max_bytes), size("buffer_bytes", buffer_bytes)
    if max_samples is not None and (not isinstance(max_samples, int) or max_samples < 1):
        raise ValueError(f"max_samples should be a number of samples, at least 1, or None, but got {max_samples!r}")
    source = _source(samples, workers, multiprocessing_context)
    stores = Stores(storage_options, transport=transport)
    try:
        encoder = await _encoder(names.format.name, columns, source)
        if encoder.largest is not None and limit > encoder.largest:
            raise ValueError(
                f"max_bytes={max_bytes!r} is more than {names.format.name} allows, {encoder.largest:,} bytes"
            )
        is_map = isinstance(source, _MapSource)
        writer = ShardWriter(
            names,
            stores,
            encoder,
            max_bytes=limit,
            max_samples=max_samples,
            buffer_bytes=buffered,
            settings={"samples": source.length},
            overwrite=overwrite,
        )
        try:
            cutter = await writer.open(skip=is_map)
            return await writer.write(source.batches(encoder, cutter), cutter)
        finally:
            await writer.aclose()
    finally:
        try:
            await source.aclose()
        finally:
            await stores.aclose()


def write_shards_sync(samples: Samples | MapDataset, url: str, **options: Any) -> list[WrittenShard]:
    """Call `write_shards`, with its options, in a loop of its own, and wait. Works under a running loop, too."""
    return run_in_thread(write_shards(samples, url, **options))


def _source(samples: Any, workers: int, context: Any) -> SampleSource | _MapSource:
    if not isinstance(workers, int) or workers < 0:
        raise ValueError(f"workers should be a number of processes, 0 for none, but got workers={workers!r}")
    iterable = hasattr(samples, "__iter__") or hasattr(samples, "__aiter__")
    is_map = hasattr(samples, "__getitem__") and hasattr(samples, "__len__") and not isinstance(samples, Mapping)
    if is_map and not isinstance(samples, IterableDataset) and (workers or not iterable):
        return _MapSource(cast("MapDataset", samples), workers, context)
    if not iterable:
        raise TypeError(f"samples is a {type(samples).__name__}: neither an iterable of samples nor a map dataset")
    if workers:
        raise ValueError(
            f"workers={workers} compute the samples of a map dataset, and samples is an iterable, which one process "
            "must iterate: leave out workers=, or give a dataset with __getitem__ and __len__"
        )
    return SampleSource(samples)


async def _encoder(name: str, columns: Any, source: SampleSource | _MapSource) -> ShardEncoder:
    if name in _PLAIN:
        if columns is not None:
            raise ValueError(f"columns= are for MDS and Parquet; {name} has none")
        return _PLAIN[name]()
    kind = _TYPED[name]
    if columns is not None:
        return kind(columns)
    first = await source.first()
    if first is None:
        return kind()
    try:
        if not isinstance(first, Mapping):
            raise BadSample(f"it is a {type(first).__name__}; a sample is a dictionary of its fields")
        check_names(first)
        return kind.of_first(first)
    except BadSample as error:
        key = first.get("__key__") if isinstance(first, Mapping) else None
        raise ShardWriteError(str(error), number=0, key=str(key or "")) from None


class _MapSource:
    """The samples of a map dataset, encoded by the workers of a loader."""

    def __init__(self, dataset: MapDataset, workers: int, context: Any) -> None:
        self._dataset = dataset
        self._workers = workers
        self._context = context
        self.length = len(dataset)

    async def first(self) -> Any:
        """Return the first sample; None without samples."""
        if not self.length:
            return None
        if inspect.iscoroutinefunction(type(self._dataset).__getitem__):
            return await self._dataset[0]
        return await in_thread(partial(self._dataset.__getitem__, 0))

    async def batches(self, encoder: ShardEncoder, cutter: ShardCutter) -> AsyncGenerator[EncodedSamples, None]:
        """Encode the samples that `cutter` does not have. Raises the dataset's error, after the samples before it."""
        tasks = _Tasks(cutter, self.length)
        loader: AsyncDataLoader[Any] = AsyncDataLoader(
            cast("Any", self._dataset),
            batch_sampler=tasks,
            collate_fn=_Collate(encoder),
            num_workers=self._workers,
            multiprocessing_context=self._context if self._workers else None,
            on_error=_keep_error,
        )
        async with loader, aclosing(cast("Any", aiter(loader))) as batches:
            async for data, sizes, keys, failure, error in batches:
                tasks.learn(data.nbytes, len(sizes))
                found = None if failure is None else EncodingFailure(*failure)
                yield EncodedSamples([data.numpy().data], sizes.numpy(), keys, found)
                if isinstance(error, ExceptionWrapper):
                    error.reraise()
                if error is not None:
                    raise error

    async def aclose(self) -> None:
        """Do nothing: `batches` closes the loader."""


class _Tasks:
    """A batch sampler whose batches end with a shard, and have about `TASK_BYTES`, or those of a shard, by the samples
    so far.

    So tasks of small samples are worth their overhead, and those of large samples take little memory.
    """

    def __init__(self, cutter: ShardCutter, stop: int) -> None:
        self._cutter = cutter
        self._next = cutter.samples
        self._stop = stop
        self._most_bytes = min(TASK_BYTES, cutter.room)
        self._bytes = self._samples = 0

    def learn(self, nbytes: int, samples: int) -> None:
        """Note the size of samples. Later samples count more than earlier."""
        self._bytes, self._samples = self._bytes // 2 + nbytes, self._samples // 2 + samples

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < self._stop:
            number = min(MOST_PER_TASK, max(1, self._most_bytes * self._samples // max(self._bytes, 1)))
            begin = self._next
            self._next = min(begin + self._cutter.task(begin, number), self._stop)
            yield list(range(begin, self._next))


def _keep_error(index: Any, error: Exception) -> MissingSample:
    add_note(error, f"raised by the sample at index {index_text(index)}")
    if (worker := get_worker_info()) is None:
        return MissingSample(error)
    return MissingSample(ExceptionWrapper((type(error), error, error.__traceback__), f"in worker process {worker.id}"))


class _Collate:
    """Encodes the samples of a task, up to the first that is missing. Tensors reach the main process through the
    workers' rings.
    """

    def __init__(self, encoder: ShardEncoder) -> None:
        self._encoder = encoder

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, ...]:
        error = None
        for at, sample in enumerate(samples):
            if type(sample) is MissingSample:
                samples, error = samples[:at], sample.error
                break
        data, sizes, keys, failure = self._encoder.encode(samples)
        joined = np.concatenate([np.empty(0, np.uint8), *(np.frombuffer(piece, np.uint8) for piece in data)])
        return torch.from_numpy(joined), torch.from_numpy(sizes), keys, failure and tuple(failure), error
