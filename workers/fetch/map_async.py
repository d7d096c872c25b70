"""Fetches from asynchronous map datasets: awaits samples concurrently and returns them in the order of the indices.

Data path: scheduler -> worker: [map_async] -> collate -> codec -> ring. Without workers it runs in the consumer's loop.

`AsyncMapFetcher` makes batches of awaited samples. Samples that raise are handled as in `guarded_fetch.py`; records of
bad samples are in the order of the batch, whichever sample raised first.

`ConcurrencyLimiter` bounds the number of samples in flight over all batches. Samples of the oldest batch start first,
so a slow sample takes up one unit of concurrency while others of its batch and of later batches start and finish. The
task of a sample is created, in a context of its own, when it may start. There is no wrapper coroutine, task group or
semaphore per sample: each of them would cost as much as the task itself.

Everything here runs in one event loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

from asyncloader.workers.fetch.batching import Batching
from asyncloader.workers.fetch.error_notes import add_note, describe_batch, describe_sample
from asyncloader.workers.fetch.guarded_fetch import fetches_single
from asyncloader.workers.fetch.sample_errors import DROPPED, BadSample, NoSamples, SampleErrorHandler
from asyncloader.workers.fetch.seeded_fetch import fetches_batches

__all__ = [
    "AsyncMapFetcher",
    "ConcurrencyLimiter",
]


class AsyncMapFetcher:
    """Fetches from a map dataset.

    Args:
        dataset: the dataset.
        how: how samples become batches.
        concurrency: samples that are awaited at a time, over all batches.
    """

    def __init__(self, dataset: Any, how: Batching, concurrency: int) -> None:
        self._dataset = dataset
        self._how = how
        self._limiter = ConcurrencyLimiter(concurrency)
        self._batched_get = how.auto_collation and fetches_batches(dataset)
        self._single = fetches_single(dataset)
        # The coroutine can be the sample's task itself: none of the dataset's code runs before the task does.
        self._bare = how.decoder is None and inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """Return the batch. `bad` gets records of samples that raised.

        Raises:
            NoSamples: all of them were dropped.
        """
        return self.collated(index, await self.samples(index, bad))

    async def samples(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """Return what `collated` makes the batch of. Several calls may be in progress at a time.

        Raises:
            NoSamples: all of them were dropped.
        """
        first: int | None = None
        if self._how.seeding is not None:
            first, index = index
        if self._how.handler is not None:
            return await self._tolerant(self._how.handler, first, index, [] if bad is None else bad)
        if self._how.auto_collation:
            return await (self._fetch_batched if self._batched_get else self._one_by_one)(first, index)
        (sample,) = await self._limiter.gather(
            lambda _, context: self._start(index, first, context),
            1,
            lambda _, error: add_note(error, describe_sample(index, None, first)),
        )
        return sample

    def collated(self, index: Any, samples: Any) -> Any:
        """Collate what `samples` returned for this index."""
        return self._how.collated(index, samples)

    async def _fetch_batched(self, first: int | None, index: Any) -> Any:
        """Fetch the batch by the dataset's `__getitems__`."""
        (samples,) = await self._limiter.gather(
            lambda _, __: self._make_batch(index, first), 1, lambda _, error: add_note(error, describe_batch(index))
        )
        if self._how.decoder is None and not (self._how.seeding is None and any(map(inspect.isawaitable, samples))):
            return samples
        pending = list(samples)
        try:
            return await self._limiter.gather(
                lambda item, _: self._await_and_decode(pending[item], self._how.position(first, item)),
                len(pending),
                lambda item, error: _note_item(error, index, item, self._how.position(first, item)),
            )
        finally:
            for sample in pending:
                if inspect.iscoroutine(sample):
                    sample.close()  # not awaited because of an error; a no-op for the others

    async def _make_batch(self, index: Any, first: int | None) -> Any:
        self._how.seed_batch(first)
        samples = self._dataset.__getitems__(index)
        return await samples if inspect.isawaitable(samples) else samples

    async def _await_and_decode(self, sample: Any, position: int | None) -> Any:
        if inspect.isawaitable(sample):
            sample = await sample
        if self._how.decoder is None:
            return sample
        self._how.seed_sample(position)
        return await self._how.decoder.decode(sample)

    async def _one_by_one(self, first: int | None, index: Any) -> list[Any]:
        indices = index if isinstance(index, (list, tuple)) else list(index)
        return await self._limiter.gather(
            lambda item, context: self._start(indices[item], self._how.position(first, item), context),
            len(indices),
            lambda item, error: _note_item(error, indices, item, self._how.position(first, item)),
        )

    def _start(self, index: Any, position: int | None, context: Context) -> Coroutine[Any, Any, Any]:
        """Return the coroutine that makes a sample; it will run in `context`."""
        if not self._bare:
            return self._make(index, position)
        if self._how.seeding is not None:
            context.run(self._how.seed_sample, position)
        coroutine: Coroutine[Any, Any, Any] = self._dataset[index]
        return coroutine

    async def _make(self, index: Any, position: int | None) -> Any:
        self._how.seed_sample(position)  # runs in the sample's own task, and so in its own context
        sample = self._dataset[index]
        if inspect.isawaitable(sample):
            sample = await sample
        return sample if self._how.decoder is None else await self._how.decoder.decode(sample)

    # ------------------------------------------------------------------------------------------- samples that raise

    async def _tolerant(self, handler: SampleErrorHandler, first: int | None, index: Any, bad: list[BadSample]) -> Any:
        if not self._how.auto_collation:
            (sample,) = await self._limiter.gather(
                lambda _, __: self._tolerant_one(handler, index, first, None, bad), 1
            )
            if sample is DROPPED:
                raise NoSamples
            return sample
        failure: Exception | None = None
        if self._batched_get:
            try:
                return await self._fetch_batched(first, index)
            except Exception as error:
                if not self._single:
                    failure = error
        indices = index if isinstance(index, (list, tuple)) else list(index)
        found: list[list[BadSample]] = [[] for _ in indices]

        def one(item: int, _: Context) -> Coroutine[Any, Any, Any]:
            position = self._how.position(first, item)
            if failure is not None:
                return self._on_sample_error(handler, indices[item], position, item, failure, found[item])
            return self._tolerant_one(handler, indices[item], position, item, found[item])

        try:
            samples = await self._limiter.gather(one, len(indices))
        finally:
            failure = None  # it refers to this frame
            for records in found:
                bad += records
        kept = [sample for sample in samples if sample is not DROPPED]
        if not kept and samples:
            raise NoSamples
        return kept

    async def _tolerant_one(
        self, handler: SampleErrorHandler, index: Any, position: int | None, item: int | None, bad: list[BadSample]
    ) -> Any:
        try:
            return await self._make(index, position)
        except Exception as error:
            return await self._on_sample_error(handler, index, position, item, error, bad)

    async def _on_sample_error(
        self,
        handler: SampleErrorHandler,
        index: Any,
        position: int | None,
        item: int | None,
        error: Exception,
        bad: list[BadSample],
    ) -> Any:
        self._how.seed_sample(position)  # for random numbers that `on_error` draws
        make = (lambda another: self._make(another, position)) if self._single else None
        try:
            return await handler.handle_async(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, describe_sample(index, item, position))
            raise


