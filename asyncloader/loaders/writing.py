"""`write_shards`: writes samples to shards in a store, for `RemoteIterableDataset` and other readers of these formats.

Data path: samples, or a map dataset and the loader's workers -> [writing: encoded] -> remote.shard_writing -> store.

A plain iterable is iterated in one thread, from its beginning to its close: what it opens may belong to that thread.
Each sample is encoded before the next is asked for, so an iterable may use its buffers again.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from contextvars import copy_context
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeAlias, TypeVar, cast

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
from asyncloader.remote.shard_cutting import TASK_BYTES, ShardCutter
from asyncloader.remote.shard_index import ShardNames
from asyncloader.remote.shard_writing import ShardWriter, WrittenShard
from asyncloader.remote.stores import Stores
from asyncloader.transports import Transport
from asyncloader.transports.blocking import BlockingPool
from asyncloader.workers.fetch.error_notes import add_note, index_text
from asyncloader.workers.fetch.sample_errors import MissingSample

MOST_PER_WORKER = 256
"""Most samples of a worker's task."""

Samples: TypeAlias = Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]

_R = TypeVar("_R")

_END: Any = object()

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


def _source(samples: Any, workers: int, context: Any) -> _IterableSource | _MapSource:
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
    return _IterableSource(samples)


async def _encoder(name: str, columns: Any, source: _IterableSource | _MapSource) -> ShardEncoder:
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


class _IterableSource:
    """The samples of an iterable. `aclose` must be called.

    Args:
        samples: dictionaries.
    """

    length = None
    """The number of samples is not known."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._pool = BlockingPool("samples", 1)
        self._context = copy_context()
        self._iterator: Iterator[Any] | None = None
        self._async_iterator: AsyncIterator[Any] | None = None
        if isinstance(samples, AsyncIterable):
            self._async_iterator = aiter(samples)
        self._first: list[Any] = []  # the first sample, if it was looked at
        self._stopped = False

    async def first(self) -> Any:
        """Return the first sample, which `batches` gives, too; None: there is none."""
        if self._async_iterator is not None:
            sample = await anext(self._async_iterator, _END)
        else:
            sample = await self._in_thread(self._next)
        self._first = [sample]
        return None if sample is _END else sample

    async def batches(self, encoder: ShardEncoder, cutter: ShardCutter) -> AsyncGenerator[EncodedSamples, None]:
        """Encode all samples. Raises the errors of the iterable, after the samples before them.

        Args:
            encoder: of the samples.
            cutter: gets them; of no samples yet, as an iterable cannot begin elsewhere.
        """
        ended = False
        while not ended:
            if self._async_iterator is not None:
                encoded, ended, error = await self._take_async(encoder, cutter, self._async_iterator)
            else:
                encoded, ended, error = await self._in_thread(partial(self._take, encoder, cutter))
            yield encoded
            if error is not None:
                raise error

    async def aclose(self) -> None:
        """End the thread, after the sample that it is waiting for, and close the iterable if it is a generator."""
        self._stopped = True
        try:
            # Also if the caller is cancelled: what a generator has opened must be closed in its thread.
            await self._pool.finish(partial(self._context.run, self._close))
            close = getattr(self._async_iterator, "aclose", None)
            if close is not None:
                await close()
        finally:
            await self._pool.aclose()

    async def _in_thread(self, call: Callable[[], _R]) -> _R:
        return await self._pool.run(partial(self._context.run, call))

    async def _take_async(
        self, encoder: ShardEncoder, cutter: ShardCutter, samples: AsyncIterator[Any]
    ) -> tuple[EncodedSamples, bool, Exception | None]:
        """Encode some samples, like `_take`."""
        batch, error = encoder.batch(), None
        sample: Any = None
        try:
            while (sample := self._first.pop() if self._first else await anext(samples, _END)) is not _END:
                if not batch.add(sample) or cutter.is_due(batch):
                    break
        except Exception as failed:
            error = failed
        return await self._in_thread(batch.finish), sample is _END, error

    # --- in the thread

    def _take(self, encoder: ShardEncoder, cutter: ShardCutter) -> tuple[EncodedSamples, bool, Exception | None]:
        """Encode some samples; return them, whether they are the last, and the error of the iterable behind them."""
        batch, error = encoder.batch(), None
        sample: Any = None
        try:
            while (sample := self._first.pop() if self._first else self._next()) is not _END:
                if not batch.add(sample) or cutter.is_due(batch) or self._stopped:
                    break
        except Exception as failed:
            error = failed
        return batch.finish(), sample is _END, error

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(cast("Iterable[Any]", self._samples))
        return next(self._iterator, _END)

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _MapSource:
    """The samples of a map dataset, encoded by the workers of a loader. Its interface is that of `_IterableSource`."""

    def __init__(self, dataset: MapDataset, workers: int, context: Any) -> None:
        self._dataset = dataset
        self._workers = workers
        self._context = context if workers else None
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
        nbytes = samples = 0  # later samples count more than earlier

        def tasks() -> Iterator[list[int]]:
            # So tasks of small samples are worth their overhead, and those of large samples take little memory.
            at = cutter.samples
            while at < self.length:
                first, at = at, at + min(MOST_PER_WORKER, max(1, TASK_BYTES * samples // max(nbytes, 1)))
                yield [*range(first, min(at, self.length))]

        loader: AsyncDataLoader[Any] = AsyncDataLoader(
            cast("Any", self._dataset),
            batch_sampler=tasks(),
            collate_fn=partial(_encode, encoder),
            num_workers=self._workers,
            multiprocessing_context=self._context,
            on_error=_keep_error,
        )
        async with loader, aclosing(cast("Any", aiter(loader))) as batches:
            async for data, sizes, keys, failure, error in batches:
                nbytes, samples = nbytes // 2 + data.nbytes, samples // 2 + len(sizes)
                found = None if failure is None else EncodingFailure(*failure)
                yield EncodedSamples([data.numpy().data], sizes.numpy(), keys, found)
                if isinstance(error, ExceptionWrapper):
                    error.reraise()
                if error is not None:
                    raise error

    async def aclose(self) -> None:
        """Do nothing: `batches` closes the loader."""


def _keep_error(index: Any, error: Exception) -> MissingSample:
    add_note(error, f"raised by the sample at index {index_text(index)}")
    if (worker := get_worker_info()) is None:
        return MissingSample(error)
    return MissingSample(ExceptionWrapper((type(error), error, error.__traceback__), f"in worker process {worker.id}"))


def _encode(encoder: ShardEncoder, samples: Sequence[Any]) -> tuple[Any, ...]:
    """Encode the samples of a task, up to the first that is missing. Tensors reach the main process through the
    workers' rings.
    """
    good = [*takewhile(lambda sample: type(sample) is not MissingSample, samples)]
    error = samples[len(good)].error if len(good) < len(samples) else None
    data, sizes, keys, failure = encoder.encode(good)
    joined = np.concatenate([np.empty(0, np.uint8), *(np.frombuffer(piece, np.uint8) for piece in data)])
    return torch.from_numpy(joined), torch.from_numpy(sizes), keys, failure and tuple(failure), error
