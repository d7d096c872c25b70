"""Fetches from asynchronous map datasets: awaits samples concurrently and returns them in the order of the indices.

Data path: scheduler -> worker: [map_async -> sample] -> collate -> codec -> ring. Without workers it runs in the
consumer's loop.

The rules of a batch are in `map_fetcher.py`. Records of samples that raised are in the order of the batch, whichever
raised first.

`ConcurrencyLimiter` bounds the number of samples in flight over all batches. Samples of the oldest batch start first,
so a slow sample takes up one unit of concurrency while others of its batch and of later batches start and finish. The
task of a sample is created, in a context of its own, when it may start.

Everything here runs in one event loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from functools import partial
from time import perf_counter
from typing import Any

from torch.utils.data import Subset

from asyncloader.base.events import SkippedSample
from asyncloader.workers.fetch.data_end import not_the_end
from asyncloader.workers.fetch.dataset_kinds import fetches_batches
from asyncloader.workers.fetch.error_notes import add_note, describe_batch, shard_and_key
from asyncloader.workers.fetch.map_fetcher import MapFetcher
from asyncloader.workers.fetch.sample import SampleMaker, SampleRequest
from asyncloader.workers.fetch.seeding import BatchPosition
from asyncloader.workers.ipc.collate import SampleColumns


class AsyncMapFetcher(MapFetcher):
    """Fetches from a map dataset whose samples are awaited.

    Args:
        maker, auto_collation, collate: as for `MapFetcher`.
        concurrency: samples that are awaited at a time, over all batches.
        by_column: `collate` takes samples that are known by column; otherwise it gets a list.
    """

    def __init__(
        self,
        maker: SampleMaker,
        auto_collation: bool,
        collate: Callable[[Any], Any],
        concurrency: int,
        *,
        by_column: bool = False,
    ) -> None:
        super().__init__(maker, auto_collation, collate)
        if isinstance(maker.dataset, Subset) and type(maker.dataset).__getitems__ is Subset.__getitems__:
            self._batched_get = auto_collation and fetches_batches(maker.dataset.dataset)  # it would await nothing
        self._by_column = by_column
        self._limiter = ConcurrencyLimiter(concurrency)
        # The dataset's coroutine can be the sample's task itself: none of the dataset's code runs before the task does.
        self._bare = (
            maker.decoder is None
            and maker.handler is None
            and inspect.iscoroutinefunction(getattr(type(maker.dataset), "__getitem__", None))
        )

    async def _batch(self, index: Any, first: BatchPosition | None) -> Any:
        maker = self._maker
        (samples,) = await self._limiter.gather(
            lambda _, __: self._await_batch(index, first), 1, lambda _, error: add_note(error, describe_batch(index))
        )
        if maker.decoder is None:
            return list(samples) if isinstance(samples, SampleColumns) and not self._by_column else samples
        samples = samples if isinstance(samples, SampleColumns) else list(samples)
        return await self._decode_batch(maker.decoder, index, first, samples)

    async def _await_batch(self, index: Any, first: BatchPosition | None) -> Any:
        self._maker.seed_batch(first)
        samples = self._maker.dataset.__getitems__(index)
        samples = await samples if inspect.isawaitable(samples) else samples
        if isinstance(samples, list | tuple) and samples and inspect.isawaitable(samples[0]):
            for sample in filter(inspect.iscoroutine, samples):
                sample.close()  # otherwise Python would warn that it was never awaited
            raise TypeError("__getitems__ gave samples that are still to be awaited: await them in it")
        return samples

    async def _make_each(
        self, indices: Sequence[Any], first: BatchPosition | None, records: list[list[SkippedSample]]
    ) -> list[Any]:
        maker = self._maker
        if maker.handler is not None:
            return await self._gather(
                indices, lambda item, _: self._make_tolerant(self._request(indices, first, item), records[item])
            )
        return await self._gather(
            indices,
            lambda item, context: self._start(indices[item], maker.position(first, item), context),
            lambda item, error: maker.note(error, self._request(indices, first, item)),
        )

    async def _gather(
        self,
        indices: Sequence[Any],
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        failed: Callable[[int, BaseException], None] | None = None,
    ) -> list[Any]:
        """`ConcurrencyLimiter.gather` for the samples of these indices, which are timed."""
        slow, count = self._maker.slow, len(indices)
        began, took = perf_counter(), [0.0] * count if slow.timing else None
        samples = await self._limiter.gather(start, count, failed, took)
        # The time that passed, and not that of the samples: many that cost nothing wait for one another.
        if took is None:
            slow.passed(count, perf_counter() - began)
        else:
            slow.note(took, partial(self._name, indices), perf_counter() - began)
        return samples

    def _start(self, index: Any, position: int | None, context: Context) -> Coroutine[Any, Any, Any]:
        """Return the coroutine that makes a sample; it will run in `context`."""
        if not self._bare:
            return self._maker.make_async(index, position)
        if position is not None:
            # In the context in which the task will run.
            context.run(self._maker.seed, position)
        coroutine: Coroutine[Any, Any, Any] = self._maker.dataset[index]
        return coroutine

    async def _make_tolerant(self, request: SampleRequest, records: list[SkippedSample]) -> Any:
        maker, sample = self._maker, None
        try:
            sample = await maker.get_async(request.index, request.position)
            return sample if maker.decoder is None else await maker.decode_async(maker.decoder, sample)
        except Exception as error:
            # A sample of a shard is named by that: its index may mean nothing to the user.
            where = shard_and_key(sample)
            return await maker.on_error(request if where is None else request._replace(index=where), error, records)


class ConcurrencyLimiter:
    """Runs the samples of several batches, a bounded number at a time.

    Args:
        limit: samples in flight at a time, at least 1.
    """

    __slots__ = ("_queue", "_running", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """May be changed at any time, in any thread; a larger one counts from the next sample that ends."""
        self._running = 0
        self._queue: deque[_Batch] = deque()  # batches whose samples have not all started

    async def gather(
        self,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
        failed: Callable[[int, BaseException], None] | None = None,
        took: list[float] | None = None,
    ) -> list[Any]:
        """Return the results of ``start(0, context)`` to ``start(count - 1, context)``, in this order.

        Args:
            start: returns the coroutine of one sample, which then runs in `context`. Not called for the remaining
                samples after a failure or cancellation.
            count: number of samples.
            failed: called with the sample whose error is about to be raised, and the error.
            took: gets the seconds of each sample, from its start to its end; None: they are not measured.

        Raises:
            Exception: that of the sample that raised first. The other samples are cancelled, and have ended by then.
        """
        if not count:
            return []
        batch = _Batch(self, asyncio.get_running_loop(), start, count, took)
        self._queue.append(batch)
        self._launch()
        try:
            await batch.done
        except asyncio.CancelledError:
            batch.cancel()
            while batch.running:  # this call also waits for their `finally` blocks
                # The future of before was cancelled together with this call.
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
        while queue and self._running < self.limit:
            # The oldest batch first, because it is delivered first.
            batch = queue[0]
            self._running += 1
            batch.launch()
            if len(batch.tasks) >= batch.count:
                queue.popleft()

    def _on_finished(self) -> None:
        self._running -= 1
        if self._queue:
            self._launch()

    def _forget(self, batch: _Batch) -> None:
        if batch in self._queue:
            self._queue.remove(batch)


class _Batch:
    __slots__ = (
        "context", "count", "done", "error", "failed", "limiter", "loop", "over", "running", "start", "tasks", "took",
    )  # fmt: skip

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[int, Context], Coroutine[Any, Any, Any]],
        count: int,
        took: list[float] | None,
    ) -> None:
        self.took = took
        self.limiter = limiter
        self.loop = loop
        self.start = start
        self.count = count
        self.context = copy_context()  # a task may be created in a callback of another batch, and in its context
        self.tasks: list[asyncio.Task[Any]] = []
        self.running = 0
        self.over = False  # a sample failed, or the caller was cancelled: results are not needed
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.failed = -1

    def launch(self) -> None:
        """Start the next sample. The caller has checked the limit."""
        # A copy for each sample: variables that it sets are seen by no other sample.
        context = self.context.copy()
        item = len(self.tasks)
        try:
            coroutine = self.start(item, context)
        except Exception as error:
            # The error goes the way of every other, through the task: `finished` then counts it and frees its unit of
            # concurrency.
            coroutine = _raising(error)
        # A bare task: a wrapper coroutine, a task group or a semaphore for each sample would cost as much as the task.
        task = self.loop.create_task(coroutine, context=context)
        self.tasks.append(task)
        self.running += 1
        # Without the argument each callback would get a copy of the current context.
        if self.took is not None:  # first: `finished` may end the batch
            task.add_done_callback(partial(self.time, item, perf_counter()), context=self.context)
        task.add_done_callback(self.finished, context=self.context)

    def time(self, item: int, began: float, _: asyncio.Task[Any]) -> None:
        assert self.took is not None
        self.took[item] = perf_counter() - began

    def finished(self, task: asyncio.Task[Any]) -> None:
        self.running -= 1
        # `cancel` sets `over` before it cancels a task, so without it the sample's code has cancelled itself.
        if task.cancelled():
            if not self.over:
                self.fail(task, RuntimeError("the sample's code cancelled itself, or let what it awaited be cancelled"))
        # The error is taken before `over` is tested: asyncio logs an error that was never asked for.
        elif (error := task.exception()) is not None and not self.over:
            if isinstance(error, StopAsyncIteration):  # ``async for`` would take it for the end of the epoch
                error = not_the_end(error, "the sample's code")
            self.fail(task, error)
        if not self.running and len(self.tasks) >= self.count and not self.done.done():
            self.done.set_result(None)
        self.limiter._on_finished()

    def fail(self, task: asyncio.Task[Any], error: BaseException) -> None:
        # `finished` calls this for the first error only; the others are of samples that are cancelled.
        self.failed, self.error = self.tasks.index(task), error
        self.cancel()

    def cancel(self) -> None:
        """Start no more samples of this batch, and cancel those in flight."""
        # No sample is left to start, so `finished` waits only for those in flight.
        self.over, self.count = True, 0
        # At once: the next batch may start its samples in the place of those that will not start.
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
