"""One epoch of an AsyncDataLoader: the stages wired together, in the order in which a batch passes them.

Data path: sampler -> scheduler -> pool -> worker -> ring -> reorder -> delivery -> pin_memory -> [async_iterator].

    __init__     consumer      sampler, opener, counters                   consumer.py
                 scheduler     who gets which task; order                  scheduler.py
                 queue         what is ready                               here
    _start       pool          worker processes and their rings            workers/pool.py
                 pipeline      the scheduler's hands                       pipeline.py
                 stage         copies to page-locked memory, or a device   pin_memory.py, device/
    __anext__    wait          for the queue
                 open          a view of the slot, or a copy               delivery.py
                 advance       the sampler by one; the credit goes back    pipeline.py

Ownership: the event loop refers to the pool, the pool to the pipeline, the pipeline to the queue, and none of them to
the iterator. So an iterator that is dropped (``break``) dies at once, and takes its workers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from asyncloader.delivery.transfer import mover_of
from asyncloader.epoch.consumer import NO_BATCH, Consumer, discard
from asyncloader.epoch.pipeline import Pipeline
from asyncloader.epoch.plan import (
    Draws,
    EpochPlan,
    make_pool,
    quarantine,
    shared_seed,
    start_method,
    warn_over_length,
    worker_setup,
)
from asyncloader.epoch.respawn import Replacer, Request, weakly
from asyncloader.epoch.shard_assignment import open_assignment
from asyncloader.errors import LoaderClosed, LoaderTimeout, TooManyBadSamples
from asyncloader.events import Action, Deliver, Fail, Finish
from asyncloader.options import LoaderSpec
from asyncloader.state.progress import Progress
from asyncloader.statistics import BadSampleLog, Statistics
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.pool import WorkerPool

__all__ = ["AsyncLoaderIterator", "LoaderShelf"]


class LoaderShelf(Protocol):
    """What an iterator asks of its loader: an epoch, and where it gets its workers from and leaves them."""

    def begin(self) -> tuple[Progress, Draws, EpochPlan]:
        """A new epoch: its position, torch's random draws for it, and the options that shape it."""
        ...

    @property
    def idle(self) -> bool:
        """Whether there are workers to be taken."""
        ...

    def take(self) -> WorkerPool | None:
        """Idle workers to be used again; None: start new ones."""
        ...

    def note(self, pool: WorkerPool) -> None:
        """New workers were started."""
        ...

    def leave(self, pool: WorkerPool) -> bool:
        """Offer the workers for the next iterator; False: stop them."""
        ...


