"""From an index to samples: what kind of fetcher a dataset needs, and the blocking ones of torch mode.

Data path: scheduler -> worker: [fetch] -> collate -> codec -> ring.

The blocking fetchers keep torch's rules to the letter: `__getitems__`, short last batches, `drop_last`, the end of an
iterable dataset, the order in which the dataset is asked. They add to errors which sample was theirs, and, with a
`Guard`, go on past samples that raise. Those of seeded mode are in `seeded_fetch.py`; those that have many samples in
flight in `async_fetch.py` and, by threads, in `thread_fetch.py`.
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
    batch_place,
    collation_place,
    sample_place,
    stream_collation_place,
    stream_place,
)
from asyncloader.workers.fetch.guarded_fetch import GuardedMap
from asyncloader.workers.fetch.map_async import AsyncMapFetcher
from asyncloader.workers.fetch.map_threads import ThreadMapFetcher
from asyncloader.workers.fetch.sample_errors import LOST, BadSample, Guard, NoSamples, StreamGuard
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
    """torch's protocol: an index (or a list of them) to a collated batch; StopIteration at a stream's end.

    `bad` gets records of samples that raised; NoSamples if that leaves none. Both only with a guard.
    """

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch."""
        ...


class AsyncFetcher(Protocol):
    """The same, awaited. The end of a stream is StopAsyncIteration.

    Those of map datasets have it in two parts, `samples` and `collated`, for who collates at another time.
    """

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch."""
        ...


def is_async_dataset(dataset: Any) -> bool:
    """Whether samples must be awaited: the dataset's own methods, or those of what it is a view of.

    A dataset with both `__aiter__` and `__iter__` is asynchronous: torch's IterableDataset demands an `__iter__`. So is
    one with `__aenter__`, and one whose plain methods are annotated to return awaitables, or wrap coroutine functions
    (`functools.wraps`): whether a plain method returns awaitables cannot be seen before it is called.
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


_AWAITABLES = ("Awaitable", "Coroutine")  # others' names may be those of a sample's type


def _is_awaited(method: Any) -> bool:
    if not callable(method):
        return False
    if inspect.iscoroutinefunction(inspect.unwrap(method)):
        return True
    returned = getattr(method, "__annotations__", {}).get("return")
    # A text where annotations are postponed, else a type, or its generic alias.
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", None) or repr(returned)
    return text.partition("[")[0].rpartition(".")[2] in _AWAITABLES


def is_concurrent(dataset: Any, fetch_threads: int) -> bool:
    """Whether a worker has several tasks in hand at a time: samples are awaited, or fetched by threads."""
    return fetch_threads > 0 or is_async_dataset(dataset)


def is_async_stream(dataset: Any) -> bool:
    """Whether it is an asynchronous iterable that torch would take for a map dataset, not knowing `__aiter__`."""
    kind = type(dataset)
    return hasattr(kind, "__aiter__") and not hasattr(kind, "__getitem__") and not isinstance(dataset, IterableDataset)


def make_blocking_fetcher(
    dataset: Any,
    *,
    iterable: bool,
    auto_collation: bool,
    collate: Callable[[Any], Any],
    drop_last: bool,
    guard: Guard | None = None,
    worker: int = 0,
    read: int = 0,
    decode: Callable[[Any], Any] | None = None,
) -> BlockingFetcher:
    """The fetcher for this kind of dataset. An iterable dataset's `__iter__` is called here.

    Args:
        dataset: the dataset.
        iterable: read it with `next`.
        auto_collation: an index is a list of them.
        collate: gets a list of samples, or one sample without automatic batching.
        drop_last: leave out a stream's last batch if it is short.
        guard: what becomes of samples that raise; None: they fail their batch.
        worker: number of the worker, for the text of errors.
        read: samples that were read from the stream before, for the text of errors and for records.
        decode: the user's, from a sample as it was read to a sample as it is collated.
    """
    if iterable:
        return _StreamFetcher(dataset, auto_collation, collate, drop_last, guard, worker, read, decode)
    if decode is not None:
        dataset = DecodedMap(dataset, decode, one_by_one=guard is not None)
    return _MapFetcher(dataset, auto_collation, collate, guard)


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
    """The fetcher of an asynchronous dataset. An iterable dataset's `__aiter__` is called here.

    Args:
        dataset: the dataset.
        how: how samples become batches.
        iterable: read it with `anext`.
        concurrency: samples that are awaited at a time at most.
        read: as in `make_blocking_fetcher`.
        threads: fetch the samples of a blocking map dataset.
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
    def __init__(self, dataset: Any, auto_collation: bool, collate: Callable[[Any], Any], guard: Guard | None) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._guarded = None if guard is None else GuardedMap(dataset, guard)
        self._whole = guard is not None and fetches_batches(dataset)

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        index, dataset = possibly_batched_index, self._dataset
        data: Any
        if self._guarded is not None:
            bad = [] if bad is None else bad
            if self._auto_collation:
                data = self._guarded.samples(index, None, bad, whole=self._whole)
            else:
                data = self._guarded.sample(index, None, bad)
        elif not self._auto_collation:
            try:
                data = dataset[index]
            except Exception as error:
                add_note(error, sample_place(index))
                raise
        elif hasattr(dataset, "__getitems__") and dataset.__getitems__:  # torch's rule: one that is None is none
            try:
                data = dataset.__getitems__(index)
            except Exception as error:
                add_note(error, batch_place(index))
                raise
        else:
            places = iter(index)
            try:
                data = [dataset[one] for one in places]
            except Exception as error:
                add_note(error, _place(index, places))
                raise
        try:
            return self._collate(data)
        except Exception as error:
            add_note(error, collation_place(index, batched=self._auto_collation))
            raise


def _place(index: Any, places: Iterator[Any]) -> str:
    """The sample that was asked for last. What is left of a list's iterator tells; other kinds may not say."""
    try:
        item = len(index) - operator.length_hint(places, len(index)) - 1
        return sample_place(index[item], item) if item >= 0 else batch_place(index)
    except Exception:
        return batch_place(index)


