"""Iterates an AsyncDataLoader with workers: wires the stages of one epoch together.

Data path: sampler -> scheduler -> pool -> worker -> ring -> reorder -> delivery -> stage -> [async_iterator].

The stages, in the order in which a batch passes them:

    __init__     consumer      sampler, opener, counters                   consumer.py
                 scheduler     which worker gets which task; order         scheduler.py
                 queue         batches that are ready                      ready_queue.py
    _start       pool          worker processes and their rings            workers/pool.py
                 pipeline      carries out the scheduler's actions         pipeline.py
                 stage         copies to page-locked memory, or a device   delivery/stage.py, delivery/device_stage.py
    __anext__    wait          for the queue
                 open          a view of the slot, or a copy               delivery/opener.py
                 advance       the sampler by one; returns the credit      pipeline.py

Ownership: the event loop refers to the pool, the pool to the pipeline, the pipeline to the queue, and none of them to
the iterator. An iterator that is dropped (``break``) is therefore freed at once, and its workers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

from asyncloader.base.bridge import in_thread
from asyncloader.base.events import Action, Deliver, Fail, Finish
from asyncloader.base.process_hooks import THIS_PROCESS, own_pid
from asyncloader.base.shielding import shielded
from asyncloader.epoch.consumer import NO_BATCH, Consumer, discard
from asyncloader.epoch.pipeline import Pipeline
from asyncloader.epoch.plan import make_pool, open_assignment, start_method, worker_setup
from asyncloader.epoch.ready_queue import ReadyQueue
from asyncloader.epoch.respawn import WorkerRespawner, setup_of
from asyncloader.epoch.torch_iterator import TorchIterator, shared_seed, warn_over_length
from asyncloader.errors import LoaderClosed, LoaderTimeout, TooManySkippedSamples, is_tried_again
from asyncloader.options.declaration import B_co
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.state.progress import Progress
from asyncloader.telemetry.counters import recording
from asyncloader.telemetry.profiler_ranges import in_range, recorded
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.error_pickle import hide_our_frames, said_again
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc.ring_manager import KeptRings
from asyncloader.workers.pool import WorkerPool

if TYPE_CHECKING:
    from asyncloader.delivery.transfer import DeviceTransfer


class PoolCache(Protocol):
    """The loader, as its iterator sees it: begins epochs, and keeps persistent workers between iterators."""

    def begin_epoch(self) -> tuple[Progress, TorchIterator, EpochConfig]:
        """Begin an epoch: its position, torch's iterator base with its random numbers, and its options; those of
        persistent workers are the options that they were started with.
        """
        ...

    def transfer(self) -> tuple[DeviceTransfer | None, KeptRings | None]:
        """What copies the epoch's batches to the device, and the rings that are page-locked for it."""
        ...

    @property
    def idle(self) -> bool:
        """Whether there are idle workers to take."""
        ...

    def take(self) -> WorkerPool | None:
        """The idle workers, to be used again; None: start new workers."""
        ...

    def register(self, pool: WorkerPool) -> None:
        """Register newly started workers."""
        ...

    def put_back(self, pool: WorkerPool) -> bool:
        """Keep the workers for the next iterator; False if the caller must stop them."""
        ...


