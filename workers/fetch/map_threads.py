"""Fetches from blocking map datasets in threads: many reads in flight, results in the order of the indices.

Data path: scheduler -> worker: [map_threads] -> collate -> codec -> ring. Without workers it runs beside the consumer.

The threads take samples of all batches from one queue, the oldest batch's first, so a slow sample occupies one thread
while later ones start and finish. A dataset's own `__getitems__` makes a batch in one thread. Each sample, or batch, is
made in a context of its own: context variables that it sets are not seen by others.

A thread cannot be interrupted. When a sample of a batch raises, or the batch is cancelled, its samples that have not
begun are skipped; those that have begun run to their end, and their results are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from asyncloader.workers.fetch.batching import Batching
from asyncloader.workers.fetch.error_notes import add_note, describe_batch, describe_sample
from asyncloader.workers.fetch.guarded_fetch import fetches_single
from asyncloader.workers.fetch.sample_errors import DROPPED, BadSample, NoSamples, SampleErrorHandler
from asyncloader.workers.fetch.seeded_fetch import fetches_batches
from asyncloader.workers.fetch.threads import JobThreads

__all__ = ["ThreadMapFetcher"]


class ThreadMapFetcher:
    """Fetches from a blocking map dataset, whose methods are called by several threads.

    Args:
        dataset: the dataset.
        how: how samples become batches. A decoder without threads of its own runs where the sample was read.
        threads: the threads.
    """

    def __init__(self, dataset: Any, how: Batching, threads: JobThreads) -> None:
        self._dataset = dataset
        self._how = how
        self._threads = threads
        self._decode = None if how.decoder is None else how.decoder.function
        self._batched_get = how.auto_collation and fetches_batches(dataset)
        self._single = fetches_single(dataset)

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """Return the batch. `bad` gets records of samples that raised.

        Raises:
            NoSamples: all of them were dropped.
        """
        return self.collated(index, await self.samples(index, bad))

    def collated(self, index: Any, samples: Any) -> Any:
        """Collate what `samples` returned for this index."""
        return self._how.collated(index, samples)

    async def samples(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """Return what `collated` makes the batch of. Several calls may be in progress at a time.

        Raises:
            NoSamples: all of them were dropped.
        """
        first: int | None = None
        if self._how.seeding is not None:
            first, index = index
        if not self._how.auto_collation:
            indices, samples = [index], None
        else:
            indices = list(index)
            if isinstance(index, Iterator):
                index = indices  # the iterator is consumed now
            samples = await self._fetch_batched(index, first, indices) if self._batched_get else None
        if samples is None:
            samples = await self._one_by_one(indices, first, [], bad)
        elif isinstance(samples, Exception):
            try:
                samples = await self._one_by_one(indices, first, [] if self._single else [samples], bad)
            finally:
                del index  # an error refers to this frame
        kept = [sample for sample in samples if sample is not DROPPED]
        if not kept and samples:
            raise NoSamples
        return kept if self._how.auto_collation else kept[0]

    async def _fetch_batched(self, index: Any, first: int | None, indices: list[Any]) -> Any:
        """Fetch the batch by `__getitems__` and decode it. With an error handler, errors are returned, not raised."""
        batch = _Batch(self._threads, 1)
        job = partial(self._make_batch, index, first)
        try:
            (samples,) = await batch.results([partial(batch.run, 0, job)])
            if self._decode is None:
                return samples
            decoding = _Batch(
                self._threads if self._how.decoder is None else self._how.decoder.threads or self._threads, len(samples)
            )
            jobs = [
                partial(decoding.run, item, partial(self._decode_one, sample, self._how.position(first, item)))
                for item, sample in enumerate(samples)
            ]
            try:
                return await decoding.results(jobs)
            except Exception as error:
                self._note(error, indices, decoding.failed, first)
                raise
        except Exception as error:
            if self._how.handler is not None:
                return error
            if batch.failed == 0:
                add_note(error, describe_batch(index))
            raise

    def _make_batch(self, index: Any, first: int | None) -> Any:
        self._how.seed_batch(first)
        return self._dataset.__getitems__(index)

    def _decode_one(self, sample: Any, position: int | None) -> Any:
        assert self._decode is not None
        self._how.seed_sample(position)
        return self._decode(sample)

    async def _one_by_one(
        self, indices: list[Any], first: int | None, failure: list[Exception], bad: list[BadSample] | None
    ) -> list[Any]:
        """`failure` holds the error of the whole batch, if the sample that raised it is unknown."""
        handler, threads = self._how.handler, None if self._how.decoder is None else self._how.decoder.threads
        found: list[list[BadSample]] = [[] for _ in indices]
        batch = _Batch(self._threads, len(indices))
        jobs: list[Callable[[], None]] = []
        for item, index in enumerate(indices):
            position = self._how.position(first, item)
            handle: Callable[[Exception], Any] | None = None
            if handler is not None:
                handle = partial(self._on_sample_error, handler, index, position, item, found[item])
            if failure and handle is not None:
                make: Callable[[], Any] = partial(handle, failure[0])
            else:
                make = partial(self._make, index, position, decode=threads is None)
            decode = None if threads is None or self._decode is None or failure else (threads, self._decode)
            jobs.append(partial(batch.run, item, make, handle, decode))
        try:
            return await batch.results(jobs)
        except Exception as error:
            if handler is None:
                self._note(error, indices, batch.failed, first)
            raise
        finally:
            if bad is not None:
                for records in found:
                    bad += records

    def _make(self, index: Any, position: int | None, *, decode: bool = True) -> Any:
        self._how.seed_sample(position)
        sample = self._dataset[index]
        return self._decode(sample) if decode and self._decode is not None else sample

    def _on_sample_error(
        self,
        handler: SampleErrorHandler,
        index: Any,
        position: int | None,
        item: int,
        bad: list[BadSample],
        error: Exception,
    ) -> Any:
        self._how.seed_sample(position)  # for random numbers that `on_error` draws
        make = (lambda another: self._make(another, position)) if self._single else None
        try:
            return handler.handle(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, describe_sample(index, item if self._how.auto_collation else None, position))
            raise

    def _note(self, error: BaseException, indices: list[Any], item: int, first: int | None) -> None:
        if item >= 0:
            note = describe_sample(
                indices[item] if item < len(indices) else None,
                item if self._how.auto_collation else None,
                self._how.position(first, item),
            )
            add_note(error, note)


class _Batch:
    """The jobs of one batch. They run in threads; everything else runs in the loop's thread."""

    def __init__(self, threads: JobThreads, count: int) -> None:
        self._threads = threads
        self._context = copy_context()
        self._results: list[Any] = [None] * count
        self._left = count
        self._done: asyncio.Future[None] | None = None
        self._over = False
        self._error: BaseException | None = None
        self.failed = -1
        """The item whose error was raised."""

    async def results(self, jobs: Sequence[Callable[[], None]]) -> list[Any]:
        """The jobs' results, in their order."""
        if not jobs:
            return []
        loop = asyncio.get_running_loop()
        self._threads.attach(loop)
        self._done = loop.create_future()
        for job in jobs:
            self._threads.put(job)
        try:
            await self._done
        finally:
            self._over = True  # also when cancelled: jobs that have not begun are skipped
        error, self._error = self._error, None
        if error is None:
            return self._results
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def run(
        self,
        item: int,
        make: Callable[[], Any],
        handle: Callable[[Exception], Any] | None = None,
        decode: tuple[JobThreads, Callable[[Any], Any]] | None = None,
    ) -> None:
        """Run as a job in a thread: make the item, then have it decoded in a decoding thread."""
        if self._over:
            return
        self._carry_out(item, self._context.copy(), make, handle, decode)

    def _carry_out(
        self,
        item: int,
        context: Context,
        make: Callable[[], Any],
        handle: Callable[[Exception], Any] | None,
        decode: tuple[JobThreads, Callable[[Any], Any]] | None = None,
    ) -> None:
        if self._over:
            return
        try:
            try:
                made = context.run(make)
            except Exception as error:
                if handle is None:
                    raise
                made = context.run(handle, error)
                decode = None  # a substitute is decoded already
        except BaseException as error:
            self._threads.notify(self._failed, item, error)
            del error
            return
        if decode is None:
            self._threads.notify(self._made, item, made)
        else:
            threads, function = decode
            threads.put(partial(self._carry_out, item, context, partial(function, made), handle))

    def _made(self, item: int, sample: Any) -> None:
        if self._over or self._done is None:
            return
        self._results[item] = sample
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    def _failed(self, item: int, error: BaseException) -> None:
        if self._over or self._done is None or self._done.done():
            return
        self._over = True
        self.failed = item
        # SystemExit in a thread must not end the process; Stop(Async)Iteration would look like the end of the epoch.
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            wrapped = RuntimeError(f"the sample's code raised {type(error).__name__}")
            wrapped.__cause__ = error
            error = wrapped
        self._error = error
        self._done.set_result(None)