def _note_item(error: BaseException, index: Any, item: int, position: int | None) -> None:
    try:
        add_note(error, describe_sample(index[item], item, position))
    except Exception:  # the index is not a sequence
        add_note(error, f"while fetching item {item} of the batch")


class ConcurrencyLimiter:
    """Runs the samples of several batches, a bounded number at a time.

    Args:
        limit: samples in flight at a time, at least 1.
    """

    __slots__ = ("_free", "_queue")

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._queue: deque[_Batch] = deque()  # batches whose samples have not all started

    async def gather(
        self,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
        failed: Callable[[int, BaseException], None] | None = None,
    ) -> list[Any]:
        """Return the results of ``start(0, context)`` to ``start(count - 1, context)``, in this order.

        Args:
            start: returns the coroutine of one sample, which then runs in `context`. Not called for the remaining
                samples after a failure or cancellation.
            count: number of samples.
            failed: called with the sample whose error is about to be raised, and the error.

        Raises:
            Exception: that of the sample that raised first. The other samples are cancelled, and have ended by then.
        """
        if not count:
            return []
        batch = _Batch(self, asyncio.get_running_loop(), start, count)
        self._queue.append(batch)
        self._launch()
        try:
            await batch.done
        except asyncio.CancelledError:
            batch.cancel()
            while batch.running:  # this call also waits for their `finally` blocks
                batch.done = batch.loop.create_future()
                try:
                    await batch.done
                except asyncio.CancelledError:
                    batch.cancel()
            raise
        finally:
            batch.start = _nothing  # it refers to the caller's frame
        error = batch.error
        if error is None:
            return [task.result() for task in batch.tasks]
        if failed is not None:
            failed(batch.failed, error)
        try:
            raise error
        finally:
            del error, batch  # they refer to this frame

    def _launch(self) -> None:
        queue = self._queue
        while self._free and queue:
            batch = queue[0]
            self._free -= 1
            batch.launch()
            if len(batch.tasks) >= batch.count:
                queue.popleft()

    def _on_finished(self) -> None:
        self._free += 1
        if self._queue:
            self._launch()

    def _forget(self, batch: _Batch) -> None:
        if batch in self._queue:
            self._queue.remove(batch)


