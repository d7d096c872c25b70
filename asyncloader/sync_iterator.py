"""One epoch of a DataLoader: what `iter()` gives, without workers and with them.

Data path: sampler -> scheduler -> pool -> worker -> ring -> reorder -> delivery -> pin_memory -> [sync_iterator].

What runs where: the sampler is advanced and batches are opened in the caller's thread, in `next()`; the pipeline runs
in the bridge's loop thread; between the two there is one queue each way. Workers are started in the caller's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import queue
import weakref
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader.bridge import Bridge
from asyncloader.checkpoint import StateKeeper
from asyncloader.consumer import Consumer, discard
from asyncloader.draws import draw_source, shared_seed, warn_over_length
from asyncloader.errors import LoaderClosed, LoaderTimeout
from asyncloader.events import Action, Deliver, Fail, Finish
from asyncloader.inline import batch_nbytes, count_samples, inline_stream, make_inline_reader
from asyncloader.options import (
    LoaderSpec,
    async_index_source,
    epoch_plan,
    worker_context,
    worker_setup,
)
from asyncloader.pin_memory import torch_pin
from asyncloader.pipeline import Pipeline
from asyncloader.progress import Progress
from asyncloader.statistics import Statistics
from asyncloader.workers.info import EpochStart
from asyncloader.workers.pool import WorkerPool

__all__ = ["InlineIterator", "WorkerIterator"]


class _CountedNext(_BaseDataLoaderIter):
    """torch's `__next__`, with the profiler's range only while a profiler looks (it costs 10 microseconds)."""

    def __next__(self) -> Any:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with torch.autograd.profiler.record_function(self._profile_name):
                data: Any = self._next_data()
        else:
            data = self._next_data()
        self._num_yielded += 1
        if self._IterableDataset_len_called is not None:
            warn_over_length(self)
        return data


class InlineIterator(_CountedNext):
    """Without workers: torch's fetcher in the caller's thread; async datasets and samplers on the bridge's loop."""

    queue_depth = 0

    def __init__(self, loader: LoaderSpec[Any], statistics: Statistics, bridge: Bridge, keeper: StateKeeper) -> None:
        progress = keeper.begin(loader)
        super().__init__(draw_source(loader, progress.epoch))
        if self._timeout:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._spec = loader
        self._keeper = keeper
        self._statistics = statistics
        self._source = async_index_source(loader)
        self._indices: Any = None
        self._bridge: Bridge | None = None
        self._owner = os.getpid()
        self._begin(progress)
        self._uses_loop = self._reader.asynchronous or self._source is not None
        if self._uses_loop:
            self._bridge = bridge
            self._bridge.acquire()
        self._pin = torch_pin(self._pin_memory_device) if self._pin_memory else None
        self._begun = self._statistics.begin()

    def _begin(self, progress: Progress) -> None:
        self._progress = progress
        self._agreement = progress.agreement
        self._tasks = 0
        self._fresh = True
        self._reader = make_inline_reader(self._spec, self, progress)
        self._stream = inline_stream(self._spec, self, progress)

    def _next_data(self) -> Any:
        begin = perf_counter()
        if self._fresh:
            if self._progress.outdated:
                self._begin(self._keeper.begin(self._spec))
            self._fresh = False
        try:
            index, data = self._fetched()
            if self._agreement is not None and not self._agreement.batch():
                raise StopIteration
            cursor = self._reader.cursor()
            if self._pin is not None:
                data = self._pin(data)
        except StopIteration:
            if self._agreement is not None:
                self._agreement.end()
            self._progress.ends[0] = self._reader.last_cursor()
            self._progress.finish()
            raise
        except BaseException:
            if self._agreement is not None:
                self._agreement.fail()
            self._progress.failed(self._tasks)
            self._tasks += 1
            raise
        self._progress.delivered(self._tasks, 0, cursor)
        self._tasks += 1
        passed = perf_counter() - begin
        if not self._num_yielded:
            self._statistics.first_batch(self._begun)
        self._statistics.batch(count_samples(self._spec, index), batch_nbytes(data), 0, passed, passed, 1)
        return data

    def _fetched(self) -> tuple[Any, Any]:
        if not self._uses_loop:
            index = self._next_index_plain()
            return index, self._reader.fetch(index)
        if self._bridge is None:
            raise StopIteration
        try:
            return self._bridge.run(self._fetch())
        except StopAsyncIteration:
            self._release()
            raise StopIteration from None

    async def _fetch(self) -> tuple[Any, Any]:
        index = await self._next_index_async()
        if self._reader.asynchronous:
            return index, await self._reader.fetch_async(index)
        return index, self._reader.fetch(index)

    def _next_index_plain(self) -> Any:
        if self._stream is None:  # an iterable dataset's indices say no more than how many samples
            return next(self._sampler_iter)
        step, index = self._stream.pull()
        self._progress.pulled(self._tasks, step)
        return index

    async def _next_index_async(self) -> Any:
        if self._source is None:
            try:
                return self._next_index_plain()
            except StopIteration:
                raise StopAsyncIteration from None
        if self._indices is None:
            self._indices = self._source.reading(self._progress)
        return await anext(self._indices)

    def _release(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.release()

    def _shutdown_workers(self) -> None:
        """End the epoch. The name is torch's."""
        if self._agreement is not None:
            self._agreement.give_up()
        self._release()

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():
            self._shutdown_workers()


class WorkerIterator(_CountedNext):
    """With workers. The loop's thread refers to the pipeline and the queue, never to this object: dropped, it dies."""

    def __init__(self, loader: LoaderSpec[Any], statistics: Statistics, bridge: Bridge, keeper: StateKeeper) -> None:
        self._keeper = keeper
        self._loader = weakref.ref(loader)
        self._progress = keeper.begin(loader)
        if not (self._progress.follows and loader.persistent_workers):  # else they would have begun before
            loader._workers_begin()
        super().__init__(draw_source(loader, self._progress.epoch))
        self._progress.base_seed_drawn()
        self._shutdown = True  # until there is something to shut down
        self._timeout_or_none = self._timeout or None
        self._statistics = statistics
        self._bridge = bridge
        self._owner = os.getpid()
        self._pipeline: Pipeline | None = None
        self._consumer: Consumer | None = None
        self._ended: str | None = None  # as in async_iterator.py
        self._queue: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._acquire(loader)
        _install_exit_hook()
        _live.add(self)
        try:
            self._reset(loader, first_iter=True)
        except BaseException:
            self._shutdown_workers()
            raise

    def _acquire(self, loader: LoaderSpec[Any]) -> None:
        """Start workers and the loop's thread; `_shutdown_workers` gives both back."""
        plan = self._plan = epoch_plan(loader)
        base_seed, starts = self._progress.starts(plan.workers, int(self._base_seed), shared_seed(self))
        setup = worker_setup(loader, plan.workers, self, base_seed, starts)
        # Forked here, in the caller's thread and before the loop's thread exists.
        self._pool = WorkerPool(worker_context(loader), setup, plan.credits, loader.ring_bytes, plan.run_ahead)
        self._workers = [process.process for process in self._pool.processes]
        self._bridge.acquire()
        self._shutdown = False

    @property
    def queue_depth(self) -> int:
        """Batches that are ready and not taken."""
        return self._queue.qsize()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch; with persistent workers torch's loader calls this for every one after the first."""
        if not first_iter:
            self._progress = self._keeper.begin(loader)
        begun_with = self._shared_seed
        super()._reset(draw_source(loader, self._progress.epoch), first_iter)
        if first_iter:
            self._shared_seed = begun_with  # torch draws another one here, too, but its workers have got the first
        if not first_iter:
            if loader.seed is not None:
                self._index_sampler = loader._index_sampler  # the ranks may be others, and the share with them
            if not self._shutdown and self._pool.broken:
                self._shutdown_workers()
            if self._shutdown:  # a worker died in the last epoch, or since: begin with new ones
                self._acquire(loader)
            else:
                self._end_epoch()
        self._ended = None
        self._fresh = True
        self._queue = queue.SimpleQueue()
        put = self._queue.put
        _, starts = self._progress.starts(self._plan.workers, int(self._base_seed), shared_seed(self))
        self._consumer = Consumer(self._plan, self, self._statistics, self._progress)
        self._pipeline = self._consumer.pipeline(self._pool, put, put)
        self._tell = partial(self._bridge.call, self._pipeline.advance)
        self._bridge.call(_start, self._pipeline, self._consumer.offers, starts, put)

    def _next_data(self) -> Any:
        if self._ended is not None:
            raise StopIteration if not self._ended else LoaderClosed(self._ended)
        if os.getpid() != self._owner:
            raise LoaderClosed("this iterator belongs to the process that this one was forked from; make a new one")
        if self._fresh:
            loader = self._loader()
            if self._progress.outdated and loader is not None:
                self._reset(loader)
            self._fresh = False
        begin = perf_counter()
        try:
            item = self._queue.get(timeout=self._timeout_or_none)
        except queue.Empty:
            raise LoaderTimeout(self._timeout) from None
        waited = perf_counter() - begin
        if not isinstance(item, Deliver):
            error = self._end(item)
            try:
                raise error
            finally:
                del item, error  # the traceback refers to this frame, which must not refer back to the error
        consumer = self._consumer
        assert consumer is not None
        return consumer.deliver(item, waited, self._tell)

    def _end(self, item: Action) -> BaseException:
        """End with this item; returns what is to be raised."""
        if isinstance(item, Finish):
            self._ended = ""
            self._progress.finish()
            if self._persistent_workers:
                self._end_epoch()
            else:
                self._shutdown_workers()
            return StopIteration()
        assert isinstance(item, Fail)
        self._ended = ""  # raised once; a caller that goes on regardless must come to an end
        self._shutdown_workers()
        return item.error

    def _end_epoch(self) -> None:
        """Take the pool out of the loop and drop what nobody will take."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._bridge.run(_close(pipeline))
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        while not self._queue.empty():
            discard(self._queue.get())

    def _shutdown_workers(self) -> None:
        """End the epoch and the workers; wait until they are gone. Idempotent. The name is torch's."""
        if self._shutdown or os.getpid() != self._owner:
            return
        self._shutdown = True
        if self._ended is None:
            self._ended = "this iterator was shut down"
        if self._bridge.inside:
            # Collected by the loop's own thread, which cannot wait for itself.
            if self._pipeline is not None:
                self._pipeline.close()
            self._pool.stop_soon()
            self._bridge.release()
            return
        try:
            self._end_epoch()
        finally:
            self._bridge.release()
            self._pool.stop()

    def __del__(self) -> None:
        if not getattr(self, "_shutdown", True):
            self._shutdown_workers()


def _start(pipeline: Pipeline, offers: list[Any], starts: Sequence[EpochStart], sink: Any) -> None:
    """In the loop's thread."""
    try:
        pipeline.start(offers, starts)
    except Exception as error:
        sink(Fail(error))


async def _close(pipeline: Pipeline) -> None:
    reader = pipeline.close()
    if reader is not None:
        with contextlib.suppress(asyncio.CancelledError):
            await reader


# Iterators that may still have workers. At exit they are shut down while their loops' threads still run.
_live: weakref.WeakSet[WorkerIterator] = weakref.WeakSet()


@functools.cache
def _install_exit_hook() -> None:
    # Registered after the pool's own hook, hence called before it.
    atexit.register(_shutdown_all)


def _shutdown_all() -> None:
    for iterator in list(_live):
        iterator._shutdown_workers()
