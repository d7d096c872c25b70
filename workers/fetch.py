"""From an index to samples: the fetchers of a worker, blocking and asynchronous.

Data path: scheduler -> worker: [fetch] -> collate -> codec -> ring.

Blocking datasets go through torch's own fetchers, so that `__getitems__`, short last batches, `drop_last` and the end
of an iterable dataset are torch's to the letter. Datasets with ``async def __getitem__`` (or `__getitems__`, or
`__aiter__`) have their samples fetched concurrently and put back in the order of the indices.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torch.utils.data import _DatasetKind as DatasetKind

from asyncloader.workers.seeded_fetch import fetches_batches
from asyncloader.workers.seeding import GlobalWatch, SampleSeeder, global_generators_kept

__all__ = [
    "AsyncFetcher",
    "AsyncSeeding",
    "BlockingFetcher",
    "is_async_dataset",
    "is_async_stream",
    "make_async_fetcher",
    "make_blocking_fetcher",
]


class BlockingFetcher(Protocol):
    """torch's protocol: an index (or a list of them) to a collated batch; StopIteration at a stream's end."""

    def fetch(self, possibly_batched_index: Any) -> Any:
        """The batch."""
        ...


class AsyncFetcher(Protocol):
    """The same, awaited. The end of a stream is StopAsyncIteration."""

    async def fetch(self, index: Any) -> Any:
        """The batch."""
        ...


def is_async_dataset(dataset: Any) -> bool:
    """Whether samples must be awaited: the dataset's own methods, or those of what it is a view of.

    A dataset with both `__aiter__` and `__iter__` is asynchronous: torch's IterableDataset demands an `__iter__`.
    """
    kind = type(dataset)
    if hasattr(kind, "__aiter__"):
        return True
    for name in ("__getitem__", "__getitems__"):
        if inspect.iscoroutinefunction(getattr(kind, name, None)):
            return True
    if isinstance(dataset, Subset):
        return is_async_dataset(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(is_async_dataset(part) for part in dataset.datasets)
    return False


def is_async_stream(dataset: Any) -> bool:
    """Whether it is an asynchronous iterable that torch would take for a map dataset, not knowing `__aiter__`."""
    kind = type(dataset)
    return hasattr(kind, "__aiter__") and not hasattr(kind, "__getitem__") and not isinstance(dataset, IterableDataset)


def make_blocking_fetcher(
    dataset: Any, *, iterable: bool, auto_collation: bool, collate: Callable[[Any], Any], drop_last: bool
) -> BlockingFetcher:
    """torch's fetcher for this kind of dataset. An iterable dataset's `__iter__` is called here.

    `collate` gets a list of samples, or one sample without automatic batching.
    """
    kind = DatasetKind.Iterable if iterable else DatasetKind.Map
    fetcher: BlockingFetcher = DatasetKind.create_fetcher(kind, dataset, auto_collation, collate, drop_last)
    return fetcher


def make_async_fetcher(
    dataset: Any,
    *,
    iterable: bool,
    auto_collation: bool,
    collate: Callable[[Any], Any],
    drop_last: bool,
    concurrency: int,
    seeding: AsyncSeeding | None = None,
) -> AsyncFetcher:
    """The fetcher of an asynchronous dataset; at most `concurrency` samples are awaited at a time. With `seeding`, the
    index of a map dataset is ``(position, index)``.
    """
    if iterable:
        return _AsyncIterableFetcher(dataset, auto_collation, collate, drop_last, seeding)
    return _AsyncMapFetcher(dataset, auto_collation, collate, concurrency, seeding)


class AsyncSeeding:
    """Seeded mode for samples that are made concurrently: each has its own generators, the global ones are watched.

    Args:
        samples: seeds samples in their contexts.
        collate: seeds the user's collation, which is not concurrent, with the global generators; None: leave it alone.
        replicas: difference of the positions of neighbouring samples.
        watch: warns when samples draw from the global generators; None where others draw from them, too.
    """

    def __init__(
        self, samples: SampleSeeder, collate: SampleSeeder | None, replicas: int, watch: GlobalWatch | None
    ) -> None:
        self.samples = samples
        self.replicas = replicas
        self._collate = collate
        self._watch = watch

    def collated(self, collate: Callable[[Any], Any], first: int, samples: Any) -> Any:
        """The batch of these samples, the first of which has position `first`."""
        if self._watch is not None:
            self._watch.look()
        if self._collate is None:
            return collate(samples)
        if self._watch is None:
            with global_generators_kept():
                self._collate.collation(first)
                return collate(samples)
        self._collate.collation(first)
        try:
            return collate(samples)
        finally:
            self._watch.rebase()


class _AsyncMapFetcher:
    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        concurrency: int,
        seeding: AsyncSeeding | None,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._room = asyncio.Semaphore(concurrency)
        self._batched = callable(getattr(dataset, "__getitems__", None))
        self._seeding = seeding
        self._whole = auto_collation and fetches_batches(dataset)

    async def fetch(self, index: Any) -> Any:
        if self._seeding is not None:
            return await self._fetch_seeded(self._seeding, *index)
        if not self._auto_collation:
            return self._collate(await self._one(index))
        if self._batched:
            samples = self._dataset.__getitems__(index)
            if inspect.isawaitable(samples):
                async with self._room:
                    samples = await samples
            if any(inspect.isawaitable(s) for s in samples):  # a Subset of an asynchronous dataset
                pending = samples
                try:
                    samples = await self._all(pending, self._settle)
                finally:
                    for sample in pending:
                        if inspect.iscoroutine(sample):
                            sample.close()  # those that an error kept from being awaited; a no-op for the others
            return self._collate(samples)
        return self._collate(await self._all(index, self._one))

    async def _fetch_seeded(self, seeding: AsyncSeeding, first: int, index: Any) -> Any:
        samples: Any
        if not self._auto_collation:
            samples = await self._one_seeded((first, index))
        elif self._whole:
            seeding.samples.batch(first)
            samples = self._dataset.__getitems__(index)
            if inspect.isawaitable(samples):
                async with self._room:
                    samples = await samples
        else:
            places = range(first, first + len(index) * seeding.replicas, seeding.replicas)
            samples = await self._all(zip(places, index, strict=True), self._one_seeded)
        return seeding.collated(self._collate, first, samples)

    async def _one_seeded(self, placed: tuple[int, Any]) -> Any:
        assert self._seeding is not None
        position, index = placed
        # In this sample's own task, hence in a context of its own.
        self._seeding.samples.sample(position)
        return await self._one(index)

    async def _one(self, index: Any) -> Any:
        async with self._room:
            sample = self._dataset[index]
            return await sample if inspect.isawaitable(sample) else sample

    async def _settle(self, sample: Any) -> Any:
        async with self._room:
            return await sample if inspect.isawaitable(sample) else sample

    async def _all(self, items: Iterable[Any], fetch: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """Fetch concurrently, answer in order. The first error (by time) cancels the others and is raised alone."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_as_coroutine(fetch(item))) for item in items]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first.with_traceback(first.__traceback__) from None
        return [task.result() for task in tasks]


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _AsyncIterableFetcher:
    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        drop_last: bool,
        seeding: AsyncSeeding | None,
    ) -> None:
        # Names as in torch's fetcher.
        self.dataset_iter: AsyncIterator[Any] = aiter(dataset)
        self.collate_fn = collate
        self.ended = False
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._seeding = seeding
        self._turn = asyncio.Lock()  # tasks of one worker read its stream one after the other, in their order

    async def fetch(self, index: Sequence[Any] | None) -> Any:
        async with self._turn:
            if self.ended:
                raise StopAsyncIteration
            if not self._auto_collation:
                return self._collated(await self._next())
            assert index is not None
            samples: list[Any] = []
            try:
                while len(samples) < len(index):
                    samples.append(await self._next())
            except StopAsyncIteration:
                if not samples or self._drop_last:
                    raise
            return self._collated(samples)

    def _collated(self, samples: Any) -> Any:
        if self._seeding is None:
            return self.collate_fn(samples)
        read = getattr(self.dataset_iter, "samples", 0)
        return self._seeding.collated(self.collate_fn, read, samples)

    async def _next(self) -> Any:
        try:
            return await anext(self.dataset_iter)
        except StopAsyncIteration:
            self.ended = True
            raise
