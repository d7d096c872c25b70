"""Chooses the fetcher for a kind of dataset, and holds the blocking fetchers of torch mode.

Data path: scheduler -> worker: [factory] -> collate -> codec -> ring.

The blocking fetchers follow torch's rules exactly: `__getitems__`, short last batches, `drop_last`, the end of an
iterable dataset, the order in which the dataset is called. In addition they note on errors which sample raised, and,
with a `SampleErrorHandler`, go on after samples that raise. The blocking fetcher of seeded mode is in
`seeded_fetch.py`; fetchers with many samples in flight are in `map_async.py`, `map_threads.py` and `stream_async.py`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import ConcatDataset, IterableDataset, StackDataset, Subset

from asyncloader.workers.fetch.async_stack import awaited_view
from asyncloader.workers.fetch.batching import Batching
from asyncloader.workers.fetch.decoding import DecodedMap
from asyncloader.workers.fetch.error_notes import (
    add_note,
    describe_batch,
    describe_collation,
    describe_sample,
    describe_stream_collation,
    describe_stream_sample,
)
from asyncloader.workers.fetch.guarded_fetch import TolerantMap
from asyncloader.workers.fetch.map_async import AsyncMapFetcher
from asyncloader.workers.fetch.map_threads import ThreadMapFetcher
from asyncloader.workers.fetch.sample_errors import DROPPED, BadSample, NoSamples, SampleErrorHandler, StreamErrors
from asyncloader.workers.fetch.seeded_fetch import SeededIterator, fetches_batches
from asyncloader.workers.fetch.stream_async import AsyncStreamFetcher, WorkerStreamFetcher, WorkerStreamLike
from asyncloader.workers.fetch.threads import JobThreads

__all__ = [
    "AsyncFetcher",
    "BlockingFetcher",
    "is_async_dataset",
    "is_async_stream",
    "is_concurrent",
    "make_async_fetcher",
    "make_blocking_fetcher",
]


class BlockingFetcher(Protocol):
    """torch's fetcher protocol: from an index (or a list of them) to a collated batch; StopIteration at a stream's end.

    `bad` gets records of samples that raised; NoSamples if none are left. Both only with an error handler.
    """

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch."""
        ...