class ReadyQueue:
    """What is ready for the consumer. `put` never blocks; `wait` loses nothing when cancelled."""

    def __init__(self) -> None:
        self.items: deque[Action] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def put(self, item: Action) -> None:
        """In the loop's thread. Wakes one of those who wait."""
        if self._closed:
            discard(item)  # on its way here from another thread when the iterator was closed
            return
        self.items.append(item)
        self._wake_one()

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def close(self) -> None:
        """Nothing will be taken any more; those who wait must look for themselves."""
        self._closed = True
        while self.items:
            discard(self.items.popleft())
        while self._waiters:
            self._wake_one()

    async def wait(self) -> None:
        """Until something may be there. The caller looks, and waits again if another task was faster."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if self.items:
                self._wake_one()  # this one was told, but will not take it
            raise


class AsyncLoaderIterator:
    """Iterates once over a loader with workers. Made by ``aiter(loader)``; belongs to the loop that first awaits it.

    `__anext__` may be cancelled at any point; the batch that it would have given comes with the next one. Dropping the
    iterator, or `aclose`, frees the workers.
    """

    def __init__(self, spec: LoaderSpec[Any], statistics: Statistics, shelf: LoaderShelf) -> None:
        self._spec = spec
        self._shelf = shelf
        self._statistics = statistics
        self._begin()
        self._timeout = min(spec.timeout, threading.TIMEOUT_MAX)  # infinity is no number of ticks
        self._queue = ReadyQueue()
        self.pool: WorkerPool | None = None
        self._pipeline: Pipeline | None = None
        self._starting: asyncio.Task[None] | None = None
        self._copying: tuple[Deliver, asyncio.Future[Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        # Why there are no more batches: None while there are, "" for the end. A text, not an exception: one that
        # was raised refers to the consumer's frames, and through them to the batches that they hold.
        self._ended: str | None = None
        self._closed = False
        self._owner = os.getpid()
        self._yielded = 0

    def _begin(self) -> None:
        """Draw the epoch's random numbers, and what the sampler gives first. No worker starts yet."""
        self._progress, self._draws, self._plan = self._shelf.begin()
        self._starts: Sequence[EpochStart]
        self._base_seed, self._starts = self._progress.starts(
            self._plan.workers, int(self._draws._base_seed), shared_seed(self._draws), anew=not self._shelf.idle
        )
        self._draws._base_seed = self._base_seed  # of later epochs, too, if the workers are persistent
        # Kept beyond the start: workers that die are replaced.
        self._setup = worker_setup(self._spec, self._plan.workers, self._draws, self._base_seed, self._starts)
        self._statistics.log = BadSampleLog(self._spec._asyncloader_options.max_bad_samples)
        self._consumer = Consumer(
            self._plan,
            self._draws,
            self._statistics,
            self._progress,
            quarantine(self._spec, self._draws),
            mover_of(self._spec),
            self._spec._asyncloader_options.prefetch_device,
        )

    def __aiter__(self) -> AsyncLoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._draws)

    def __repr__(self) -> str:
        state = "over" if self._ended is not None else "running" if self._pipeline else "new"
        return f"<AsyncLoaderIterator {state}, {len(self._queue.items)} ready>"

    def __reduce__(self) -> Any:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    @property
    def queue_depth(self) -> int:
        """Batches that are ready and not taken."""
        return len(self._queue.items)

    # ------------------------------------------------------------------------------------------- starting

    async def _ensure_started(self) -> None:
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            if self._progress.outdated:
                self._begin()
            self._starting = self._loop.create_task(self._start())
        # Shielded: a cancelled caller leaves the start to the next one, and to `aclose`.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        spec = self._spec
        assignments, self._starts = await open_assignment(spec, self._progress, self._starts)
        if self._closed:  # `close` does not wait for this
            return
        if assignments is not None:
            self._setup = self._setup._replace(starts=self._starts, dataset=self._draws._dataset)
        pool = self._shelf.take()
        if pool is None:
            make = self._pool_maker()
            # A fork must happen in the thread that the user's code runs in; the other methods need not block the loop.
            pool = make() if start_method(spec) == "fork" else await asyncio.to_thread(make)
            self._shelf.note(pool)
            if self._closed:
                pool.stop_soon()
                return
        self.pool = pool
        put_from_thread = partial(_put_from_thread, asyncio.get_running_loop(), self._queue)
        replacer = Replacer(pool, weakly(self._setup_for), None)
        self._pipeline = self._consumer.pipeline(pool, self._queue.put, put_from_thread, replacer)
        self._pipeline.start(self._consumer.offers, self._starts)

    def _pool_maker(self) -> Callable[[], WorkerPool]:
        return partial(make_pool, self._spec, self._setup, self._plan)

    def _setup_for(self, request: Request) -> WorkerSetup:
        return request.setup(self._setup)

    # ------------------------------------------------------------------------------------------- iterating

    async def __anext__(self) -> Any:
        if os.getpid() != self._owner:
            raise LoaderClosed("this iterator belongs to the process that this one was forked from; make a new one")
        begin = perf_counter()
        items = self._queue.items
        try:
            while True:  # once, unless several tasks share this iterator, or all samples of a batch are left out
                self._consumer.hear()
                copying = self._copying
                if copying is not None:
                    copied, copy = copying
                    await asyncio.wait([copy])  # a cancelled caller leaves the copy to the next call
                    if self._copying is copying:
                        self._copying = None
                        batch = self._deliver(copied, perf_counter() - begin, copy.result)
                        if batch is not NO_BATCH:
                            return batch
                elif items:
                    waited = perf_counter() - begin
                    item = items.popleft()
                    if not isinstance(item, Deliver):
                        try:
                            error = await self._end(item)
                        except asyncio.CancelledError:
                            items.append(item)  # or the next call would take the end for a good one
                            raise
                        try:
                            raise error
                        finally:
                            del item, error  # the traceback refers to this frame, which must not refer back to it
                    if not self._consumer.opening_blocks(item):
                        batch = self._deliver(item, waited, None)
                        if batch is not NO_BATCH:
                            return batch
                        continue
                    loop = asyncio.get_running_loop()
                    self._copying = (item, loop.run_in_executor(None, self._consumer.open, item.outcome))
                else:
                    await self._wait()
        except TooManyBadSamples as error:
            self._ended = str(error)  # for the next call, if this one is cancelled now
            await self.aclose()
            self._ended = ""
            raise

    def _deliver(self, item: Deliver, waited: float, opened: Callable[[], Any] | None) -> Any:
        if self._pipeline is None:
            raise LoaderClosed("this iterator was closed")
        try:
            batch = self._consumer.deliver(item, waited, self._pipeline.advance, opened)
        except StopAsyncIteration as error:  # of a worker: here it would pass for the end of the epoch
            raise RuntimeError("the dataset's code raised StopAsyncIteration") from error
        finally:
            delivery = self._consumer.delivery
            delivery.item = delivery.batch = delivery.error = None
        if batch is NO_BATCH:
            return batch
        self._yielded += 1
        self._draws._num_yielded = self._yielded
        warn_over_length(self._draws)
        return batch

    async def _wait(self) -> None:
        """Until something may be there, or there will be nothing; the caller looks again."""
        if self._ended is not None:
            raise StopAsyncIteration if not self._ended else LoaderClosed(self._ended)
        pipeline = self._pipeline
        if pipeline is None:
            await self._ensure_started()
            return
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this iterator belongs to another event loop; make a new one with aiter(loader)")
        if not self._timeout:
            await self._queue.wait()
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._queue.wait()
        except TimeoutError:
            error = LoaderTimeout(self._timeout)
            error.add_note(await pipeline.report())
            raise error from None

    async def _end(self, item: Action) -> BaseException:
        """End with this item; returns what is to be raised."""
        if isinstance(item, Finish):
            self._ended = ""
            self._progress.finish()
            await self.aclose()
            self._consumer.hear()
            return StopAsyncIteration()
        assert isinstance(item, Fail)
        self._ended = ""  # raised once; a caller that goes on regardless must come to an end
        await self.aclose()
        return item.error

    # --------------------------------------------------------------------------------------------- closing

    async def aclose(self) -> None:
        """Free the workers, and wait until they are gone unless they are persistent. Idempotent."""
        if self._starting is not None and not self._starting.done():
            await asyncio.wait([self._starting])
        if not self._closed:
            if self._ended is None:
                self._ended = "this iterator was closed"
            await self._consumer.end_stage()
        pool, reader = self._let_go()
        try:
            if reader is not None:
                await asyncio.wait([reader])  # it was cancelled; that is not the caller's cancellation
        except asyncio.CancelledError:
            assert reader is not None
            reader.cancel()  # once more: also what it does at its end
            raise
        finally:
            if pool is not None:
                await asyncio.shield(asyncio.to_thread(pool.stop))

    def close(self) -> None:
        """`aclose` for code that is not async: blocks until the workers are gone. In the loop's thread, or after it."""
        pool, _ = self._let_go()
        if pool is not None:
            pool.stop()

    def _let_go(self) -> tuple[WorkerPool | None, asyncio.Task[None] | None]:
        """Stop the pipeline; return the pool if it is to be stopped, and the task that must still be awaited."""
        if self._closed:
            return None, None
        self._closed = True
        if self._ended is None:
            self._ended = "this iterator was closed"
        pipeline, self._pipeline = self._pipeline, None
        self._consumer.close()
        return _release(pipeline, self._queue, self._shelf, self.pool)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if exiting() or getattr(self, "_closed", True) or os.getpid() != self._owner:
            return
        loop, parts = self._loop, (self._pipeline, self._consumer, self._queue, self._shelf, self.pool)
        if loop is None or loop.is_closed() or threading.get_ident() == self._thread:
            _abandon(*parts)
        else:  # collected in another thread: the loop's own must let go of the readers
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_abandon, *parts)


def _release(
    pipeline: Pipeline | None, queue: ReadyQueue, shelf: LoaderShelf, pool: WorkerPool | None
) -> tuple[WorkerPool | None, asyncio.Task[None] | None]:
    """End an iterator's parts but for the consumer. In the loop's thread."""
    reader = pipeline.close() if pipeline is not None else None
    queue.close()
    if pool is None or shelf.leave(pool):
        return None, reader
    return pool, reader


def _abandon(
    pipeline: Pipeline | None, consumer: Consumer, queue: ReadyQueue, shelf: LoaderShelf, pool: WorkerPool | None
) -> None:
    """End the parts of an iterator that nobody refers to any more. Waits for nothing."""
    consumer.close_soon()
    pool, _ = _release(pipeline, queue, shelf, pool)
    if pool is not None:
        pool.stop_soon()


def _put_from_thread(loop: asyncio.AbstractEventLoop, queue: ReadyQueue, item: Action) -> None:
    try:
        loop.call_soon_threadsafe(queue.put, item)
    except RuntimeError:  # the loop was closed under a copy in flight
        discard(item)
