"""Fetching from asynchronous datasets: samples are awaited concurrently, and put back in the order of the indices.

Data path: scheduler -> worker: [async_fetch] -> collate -> codec -> ring. The blocking fetchers are in `fetch.py` and
`seeded_fetch.py`.

Samples that raise, where they do not fail their batch, are dealt with as in `guarded_fetch.py`. Records are put in the
order of the batch, whichever sample raised first.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from asyncloader.workers.bad_samples import LOST, BadSample, Guard, NoSamples, StreamGuard
from asyncloader.workers.error_notes import (
    add_note,
    batch_place,
    collation_place,
    sample_place,
    stream_collation_place,
    stream_place,
)
from asyncloader.workers.guarded_fetch import fetches_single
from asyncloader.workers.seeded_fetch import SeededAsyncIterator, fetches_batches
from asyncloader.workers.seeding import GlobalWatch, SampleSeeder, global_generators_kept

__all__ = ["AsyncMapFetcher", "AsyncSeeding", "AsyncStreamFetcher"]


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


class AsyncMapFetcher:
    """Fetches from a map dataset.

    Args:
        dataset: the dataset.
        auto_collation: whether an index is a list of them.
        collate: from the list of samples, or the one sample, to the batch.
        concurrency: samples that are awaited at a time, over all batches.
        seeding: of the epoch, an index is ``(position, index)`` then; None in torch mode.
        guard: what becomes of samples that raise; None: the first one fails its batch.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        concurrency: int,
        seeding: AsyncSeeding | None,
        guard: Guard | None,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._collate = collate
        self._room = asyncio.Semaphore(concurrency)
        self._seeding = seeding
        self._replicas = 1 if seeding is None else seeding.replicas
        self._guard = guard
        # torch asks the `__getitems__` of its views, too, whose samples are seeded and guarded one by one.
        one_by_one = seeding is not None or guard is not None
        has_batches = fetches_batches(dataset) if one_by_one else callable(getattr(dataset, "__getitems__", None))
        self._whole = auto_collation and has_batches
        self._single = fetches_single(dataset)

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch. `bad` gets records of samples that raised.

        Raises:
            NoSamples: the guard left all of them out.
        """
        first: int | None = None
        if self._seeding is not None:
            first, index = index
        if self._guard is not None:
            samples = await self._guarded(self._guard, first, index, [] if bad is None else bad)
        elif not self._auto_collation:
            try:
                samples = await self._make(index, first)
            except Exception as error:
                add_note(error, sample_place(index, None, first))
                raise
        elif self._whole:
            samples = await self._at_once(first, index)
        else:
            samples = await self._one_by_one(first, index)
        try:
            if self._seeding is not None and first is not None:
                return self._seeding.collated(self._collate, first, samples)
            return self._collate(samples)
        except Exception as error:
            add_note(error, collation_place(index, batched=self._auto_collation))
            raise

    async def _at_once(self, first: int | None, index: Any) -> Any:
        """What `__getitems__` gives; one by one if that is not yet the samples, as for a Subset in torch mode."""
        if self._seeding is not None and first is not None:
            self._seeding.samples.batch(first)
        try:
            samples = self._dataset.__getitems__(index)
            if inspect.isawaitable(samples):
                async with self._room:
                    samples = await samples
        except Exception as error:
            add_note(error, batch_place(index))
            raise
        if self._seeding is not None or not any(map(inspect.isawaitable, samples)):
            return samples
        pending = samples
        try:
            return await self._all(map(self._settle, pending), lambda item: sample_place(index[item], item))
        finally:
            for sample in pending:
                if inspect.iscoroutine(sample):
                    sample.close()  # those that an error kept from being awaited; a no-op for the others

    async def _one_by_one(self, first: int | None, index: Any) -> list[Any]:
        places = self._places(first, index)
        return await self._all(
            (self._make(one, position) for one, position in places),
            lambda item: sample_place(index[item], item, None if first is None else first + item * self._replicas),
        )

    def _places(self, first: int | None, index: Any) -> Iterable[tuple[Any, int | None]]:
        if first is None:
            return zip(index, itertools.repeat(None))
        return zip(index, range(first, first + len(index) * self._replicas, self._replicas), strict=True)

    async def _make(self, index: Any, position: int | None) -> Any:
        if self._seeding is not None and position is not None:
            # In this sample's own task, hence in a context of its own.
            self._seeding.samples.sample(position)
        async with self._room:
            sample = self._dataset[index]
            return await sample if inspect.isawaitable(sample) else sample

    async def _settle(self, sample: Any) -> Any:
        async with self._room:
            return await sample if inspect.isawaitable(sample) else sample

    async def _all(
        self, samples: Iterable[Coroutine[Any, Any, Any]], place: Callable[[int], str] | None = None
    ) -> list[Any]:
        """Await concurrently, answer in order. The first error (by time) cancels the others and is raised alone, with
        a note on the `place` of its item.
        """
        tasks: list[asyncio.Task[Any]] = []
        first: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for sample in samples:
                    tasks.append(group.create_task(sample))  # noqa: PERF401 - they are needed if this fails
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
        if first is None:
            return [task.result() for task in tasks]
        if place is not None:
            _note_place(first, tasks, place)
        try:
            raise first  # not from where the group is: the error keeps its own cause and context
        finally:
            del first, tasks  # they refer to this frame

    # ------------------------------------------------------------------------------------- past samples that raise

    async def _guarded(self, guard: Guard, first: int | None, index: Any, bad: list[BadSample]) -> Any:
        if not self._auto_collation:
            sample = await self._guarded_one(guard, index, first, None, bad)
            if sample is LOST:
                raise NoSamples
            return sample
        failure: Exception | None = None
        if self._whole:
            try:
                return await self._at_once(first, index)
            except Exception as error:
                if not self._single:
                    failure = error
        found: dict[int, list[BadSample]] = {}

        def one(item: int, index: Any, position: int | None) -> Coroutine[Any, Any, Any]:
            if failure is not None:
                return self._lost(guard, index, position, item, failure, found.setdefault(item, []))
            return self._guarded_one(guard, index, position, item, found.setdefault(item, []))

        try:
            samples = await self._all(one(item, *place) for item, place in enumerate(self._places(first, index)))
        finally:
            failure = None  # it refers to this frame
            for item in sorted(found):
                bad += found[item]
        kept = [sample for sample in samples if sample is not LOST]
        if not kept and samples:
            raise NoSamples
        return kept

    async def _guarded_one(
        self, guard: Guard, index: Any, position: int | None, item: int | None, bad: list[BadSample]
    ) -> Any:
        try:
            return await self._make(index, position)
        except Exception as error:
            return await self._lost(guard, index, position, item, error, bad)

    async def _lost(
        self,
        guard: Guard,
        index: Any,
        position: int | None,
        item: int | None,
        error: Exception,
        bad: list[BadSample],
    ) -> Any:
        if self._seeding is not None and position is not None:
            self._seeding.samples.sample(position)  # for what `on_error` draws
        make = (lambda another: self._make(another, position)) if self._single else None
        try:
            return await guard.lost_async(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, sample_place(index, item, position))
            raise


class AsyncStreamFetcher:
    """Reads an asynchronous iterable dataset. Tasks of one worker read it one after the other, in their order.

    Args:
        dataset: the dataset; its `__aiter__` is called here.
        auto_collation: whether a batch is a list of samples.
        collate: from the list of samples, or the one sample, to the batch.
        drop_last: leave out the last batch if it is short.
        seeding: of the epoch; None in torch mode.
        guard: what becomes of samples that raise; None: they fail their batch.
        worker: number of the worker.
        read: samples that were read from the stream before.
    """

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        drop_last: bool,
        seeding: AsyncSeeding | None,
        guard: Guard | None,
        worker: int,
        read: int,
    ) -> None:
        # Names as in torch's fetcher.
        self.dataset_iter: AsyncIterator[Any] = aiter(dataset)
        self.collate_fn = collate
        self.ended = False
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._seeding = seeding
        self._guard = guard
        self._worker = worker
        self._read = read
        self._progress = StreamGuard()
        self._turn = asyncio.Lock()

    async def fetch(self, index: Sequence[Any] | None, bad: list[BadSample] | None = None) -> Any:
        """The next batch. `bad` gets records of samples that raised.

        Raises:
            StopAsyncIteration: the stream is over.
            NoSamples: the guard left all samples of the batch out.
        """
        async with self._turn:
            if self.ended:
                raise StopAsyncIteration
            first = self._read
            size = 1
            if self._auto_collation:
                assert index is not None
                size = len(index)
            samples = await self._batch(size, [] if bad is None else bad)
            data = samples if self._auto_collation else samples[0]
            try:
                return self._collated(data)
            except Exception as error:
                add_note(error, stream_collation_place(first, self._read, self._worker))
                raise

    def _collated(self, samples: Any) -> Any:
        if self._seeding is None:
            return self.collate_fn(samples)
        read = getattr(self.dataset_iter, "samples", 0)
        return self._seeding.collated(self.collate_fn, read, samples)

    async def _batch(self, size: int, bad: list[BadSample]) -> list[Any]:
        """As in `fetch.py`: a sample that raises takes a place in its batch, if there is a guard."""
        data: list[Any] = []
        before = len(bad)
        for _ in range(size):
            try:
                sample = await anext(self.dataset_iter)
            except StopAsyncIteration:
                break
            except Exception as error:
                place = self._read
                if self._guard is None or self._progress.failed(error, place):
                    add_note(error, stream_place(place, self._worker))
                    raise
                self._read += 1
                sample = await self._lost(self._guard, place, error, bad)
            else:
                self._read += 1
            if sample is not LOST:
                data.append(sample)
        else:
            if not data and size:
                raise NoSamples
            return data
        self.ended = True
        dead = self._progress.ended(self._read)
        if dead is not None:
            try:
                raise dead
            finally:
                del dead  # it refers to this frame
        if data and not self._drop_last:
            return data
        if len(bad) > before:
            raise NoSamples
        raise StopAsyncIteration

    async def _lost(self, guard: Guard, place: int, error: Exception, bad: list[BadSample]) -> Any:
        if isinstance(self.dataset_iter, SeededAsyncIterator):
            self.dataset_iter.lose()
        try:
            return await guard.lost_async(None, place, error, bad)
        except Exception as raised:
            add_note(raised, stream_place(place, self._worker))
            raise


def _note_place(error: BaseException, tasks: list[asyncio.Task[Any]], place: Callable[[int], str]) -> None:
    for item, task in enumerate(tasks):
        if not task.cancelled() and task.exception() is error:
            try:
                add_note(error, place(item))
            except Exception:  # an index that is no sequence
                add_note(error, f"while fetching item {item} of the batch")
