"""Fetches from blocking map datasets in threads: many reads in flight, results in the order of the indices.

Data path: scheduler -> worker: [map_threads -> sample] -> collate -> codec -> ring. Without workers it runs beside the
consumer.

The threads take samples of all batches from one queue, the oldest batch's first, so a slow sample occupies one thread
while later ones start and finish. A dataset's own `__getitems__` makes a batch in one thread. Each sample, or batch, is
made in a context of its own: context variables that it sets are not seen by others.

A thread cannot be interrupted. When a sample of a batch raises, or the batch is cancelled, its samples that have not
begun are skipped; those that have begun run to their end, and their results are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.error_notes import add_note, describe_batch
from asyncloader.workers.fetch.map_fetcher import MapFetcher
from asyncloader.workers.fetch.sample import SampleMaker, SampleRequest, run_blocking
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.fetch.seeding import BatchPosition
from asyncloader.workers.fetch.threads import JobThreads


class ThreadMapFetcher(MapFetcher):
    """Fetches from a blocking map dataset, whose methods are called by several threads.

    Args:
        maker, auto_collation, collate: as for `MapFetcher`. A decoder without threads of its own runs where the sample
            was read.
        threads: the threads.
    """

    def __init__(
        self, maker: SampleMaker, auto_collation: bool, collate: Callable[[Any], Any], threads: JobThreads
    ) -> None:
        super().__init__(maker, auto_collation, collate)
        self._threads = threads
        self._decode_threads = None if maker.decoder is None else maker.decoder.threads

    async def _batch(self, index: Any, first: BatchPosition | None) -> Any:
        maker = self._maker
        batch = _ThreadBatch(self._threads, 1)
        try:
            (samples,) = await batch.results([partial(batch.run, 0, partial(self._get_batch, index, first))])
        except Exception as error:
            add_note(error, describe_batch(index))
            raise
        if maker.decoder is None:
            return samples
        samples = list(samples)
        decoding = _ThreadBatch(self._decode_threads or self._threads, len(samples))
        jobs = [
            partial(decoding.run, item, partial(maker.decode, sample, maker.position(first, item)))
            for item, sample in enumerate(samples)
        ]
        return await self._results(decoding, jobs, index, first)

    async def _each(
        self,
        indices: Sequence[Any],
        first: BatchPosition | None,
        failure: Exception | None,
        records: list[SkippedSample],
    ) -> list[Any]:
        maker = self._maker
        # A list for each sample, because threads append to them: joined in the end, the records are in the order of the
        # batch.
        found: list[list[SkippedSample]] = [[] for _ in indices]
        batch = _ThreadBatch(self._threads, len(indices))
        # A sample is read by one thread and decoded by another, if decoding has threads of its own.
        decode = None
        if self._decode_threads is not None and maker.decoder is not None:
            decode = self._decode_threads, maker.decoder.call
        jobs: list[Callable[[], None]] = []
        make = maker.make if decode is None else maker.get
        for item, index in enumerate(indices):
            handle = None
            if maker.handler is not None:
                handle = partial(self._on_error, self._request(indices, first, item), found[item])
            if failure is not None and handle is not None:
                jobs.append(partial(batch.run, item, partial(handle, failure)))
                continue
            position = maker.position(first, item)
            jobs.append(partial(batch.run, item, partial(make, index, position), handle, decode))
        try:
            return await self._results(batch, jobs, indices, first)
        finally:
            failure = None  # it refers to this frame
            # Also when an error is raised: records of the samples that were handled before it go along.
            for one in found:
                records += one

    def _on_error(self, request: SampleRequest, records: list[SkippedSample], error: Exception) -> Any:
        try:
            return run_blocking(self._maker.on_error(request, error, records))
        finally:
            del error  # it refers to this frame

    async def _results(
        self, batch: _ThreadBatch, jobs: Sequence[Callable[[], None]], indices: Any, first: BatchPosition | None
    ) -> list[Any]:
        began = perf_counter()
        try:
            results = await batch.results(jobs)
        except Exception as error:
            if batch.failed >= 0:
                self._maker.note(error, self._request(indices, first, batch.failed))
            raise
        self._maker.slow.note(batch.took, partial(self._name, indices), perf_counter() - began)
        return results


class _ThreadBatch:
    """The jobs of one batch. They run in threads; everything else runs in the loop's thread."""

    def __init__(self, threads: JobThreads, count: int) -> None:
        self._threads = threads
        self._context = copy_context()
        self._results: list[Any] = [None] * count
        self._left = count
        self._done: asyncio.Future[None] | None = None
        self._over = False
        self._error: BaseException | None = None
        self.took = [0.0] * count
        """Seconds of each item, its decoding included."""
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
        # Taken out: once raised, its traceback refers to this object.
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
        # A copy for each sample: two threads cannot be in one context at the same time.
        self._carry_out(item, self._context.copy(), make, handle, decode)

    def _carry_out(
        self,
        item: int,
        context: Context,
        make: Callable[[], Any],
        handle: Callable[[Exception], Any] | None,
        decode: tuple[JobThreads, Callable[[Any], Any]] | None = None,
    ) -> None:
        # Asked again: this is also the job that decodes, and the batch may be over by then.
        if self._over:
            return
        report: Callable[[int, Any], None] = self._made
        # The loop takes the result out of this list, so that this thread does not keep it alive.
        answer: list[Any] = [item]
        began = perf_counter()
        try:
            try:
                answer.append(context.run(make))
                self.took[item] += perf_counter() - began
            except Exception as error:
                if handle is None:
                    raise
                # In the sample's context, which holds its random numbers. `on_error` may draw from them.
                answer.append(context.run(handle, error))
                decode = None  # a substitute is decoded already
        # Also SystemExit: the thread goes on, and the batch gets an answer.
        except BaseException as error:
            answer.append(error)
            report, decode = self._failed, None
        if decode is None:
            self._threads.notify(report, answer)
        else:
            threads, function = decode
            # In the same context, so that decoding goes on with the random numbers of this sample.
            threads.put(partial(self._carry_out, item, context, partial(function, answer.pop()), handle))

    def _made(self, item: int, sample: Any) -> None:
        # The flag may have been set after the thread had read it.
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
        # SystemExit in a thread must not end the process; a coroutine cannot raise StopIteration.
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            error = not_the_end(error, "the sample's code")
        self._error = error
        self._done.set_result(None)