class _Batch:
    __slots__ = ("context", "count", "done", "error", "failed", "limiter", "loop", "over", "running", "start", "tasks")

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
    ) -> None:
        self.limiter = limiter
        self.loop = loop
        self.start = start
        self.count = count
        self.context = copy_context()  # a task may be created in the callback of another batch, in that one's context
        self.tasks: list[asyncio.Task[Any]] = []
        self.running = 0
        self.over = False  # a sample failed, or the caller was cancelled: results are not needed
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.failed = -1

    def launch(self) -> None:
        """Start the next sample. The caller has checked the limit."""
        context = self.context.copy()
        item = len(self.tasks)
        try:
            coroutine = self.start(item, context)
        except Exception as error:
            coroutine = _raising(error)
        task = self.loop.create_task(coroutine, context=context)
        self.tasks.append(task)
        self.running += 1
        task.add_done_callback(self.finished, context=self.context)

    def finished(self, task: asyncio.Task[Any]) -> None:
        self.running -= 1
        if task.cancelled():
            if not self.over:
                self.fail(task, RuntimeError("the sample's code cancelled itself, or let what it awaited be cancelled"))
        elif (error := task.exception()) is not None and not self.over:
            if isinstance(error, StopAsyncIteration):  # it would look like the end of the epoch
                wrapped = RuntimeError("the sample's code raised StopAsyncIteration")
                wrapped.__cause__ = error
                error = wrapped
            self.fail(task, error)
        if not self.running and len(self.tasks) >= self.count and not self.done.done():
            self.done.set_result(None)
        self.limiter._on_finished()

    def fail(self, task: asyncio.Task[Any], error: BaseException) -> None:
        self.failed, self.error = self.tasks.index(task), error
        self.cancel()

    def cancel(self) -> None:
        """Start no more samples of this batch, and cancel those in flight."""
        self.over, self.count = True, 0
        self.limiter._forget(self)
        for task in self.tasks:
            if not task.done():
                task.cancel()


def _nothing(item: int, _: Context) -> Coroutine[Any, Any, Any]:
    raise AssertionError(f"sample {item} of a batch that is over")


async def _raising(error: Exception) -> Any:
    try:
        raise error
    finally:
        del error  # it refers to this frame