class AsyncFetcher(Protocol):
    """The same, awaited. The end of a stream is StopAsyncIteration.

    Fetchers of map datasets also have the two parts, `samples` and `collated`, for callers that collate later.
    """

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch."""
        ...


def is_async_dataset(dataset: Any) -> bool:
    """Whether samples must be awaited: by the dataset's own methods, or those of the datasets that it is a view of.

    A dataset with both `__aiter__` and `__iter__` is asynchronous: torch's IterableDataset demands an `__iter__`. So is
    one with `__aenter__`. A plain method counts as asynchronous if it is annotated to return an awaitable or wraps a
    coroutine function (`functools.wraps`); otherwise that cannot be known before it is called.
    """
    kind = type(dataset)
    if hasattr(kind, "__aiter__") or hasattr(kind, "__aenter__"):
        return True
    for name in ("__getitem__", "__getitems__"):
        if _is_awaited(getattr(kind, name, None)):
            return True
    if isinstance(dataset, Subset):
        return is_async_dataset(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(is_async_dataset(part) for part in dataset.datasets)
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return any(map(is_async_dataset, parts.values() if isinstance(parts, dict) else parts))
    return False


_AWAITABLES = ("Awaitable", "Coroutine")  # other names may be those of a sample's type


def _is_awaited(method: Any) -> bool:
    if not callable(method):
        return False
    if inspect.iscoroutinefunction(inspect.unwrap(method)):
        return True
    returned = getattr(method, "__annotations__", {}).get("return")
    # A string with postponed annotations, else a type or a generic alias.
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", None) or repr(returned)
    return text.partition("[")[0].rpartition(".")[2] in _AWAITABLES


def is_concurrent(dataset: Any, fetch_threads: int) -> bool:
    """Whether a worker carries out several tasks at a time: samples are awaited, or fetched by threads."""
    return fetch_threads > 0 or is_async_dataset(dataset)


def is_async_stream(dataset: Any) -> bool:
    """Whether it is an asynchronous iterable; torch, which does not know `__aiter__`, takes it for a map dataset."""
    kind = type(dataset)
    return hasattr(kind, "__aiter__") and not hasattr(kind, "__getitem__") and not isinstance(dataset, IterableDataset)


def make_blocking_fetcher(
    dataset: Any,
    *,
    iterable: bool,
    auto_collation: bool,
    collate: Callable[[Any], Any],
    drop_last: bool,
    handler: SampleErrorHandler | None = None,
    worker: int = 0,
    read: int = 0,
    decode: Callable[[Any], Any] | None = None,
) -> BlockingFetcher:
    """Make the fetcher for a blocking dataset. An iterable dataset's `__iter__` is called here.

    Args:
        dataset: the dataset.
        iterable: read it with `next`.
        auto_collation: an index is a list of sample indices.
        collate: gets a list of samples, or one sample without automatic batching.
        drop_last: drop a stream's last batch if it is short.
        handler: handles samples that raise; None: they fail their batch.
        worker: number of the worker, for the text of errors.
        read: samples that were read from the stream before, for the text of errors and for records.
        decode: the user's function from a sample as read to a sample as collated.
    """
    if iterable:
        return _StreamFetcher(dataset, auto_collation, collate, drop_last, handler, worker, read, decode)
    if decode is not None:
        dataset = DecodedMap(dataset, decode, one_by_one=handler is not None)
    return _MapFetcher(dataset, auto_collation, collate, handler)


def make_async_fetcher(
    dataset: Any,
    how: Batching,
    *,
    iterable: bool,
    concurrency: int,
    read: int = 0,
    threads: JobThreads | None = None,
    worker_stream: WorkerStreamLike | None = None,
) -> AsyncFetcher:
    """Make the fetcher for an asynchronous dataset. An iterable dataset's `__aiter__` is called here.

    Args:
        dataset: the dataset.
        how: how samples become batches.
        iterable: read it with `anext`.
        concurrency: samples that are awaited at a time at most.
        read: as in `make_blocking_fetcher`.
        threads: if given, they fetch the samples of a blocking map dataset.
        worker_stream: reads the shards that are assigned to this worker, instead of `dataset`.
    """
    if worker_stream is not None:
        return WorkerStreamFetcher(worker_stream, how, read)
    if iterable:
        return AsyncStreamFetcher(aiter(dataset), how, read)
    if threads is not None:
        return ThreadMapFetcher(dataset, how, threads)
    return AsyncMapFetcher(awaited_view(dataset, is_async_dataset), how, concurrency)


class _MapFetcher:
    def __init__(
        self, dataset: Any, auto_collation: bool, collate: Callable[[Any], Any], handler: SampleErrorHandler | None
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._tolerant = None if handler is None else TolerantMap(dataset, handler)
        self._batched_get = handler is not None and fetches_batches(dataset)

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        index, dataset = possibly_batched_index, self._dataset
        data: Any
        if self._tolerant is not None:
            bad = [] if bad is None else bad
            if self._auto_collation:
                data = self._tolerant.samples(index, None, bad, batched=self._batched_get)
            else:
                data = self._tolerant.sample(index, None, bad)
        elif not self._auto_collation:
            try:
                data = dataset[index]
            except Exception as error:
                add_note(error, describe_sample(index))
                raise
        elif hasattr(dataset, "__getitems__") and dataset.__getitems__:  # as in torch, `__getitems__` may be None
            try:
                data = dataset.__getitems__(index)
            except Exception as error:
                add_note(error, describe_batch(index))
                raise
        else:
            indices = iter(index)
            try:
                data = [dataset[one] for one in indices]
            except Exception as error:
                add_note(error, _describe_last(index, indices))
                raise
        try:
            return self._collate(data)
        except Exception as error:
            add_note(error, describe_collation(index, batched=self._auto_collation))
            raise


def _describe_last(index: Any, indices: Iterator[Any]) -> str:
    """Describe the sample that was fetched last, from the length left in the iterator, which may be unknown."""
    try:
        item = len(index) - operator.length_hint(indices, len(index)) - 1
        return describe_sample(index[item], item) if item >= 0 else describe_batch(index)
    except Exception:
        return describe_batch(index)


class _StreamFetcher:
    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        drop_last: bool,
        handler: SampleErrorHandler | None,
        worker: int,
        read: int,
        decode: Callable[[Any], Any] | None,
    ) -> None:
        # Names as in torch's fetcher.
        self.dataset_iter: Iterator[Any] = iter(dataset)
        self.collate_fn = collate
        self.ended = False
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._handler = handler
        self._worker = worker
        self._read = read
        self._decode = decode
        self._stream_errors = StreamErrors()

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        if self.ended:
            raise StopIteration
        first = self._read
        data: Any
        if self._handler is not None:
            samples = self._tolerant(self._handler, possibly_batched_index, [] if bad is None else bad)
            data = samples if self._auto_collation else samples[0]
        elif self._auto_collation:
            data = self._batch(possibly_batched_index)
        else:
            try:
                data = next(self.dataset_iter)
            except StopIteration:
                raise
            except Exception as error:
                add_note(error, describe_stream_sample(first, self._worker))
                raise
            self._read += 1
            if self._decode is not None:
                data = self._decoded(self._decode, data)
        try:
            return self.collate_fn(data)
        except Exception as error:
            add_note(error, describe_stream_collation(first, self._read, self._worker))
            raise

    def _decoded(self, decode: Callable[[Any], Any], sample: Any) -> Any:
        """Decode the sample that was read last. After an error the stream goes on behind it."""
        try:
            return decode(sample)
        except Exception as error:
            add_note(error, describe_stream_sample(self._read - 1, self._worker))
            if not isinstance(error, StopIteration):  # it would look like the end of the stream
                raise
            raise RuntimeError("decode raised StopIteration") from error

    def _batch(self, index: Any) -> list[Any]:
        if self._decode is not None:
            return self._decoded_batch(self._decode, index)
        iterator = self.dataset_iter
        data: list[Any] = []
        try:
            for _ in index:
                data.append(next(iterator))  # noqa: PERF401 - a comprehension cannot end with a StopIteration
        except StopIteration:
            self.ended = True
        except Exception as error:
            self._read += len(data)
            add_note(error, describe_stream_sample(self._read, self._worker))
            raise
        self._read += len(data)
        if not data or (self._drop_last and len(data) < len(index)):
            raise StopIteration
        return data

    def _decoded_batch(self, decode: Callable[[Any], Any], index: Any) -> list[Any]:
        data: list[Any] = []
        for _ in index:
            try:
                sample = next(self.dataset_iter)
            except StopIteration:
                self.ended = True
                break
            except Exception as error:
                add_note(error, describe_stream_sample(self._read, self._worker))
                raise
            self._read += 1
            data.append(self._decoded(decode, sample))
        if not data or (self._drop_last and len(data) < len(index)):
            raise StopIteration
        return data

    def _tolerant(self, handler: SampleErrorHandler, index: Any, bad: list[BadSample]) -> list[Any]:
        """Return the samples of a batch. One that raises counts towards the batch size, as in a map dataset: its batch
        is one sample short, and later batches are unaffected.
        """
        data: list[Any] = []
        before = len(bad)
        for _ in index if self._auto_collation else range(1):
            try:
                sample = next(self.dataset_iter)
            except StopIteration:
                break
            except Exception as error:
                number = self._read
                if self._stream_errors.failed(error, number):
                    add_note(error, describe_stream_sample(number, self._worker))
                    raise
                self._read += 1
                sample = self._on_sample_error(handler, number, error, bad)
            else:
                self._read += 1
                if self._decode is not None:
                    sample = self._tolerant_decode(handler, self._decode, sample, bad)
            if sample is not DROPPED:
                data.append(sample)
        else:
            if not data:
                raise NoSamples
            return data
        dead = self._stream_errors.ended(self._read)
        self.ended = self._auto_collation or dead is not None
        if dead is not None:
            try:
                raise dead
            finally:
                del dead  # it refers to this frame
        if data and not self._drop_last:
            return data
        if len(bad) > before:
            raise NoSamples
        raise StopIteration

    def _tolerant_decode(
        self, handler: SampleErrorHandler, decode: Callable[[Any], Any], sample: Any, bad: list[BadSample]
    ) -> Any:
        try:
            return decode(sample)
        except Exception as error:
            return self._on_sample_error(handler, self._read - 1, error, bad, read=True)

    def _on_sample_error(
        self, handler: SampleErrorHandler, number: int, error: Exception, bad: list[BadSample], *, read: bool = False
    ) -> Any:
        """`read`: the sample was read, so it has a number in the stream already."""
        if isinstance(self.dataset_iter, SeededIterator):
            if read:
                self.dataset_iter.again()
            else:
                self.dataset_iter.lose()
        try:
            return handler.handle(None, number, error, bad)
        except Exception as raised:
            add_note(raised, describe_stream_sample(number, self._worker))
            raise