class AsyncLoaderIterator(Generic[B_co]):
    """Iterates once over a loader with workers. Made by ``aiter(loader)``; belongs to the loop that first awaits it.

    `__anext__` may be cancelled at any point; the next call gives the batch that it would have given. Dropping the
    iterator, or `aclose`, frees the workers.
    """

    def __init__(self, statistics: Statistics, pool_cache: PoolCache) -> None:
        self._pool_cache = pool_cache
        self._statistics = statistics
        self._begin()
        self._timeout = min(self._progress.config.timeout, threading.TIMEOUT_MAX)  # asyncio cannot wait for infinity
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._owner = THIS_PROCESS.pid or own_pid()
        self._yielded = 0
        self._queue = ReadyQueue()
        self.pool: WorkerPool | None = None
        self._pipeline: Pipeline | None = None
        self._starting: asyncio.Task[None] | None = None
        # Why there are no more batches: None while there are, "" at the end of the epoch. A text, not an exception: a
        # raised one refers to the consumer's frames, and so to the batches that those hold.
        self._ended: str | None = None
        self._raised: BaseException | None = None  # for each further call: a store failed, or the epoch could not begin
        self._closed = False

    def _begin(self) -> None:
        """Draw the epoch's random numbers and take the sampler's first indices. No worker starts yet."""
        begun = self._statistics.begin()
        self._progress, self._torch_iter, self._config = self._pool_cache.begin_epoch()
        self._starts: Sequence[EpochStart]
        self._base_seed, self._starts = self._progress.starts(
            self._config.num_workers,
            int(self._torch_iter._base_seed),
            shared_seed(self._torch_iter),
            new_workers=not self._pool_cache.idle,
        )
        self._torch_iter._base_seed = self._base_seed  # for later epochs, too, if the workers are persistent
        # Kept after the start, for replacements of workers that die.
        self._setup = worker_setup(self._config, self._torch_iter, self._base_seed, self._starts)
        transfer, self._kept_rings = self._pool_cache.transfer()
        self._consumer = Consumer(
            self._config,
            self._torch_iter,
            self._statistics,
            self._progress,
            transfer,
            begun=begun,
        )

    def __aiter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._torch_iter)

    def __repr__(self) -> str:
        state = "over" if self._ended is not None else "running" if self._pipeline else "new"
        return f"<AsyncLoaderIterator {state}, {len(self._queue.items)} ready>"

    def __reduce__(self) -> Any:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    @property
    def queue_depth(self) -> int:
        """Number of batches that are ready and not taken."""
        return len(self._queue.items)

    # ------------------------------------------------------------------------------------------- starting

    async def _ensure_started(self) -> None:
        # A start that failed, or was cut short by Ctrl-C or the end of its loop, is made once more.
        if self._starting is None or _failed(self._starting):
            self._loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self._progress.asked = True
            # In seeded mode `set_epoch` may come between `aiter()` and the first batch.
            if self._progress.outdated:
                self._begin()
                self._progress.asked = True
            with recording(self._statistics.recorder):
                # The task's context keeps the recorder: requests that are made while it starts are counted.
                self._starting = self._loop.create_task(self._start())
        # Shielded: if this caller is cancelled, the start goes on, for the next caller and for `aclose`.
        starting = self._starting
        try:
            await shielded(starting)
        except (KeyboardInterrupt, SystemExit):
            # The loop has raised it already, out of the start itself: it must not raise it twice.
            raise asyncio.CancelledError from None
        except Exception:
            if self._starting is starting:
                self._starting = None  # or its error would be kept until the next call
            raise

    async def _start(self) -> None:
        assignments, self._starts = await open_assignment(self._progress, self._starts)
        if self._closed:  # `close` does not wait for this
            return
        if assignments is not None:
            self._setup = self._setup._replace(starts=self._starts, dataset=self._torch_iter._dataset)
        pool = self._pool_cache.take()
        if pool is None:
            make = self._pool_maker()
            # A fork must happen in the user's thread; other start methods need not block the loop.
            pool = make() if start_method(self._config) == "fork" else await in_thread(make)
            # Before `_closed` is tested: the loader's `aclose` must find the pool, and wait for the end of its
            # processes.
            self._pool_cache.register(pool)
            if self._closed:
                # `close` came while the workers were started, and had no pool yet to stop.
                pool.stop_soon()
                return
        self.pool = pool
        put_from_thread = partial(_put_from_thread, asyncio.get_running_loop(), self._queue)
        # Weak: the loop refers to the respawner by way of the pipeline, and must not keep the iterator.
        respawner = WorkerRespawner(pool, setup_of(self), None)
        self._pipeline = self._consumer.pipeline(pool, self._queue.put, put_from_thread, respawner)
        self._pipeline.start(self._consumer.offers, self._starts)

    def _pool_maker(self) -> Callable[[], WorkerPool]:
        return partial(make_pool, self._config, self._setup, self._kept_rings, self._statistics)

    # ------------------------------------------------------------------------------------------- iterating

    async def __anext__(self) -> B_co:
        if THIS_PROCESS.pid != self._owner:
            raise LoaderClosed("this iterator belongs to the process that this one was forked from; make a new one")
        begin = perf_counter()
        items = self._queue.items
        batch: B_co
        try:
            while True:  # once, unless several tasks share this iterator, or all samples of a batch were dropped
                self._consumer.drain_notices()
                if items:
                    waited = perf_counter() - begin
                    # Nothing is awaited between this line and the delivery: a cancellation loses no batch.
                    item = items.popleft()
                    if not isinstance(item, Deliver):
                        try:
                            error = await self._end(item)
                        except asyncio.CancelledError:
                            self._queue.give_back(item)  # or the next call would report a normal end
                            raise
                        try:
                            raise error
                        finally:
                            del item, error  # the traceback refers to this frame, which must not refer back to it
                    batch = self._deliver(item, waited)
                    if batch is not NO_BATCH:
                        return batch
                else:
                    self._statistics.waiting_since = begin
                    try:
                        if recorded():
                            with in_range("asyncloader::wait"):
                                await self._wait()
                        else:
                            await self._wait()
                    finally:
                        self._statistics.waiting_since = None
        except EndOfData:
            raise StopAsyncIteration from None
        except (StopIteration, StopAsyncIteration) as stop:  # from a worker, or of a plain sampler
            hide_our_frames(stop)
            raise not_the_end(stop, "the dataset's or sampler's code") from stop
        except Exception as error:
            if isinstance(error, TooManySkippedSamples):
                self._ended = str(error)  # for the next call, if `aclose` is cancelled
                await self.aclose()
                self._ended = ""
            hide_our_frames(error)
            raise

    def _deliver(self, item: Deliver, waited: float) -> Any:
        if self._pipeline is None:
            raise LoaderClosed("this iterator was closed")
        try:
            batch = self._consumer.deliver(item, waited, self._pipeline.advance)
        finally:
            delivery = self._consumer.delivery
            # Otherwise the iterator would keep the batch, and its slot, until the next delivery.
            delivery.item = delivery.batch = delivery.error = None
        if batch is NO_BATCH:
            return batch
        self._yielded += 1
        self._torch_iter._num_yielded = self._yielded
        if self._torch_iter._IterableDataset_len_called is not None:
            warn_over_length(self._torch_iter)
        return batch

    async def _wait(self) -> None:
        """Wait until an item may be ready. Raises if no item will come."""
        if self._ended is not None:
            if self._raised is not None:
                raise said_again(self._raised)
            raise LoaderClosed(self._ended) if self._ended else EndOfData
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
            report = await pipeline.report()
            error.add_note(report)
            if (trace := self._statistics.trace) is not None and (
                written := await in_thread(partial(trace.timed_out, report))
            ):
                error.add_note(written)
            raise error from None

    async def _end(self, item: Action) -> BaseException:
        """End the epoch with this item. Returns the exception to raise."""
        if isinstance(item, Finish):
            self._ended = ""
            self._progress.finish()
            await self.aclose()
            self._consumer.drain_notices()
            return EndOfData()
        assert isinstance(item, Fail)
        if self._ended is None and (is_tried_again(item.error) or not self._yielded):
            self._raised = said_again(item.error)
        self._ended = ""  # raised once; a caller that ignores it gets a normal end next
        await self.aclose()
        return item.error

    # --------------------------------------------------------------------------------------------- closing

    async def aclose(self) -> None:
        """Free the workers, and wait until they have ended unless they are persistent. Idempotent."""
        if self._starting is not None and not self._starting.done():
            # Not cancelled: it may be starting processes, which are ended below.
            await asyncio.wait([self._starting])
        if not self._closed:
            if self._ended is None:
                self._ended = "this iterator was closed"
            # Awaited here, because `_detach` would hold up the loop until the stage's current copy is made.
            await self._consumer.end_stage()
        pool, reader = self._detach()
        try:
            if reader is not None:
                await asyncio.wait([reader])  # not awaited: its cancellation is not the caller's
        except asyncio.CancelledError:
            assert reader is not None
            reader.cancel()  # once more: this also cancels the sampler's clean-up
            raise
        finally:
            if pool is not None:
                # Shielded: if this is cancelled, the workers are ended nevertheless.
                await shielded(in_thread(pool.stop))

    def close(self) -> None:
        """`aclose` for code that is not async: blocks until the workers have ended. In the loop's thread, or after the
        loop has ended.
        """
        pool, _ = self._detach()
        if pool is not None:
            pool.stop()

    def _detach(self) -> tuple[WorkerPool | None, asyncio.Task[None] | None]:
        """Stop the pipeline. Returns the pool if it must be stopped, and the task that must still be awaited."""
        if self._closed:
            return None, None
        # A start that is still in progress looks at this, and ends its workers by itself.
        self._closed = True
        if self._ended is None:
            self._ended = "this iterator was closed"
        pipeline, self._pipeline = self._pipeline, None
        self._consumer.close()
        return _release(pipeline, self._queue, self._pool_cache, self.pool)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if exiting() or getattr(self, "_closed", True) or os.getpid() != self._owner:
            return
        # The parts without the iterator, which must not live on in a callback of the loop.
        loop, parts = self._loop, (self._pipeline, self._consumer, self._queue, self._pool_cache, self.pool)
        if loop is None or loop.is_closed() or threading.get_ident() == self._thread:
            _abandon(*parts)
        else:  # collected in another thread: the loop's readers must be removed in the loop's own thread
            # The loop may just have been closed. Then the pool's own finalizer ends the workers.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_abandon, *parts)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _release(
    pipeline: Pipeline | None, queue: ReadyQueue, pool_cache: PoolCache, pool: WorkerPool | None
) -> tuple[WorkerPool | None, asyncio.Task[None] | None]:
    """End an iterator's parts except the consumer. In the loop's thread."""
    reader = pipeline.close() if pipeline is not None else None
    queue.close()
    # After `pipeline.close`, which detaches the pool: the next iterator may attach it at once.
    if pool is None or pool_cache.put_back(pool):
        return None, reader
    return pool, reader


def _abandon(
    pipeline: Pipeline | None, consumer: Consumer, queue: ReadyQueue, pool_cache: PoolCache, pool: WorkerPool | None
) -> None:
    """End the parts of an iterator that was dropped. Does not wait."""
    consumer.close(wait=False)
    pool, _ = _release(pipeline, queue, pool_cache, pool)
    if pool is not None:
        pool.stop_soon()


def _put_from_thread(loop: asyncio.AbstractEventLoop, queue: ReadyQueue, item: Action) -> None:
    try:
        loop.call_soon_threadsafe(queue.put, item)
    except RuntimeError:  # the loop was closed while a copy was in flight
        discard(item)