class _StreamFetcher:
    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        drop_last: bool,
        guard: Guard | None,
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
        self._guard = guard
        self._worker = worker
        self._read = read
        self._decode = decode
        self._progress = StreamGuard()

    def fetch(self, possibly_batched_index: Any, bad: list[BadSample] | None = None) -> Any:
        if self.ended:
            raise StopIteration
        first = self._read
        data: Any
        if self._guard is not None:
            samples = self._guarded(self._guard, possibly_batched_index, [] if bad is None else bad)
            data = samples if self._auto_collation else samples[0]
        elif self._auto_collation:
            data = self._batch(possibly_batched_index)
        else:
            try:
                data = next(self.dataset_iter)
            except StopIteration:
                raise
            except Exception as error:
                add_note(error, stream_place(first, self._worker))
                raise
            self._read += 1
            if self._decode is not None:
                data = self._decoded(self._decode, data)
        try:
            return self.collate_fn(data)
        except Exception as error:
            add_note(error, stream_collation_place(first, self._read, self._worker))
            raise

    def _decoded(self, decode: Callable[[Any], Any], sample: Any) -> Any:
        """The sample that was read last. An error leaves the stream behind it."""
        try:
            return decode(sample)
        except Exception as error:
            add_note(error, stream_place(self._read - 1, self._worker))
            if not isinstance(error, StopIteration):  # that would pass for the stream's end
                raise
            raise RuntimeError("decode raised StopIteration") from error

    def _batch(self, places: Any) -> list[Any]:
        if self._decode is not None:
            return self._decoded_batch(self._decode, places)
        iterator = self.dataset_iter
        data: list[Any] = []
        try:
            for _ in places:
                data.append(next(iterator))  # noqa: PERF401 - a comprehension cannot end with a StopIteration
        except StopIteration:
            self.ended = True
        except Exception as error:
            self._read += len(data)
            add_note(error, stream_place(self._read, self._worker))
            raise
        self._read += len(data)
        if not data or (self._drop_last and len(data) < len(places)):
            raise StopIteration
        return data

    def _decoded_batch(self, decode: Callable[[Any], Any], places: Any) -> list[Any]:
        data: list[Any] = []
        for _ in places:
            try:
                sample = next(self.dataset_iter)
            except StopIteration:
                self.ended = True
                break
            except Exception as error:
                add_note(error, stream_place(self._read, self._worker))
                raise
            self._read += 1
            data.append(self._decoded(decode, sample))
        if not data or (self._drop_last and len(data) < len(places)):
            raise StopIteration
        return data

    def _guarded(self, guard: Guard, places: Any, bad: list[BadSample]) -> list[Any]:
        """A sample that raises takes a place in its batch, as a map dataset's does: the batch is short by it, and those
        after it are what they would be anyway.
        """
        data: list[Any] = []
        before = len(bad)
        for _ in places if self._auto_collation else range(1):
            try:
                sample = next(self.dataset_iter)
            except StopIteration:
                break
            except Exception as error:
                place = self._read
                if self._progress.failed(error, place):
                    add_note(error, stream_place(place, self._worker))
                    raise
                self._read += 1
                sample = self._lost(guard, place, error, bad)
            else:
                self._read += 1
                if self._decode is not None:
                    sample = self._guarded_decoded(guard, self._decode, sample, bad)
            if sample is not LOST:
                data.append(sample)
        else:
            if not data:
                raise NoSamples
            return data
        dead = self._progress.ended(self._read)
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

    def _guarded_decoded(self, guard: Guard, decode: Callable[[Any], Any], sample: Any, bad: list[BadSample]) -> Any:
        try:
            return decode(sample)
        except Exception as error:
            return self._lost(guard, self._read - 1, error, bad, read=True)

    def _lost(self, guard: Guard, place: int, error: Exception, bad: list[BadSample], *, read: bool = False) -> Any:
        """`read`: it had its number in the stream already."""
        if isinstance(self.dataset_iter, SeededIterator):
            if read:
                self.dataset_iter.again()
            else:
                self.dataset_iter.lose()
        try:
            return guard.lost(None, place, error, bad)
        except Exception as raised:
            add_note(raised, stream_place(place, self._worker))
            raise
