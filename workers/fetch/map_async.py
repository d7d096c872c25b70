"""Fetching from asynchronous map datasets: samples are awaited concurrently, and put back in the order of the indices.

Data path: scheduler -> worker: [async_fetch] -> collate -> codec -> ring. The blocking fetchers are in `fetch.py` and
`seeded_fetch.py`, streams in `async_stream.py`. How many are in flight, over all batches, is `limiter.py`'s.

Samples that raise, where they do not fail their batch, are dealt with as in `guarded_fetch.py`. Records are put in the
order of the batch, whichever sample raised first.

Samples in flight: coroutines of several batches, a bounded number of them at a time.

Data path: worker: async_fetch -> [flights] -> collate -> codec -> ring. Also without workers, on the consumer's loop.

The bound is over all batches together, and the oldest batch's samples start first: a sample that takes long occupies
one place, while those of its batch and of the next ones come and go. A sample's task is made when there is a place for
it, in a context of its own; there is no wrapper around it, no group and no semaphore, each of which would cost as much
as the task.

Everything here runs in one loop's thread.
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
        # Its coroutine can be a sample's task as it is: none of its code runs before that task does.
        self._bare = how.decoder is None and inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))

    async def fetch(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """The batch. `bad` gets records of samples that raised.

        Raises:
            NoSamples: the guard left all of them out.
        """
        return self.collated(index, await self.samples(index, bad))

    async def samples(self, index: Any, bad: list[BadSample] | None = None) -> Any:
        """What `collated` makes the batch of. Several calls may be in progress at a time.

        Raises:
            NoSamples: the guard left all of them out.
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
        """The batch of what `samples` gave for this index."""
        return self._how.collated(index, samples)

    async def _fetch_batched(self, first: int | None, index: Any) -> Any:
        """What `__getitems__` gives."""
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
                    sample.close()  # those that an error kept from being awaited; a no-op for the others

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
        places = index if isinstance(index, (list, tuple)) else list(index)
        return await self._limiter.gather(
            lambda item, context: self._start(places[item], self._how.position(first, item), context),
            len(places),
            lambda item, error: _note_item(error, places, item, self._how.position(first, item)),
        )

    def _start(self, index: Any, position: int | None, context: Context) -> Coroutine[Any, Any, Any]:
        """The coroutine that makes a sample, and that will run in `context`."""
        if not self._bare:
            return self._make(index, position)
        if self._how.seeding is not None:
            context.run(self._how.seed_sample, position)
        coroutine: Coroutine[Any, Any, Any] = self._dataset[index]
        return coroutine

    async def _make(self, index: Any, position: int | None) -> Any:
        self._how.seed_sample(position)  # in this sample's own task, hence in a context of its own
        sample = self._dataset[index]
        if inspect.isawaitable(sample):
            sample = await sample
        return sample if self._how.decoder is None else await self._how.decoder.decode(sample)

    # ------------------------------------------------------------------------------------- past samples that raise

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
        places = index if isinstance(index, (list, tuple)) else list(index)
        found: list[list[BadSample]] = [[] for _ in places]

        def one(item: int, _: Context) -> Coroutine[Any, Any, Any]:
            position = self._how.position(first, item)
            if failure is not None:
                return self._on_sample_error(handler, places[item], position, item, failure, found[item])
            return self._tolerant_one(handler, places[item], position, item, found[item])

        try:
            samples = await self._limiter.gather(one, len(places))
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
        self._how.seed_sample(position)  # for what `on_error` draws
        make = (lambda another: self._make(another, position)) if self._single else None
        try:
            return await handler.handle_async(index, position, error, bad, make)
        except Exception as raised:
            add_note(raised, describe_sample(index, item, position))
            raise


def _note_item(error: BaseException, index: Any, item: int, position: int | None) -> None:
    try:
        add_note(error, describe_sample(index[item], item, position))
    except Exception:  # an index that is no sequence
        add_note(error, f"while fetching item {item} of the batch")


class ConcurrencyLimiter:
    """Starts samples as there is room for them.

    Args:
        room: samples in flight at a time, at least 1.
    """

    __slots__ = ("_queue", "_room")

    def __init__(self, room: int) -> None:
        self._room = room
        self._queue: deque[_Batch] = deque()  # batches with samples that have not started

    async def gather(
        self,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
        failed: Callable[[int, BaseException], None] | None = None,
    ) -> list[Any]:
        """The results of ``start(0, context)`` to ``start(count - 1, context)``, in this order.

        Args:
            start: gives the coroutine of one sample, which then runs in `context`. Not called for samples that an
                earlier failure, or cancellation, makes superfluous.
            count: how many.
            failed: told of the sample whose error is about to be raised.

        Raises:
            Exception: the first sample's, by time, that raised. The others are cancelled, and have ended by then.
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
            while batch.running:  # their `finally` blocks belong to this call
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
        line = self._queue
        while self._room and line:
            batch = line[0]
            self._room -= 1
            batch.launch()
            if len(batch.tasks) >= batch.count:
                line.popleft()

    def _on_finished(self) -> None:
        self._room += 1
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
        self.context = copy_context()  # a task may be made when another batch's sample lands, in that one's context
        self.tasks: list[asyncio.Task[Any]] = []
        self.running = 0
        self.over = False  # no more results are wanted: one has failed, or the caller was cancelled
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.failed = -1

    def launch(self) -> None:
        """Start the next sample. There is room for it."""
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
            if isinstance(error, StopAsyncIteration):  # it would pass for the end of all batches
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
        """Start no more of its samples, and cancel those in flight."""
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
