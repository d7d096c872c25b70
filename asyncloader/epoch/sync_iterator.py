"""Iterates a DataLoader with workers. (Without workers: `sync_inline.py`.)

Data path: sampler -> scheduler -> pool -> worker -> ring -> reorder -> delivery -> stage -> [sync_iterator].

Threads: the sampler is advanced and batches are opened in the caller's thread, inside `next()`; the pipeline runs in
the bridge's loop thread; one queue in each direction connects the two. Workers are started in the caller's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from asyncloader.base.bridge import Bridge, in_thread, run_in_thread
from asyncloader.base.events import Action, Deliver, Fail, Finish
from asyncloader.base.process_hooks import THIS_PROCESS, own_pid
from asyncloader.delivery.loader_device import kept_rings_of, transfer_of
from asyncloader.delivery.opener import raise_worker_error
from asyncloader.epoch.consumer import NO_BATCH, Consumer, discard
from asyncloader.epoch.pipeline import Pipeline
from asyncloader.epoch.plan import check_workers, make_pool, open_assignment, worker_setup
from asyncloader.epoch.ready_queue import BlockingQueue
from asyncloader.epoch.respawn import WorkerRespawner, setup_of
from asyncloader.epoch.sync_inline import CountedNext, close_at_exit
from asyncloader.epoch.torch_iterator import shared_seed
from asyncloader.errors import LoaderClosed, LoaderTimeout, TooManySkippedSamples, is_tried_again
from asyncloader.options.declaration import LoaderSpec
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.telemetry.profiler_ranges import in_range
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.error_pickle import said_again
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.pool import WorkerPool

_POP = deque[Action | None].popleft
_NOTHING = contextlib.nullcontext()
_SHUT_DOWN = "this iterator was shut down"
_TWO_THREADS = (
    "next() of this iterator was called while another thread is in it: let one thread at a time call it, under a lock, "
    "or have each thread iterate over a loader of its own"
)


class WorkerIterator(CountedNext):
    """Iterates with workers. The loop's thread refers to the pipeline and the queue, never to this object, so that it
    is freed as soon as it is dropped.
    """

    def __init__(self, loader: LoaderSpec[Any], statistics: Statistics, bridge: Bridge, keeper: StateKeeper) -> None:
        self._keeper = keeper
        # Weak, because the loader refers to this iterator if its workers are persistent.
        self._loader = weakref.ref(loader)
        self._kept_rings = kept_rings_of(loader)
        self._progress = keeper.begin(loader)
        if not (self._progress.follows and loader.persistent_workers):  # else they would have begun before
            loader._asyncloader_workers_begin()
        super().__init__(loader, self._progress)
        self._progress.base_seed_drawn()
        self._shutdown = True  # until workers have been started
        # A timeout longer than a lock can wait for, such as infinity, means no timeout.
        self._timeout_or_none = self._timeout if 0 < self._timeout <= threading.TIMEOUT_MAX else None
        self._statistics = statistics
        self._bridge = bridge
        self._owner = THIS_PROCESS.pid or own_pid()
        self._pipeline: Pipeline | None = None
        self._consumer: Consumer | None = None
        self._acquired: Sequence[EpochStart] | None = None  # where newly started workers begin
        self._ended: str | None = None  # as in async_iterator.py
        self._raised: BaseException | None = None  # for each further call: a store failed, or the epoch could not begin
        self._queue = BlockingQueue()
        self._taker: int | None = None  # the thread that is in `next`
        self._taken: deque[Action | None] = deque()  # taken from the queue and not finished; one at most
        self._delivering: Consumer | None = None  # the consumer that has begun to deliver it
        self._begun = statistics.begin()
        self._acquire()
        close_at_exit(self)
        try:
            self._reset(loader, first_iter=True)
        except BaseException:
            # The workers and the loop's thread have started, and the caller gets no iterator that could end them.
            self._shutdown_workers()
            raise

    def _acquire(self) -> None:
        """Start workers and the loop's thread; `_shutdown_workers` ends both."""
        self._bridge.wait_for_releases()  # no thread of an iterator that was dropped is in the way of the forks
        config = self._config = self._progress.config  # persistent workers keep it
        check_workers(config)
        base_seed, starts = self._begin_workers(new_workers=True)
        self._base_seed, self._acquired = base_seed, starts
        self._setup = worker_setup(config, self, base_seed, starts)
        # Forked here, in the caller's thread and before the loop's thread exists.
        self._pool = make_pool(config, self._setup, self._kept_rings, self._statistics)
        self._bridge.acquire()
        # From here on `_shutdown_workers` ends both.
        self._shutdown = False

    def _begin_workers(self, *, new_workers: bool = False) -> tuple[int, Sequence[EpochStart]]:
        """The base seed, and where each worker begins."""
        base_seed, starts = self._progress.starts(
            self._config.num_workers, int(self._base_seed), shared_seed(self), new_workers=new_workers
        )
        if not self._config.planned:
            return base_seed, starts
        # In a loop and a thread of its own, which have ended before a worker is forked.
        return base_seed, run_in_thread(open_assignment(self._progress, starts))[1]

    @property
    def _workers(self) -> list[Any]:
        """The current worker processes. The name is torch's."""
        return [process.process for process in self._pool.processes]

    @property
    def _tasks_outstanding(self) -> int:
        """Batches of a plain sampler that were requested and not delivered. The name is torch's, as the next two."""
        return 0 if self._consumer is None else self._consumer.outstanding

    @property
    def _rcvd_idx(self) -> int:
        return int(self._num_yielded)

    @property
    def _send_idx(self) -> int:
        return self._rcvd_idx + self._tasks_outstanding

    @property
    def owned(self) -> bool:
        """Whether this process made the iterator, rather than a process that it was forked from."""
        return os.getpid() == self._owner

    @property
    def queue_depth(self) -> int:
        """Number of batches that are ready and not taken."""
        return len(self._queue)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch. With persistent workers torch's loader calls this for every epoch after the first."""
        if not first_iter:
            self._progress = self._keeper.begin(loader)
            self._begun = self._statistics.begin()
        begun_with = self._shared_seed
        self._begin_order(loader, self._progress, first_iter=first_iter)
        if first_iter:
            self._shared_seed = begun_with  # torch, too, draws a second seed here, and its workers have the first
        if not first_iter:
            if not self._shutdown:
                self._end_epoch()  # first: the loop handles dying workers until then
                # Each worker has the copies of some of the streams that there were.
                if self._pool.broken or self._progress.config.loader_streams != self._config.loader_streams:
                    self._shutdown_workers()
            if self._shutdown:  # as after the death of a worker in the last epoch: start new workers
                if not self._config.seeded:
                    # With the old base seed they would draw the same numbers again. It is derived, not drawn: the
                    # user's generator may also be the sampler's.
                    self._base_seed = derive(int(self._base_seed), "anew") >> 1
                self._acquire()
        self._drop_taken()
        self._ended = self._raised = None
        self._fresh = True
        self._taker = None  # of the epoch before
        # A new queue: the one before may hold the item with which `_shutdown_workers` woke its readers.
        self._queue = BlockingQueue()
        put = self._queue.put
        # Taken out: they hold for one epoch, and persistent workers begin the next epoch at other positions.
        starts, self._acquired = self._acquired, None
        if starts is None:
            _, starts = self._begin_workers()
        self._consumer = Consumer(
            self._config,
            self,
            self._statistics,
            self._progress,
            transfer_of(loader),
            begun=self._begun,
        )
        # Weak: the loop's thread refers to the respawner, which must not keep the iterator.
        self._respawner = WorkerRespawner(self._pool, setup_of(self), partial(put, None))
        self._pipeline = self._consumer.pipeline(self._pool, put, put, self._respawner)
        self._advance = partial(self._bridge.call_soon, self._pipeline.advance)
        # Queued before any `advance`: the bridge keeps the order of the calls.
        self._bridge.call_soon(self._pipeline.start, self._consumer.offers, starts)
        if self._config.awaits_workers:
            self._await_workers(self._pipeline, self._consumer)
        self._statistics.begins(self._begun)

    def _await_workers(self, pipeline: Pipeline, consumer: Consumer) -> None:
        """Wait until all workers have begun the epoch. Raises the error of one that could not."""
        try:
            error = self._bridge.run(asyncio.wait_for(pipeline.begun(), self._timeout_or_none))
        except TimeoutError:
            raise self._timed_out() from None
        consumer.drain_notices()
        if error is not None:
            self._shutdown_workers()
            raise_worker_error(error)

    def _next_data(self) -> Any:
        # Two threads would take one batch twice, or wait for ever for what the other has taken. No lock: it would be
        # released by a call after the batch was taken, where Ctrl-C would lose it. And no calls between the test and
        # the mark, where the other thread could come in.
        me, before = threading.get_ident(), self._taker
        if before is not None and before != me and THIS_PROCESS.pid == self._owner:
            raise RuntimeError(_TWO_THREADS)
        self._taker = me
        try:
            if self._ended is not None:
                self._drop_taken()
                if self._raised is not None:
                    raise said_again(self._raised)
                raise StopIteration if not self._ended else LoaderClosed(self._ended)
            if THIS_PROCESS.pid != self._owner:
                raise LoaderClosed("this iterator belongs to the process that this one was forked from; make a new one")
            if self._fresh:
                self._progress.asked = True
                # In seeded mode `set_epoch` may come between `iter()` and the first batch.
                loader = self._loader()
                if self._progress.outdated and loader is not None:
                    self._reset(loader)
                self._fresh = False
            # A local name: another thread that closes the iterator sets the attribute to None.
            consumer = self._consumer
            if consumer is None:  # another thread has just closed it
                raise LoaderClosed(self._ended or "this iterator has ended")
            while True:
                consumer.drain_notices()
                if self._respawner.requests:
                    self._respawner.work()
                begin = perf_counter()
                taken = self._taken
                if not taken:
                    ready = self._queue
                    if not ready or self._profiled:
                        self._wait(begin)
                    try:
                        # One call into C moves the item, so Ctrl-C cannot lose it.
                        taken.extend(map(_POP, (ready,)))
                    except IndexError:  # woken without an item, or another thread is closing the iterator
                        continue
                item = taken[0]
                # A request for a replacement: the top of the loop carries it out.
                if item is None:
                    del taken[0]
                    continue
                if not isinstance(item, Deliver):
                    error = self._end(item)
                    taken.clear()
                    try:
                        raise error
                    finally:
                        del item, error  # the traceback refers to this frame, which must not refer back to the error
                # Noted for `_drop_taken`, which also runs when `_consumer` has been set to None.
                self._delivering, delivery = consumer, consumer.delivery
                try:
                    batch = consumer.deliver(item, perf_counter() - begin, self._advance)
                except TooManySkippedSamples as error:
                    self._fail(error)
                    raise
                except Exception:
                    # No calls from here on, so that Ctrl-C cannot come before the caller has the error.
                    del taken[0]
                    self._delivering, delivery.item, delivery.batch, delivery.error = None, None, None, None
                    raise
                # As above.
                del taken[0]
                self._delivering, delivery.item, delivery.batch, delivery.error = None, None, None, None
                if batch is not NO_BATCH:
                    return batch
        finally:
            self._taker = before

    def _wait(self, begin: float) -> None:
        """Wait until an item may be ready."""
        try:
            self._statistics.waiting_since = begin
            with in_range("asyncloader::wait") if self._profiled else _NOTHING:
                self._queue.wait(self._timeout_or_none)
        except queue.Empty:
            raise self._timed_out() from None
        finally:
            self._statistics.waiting_since = None

    def _drop_taken(self) -> None:
        """Discard the item whose delivery Ctrl-C interrupted. In the iterating thread."""
        consumer, self._delivering = self._delivering, None
        while self._taken:
            item = self._taken.pop()
            if consumer is not None and isinstance(item, Deliver):
                consumer.abandon(item)
            elif item is not None:
                discard(item)

    def _timed_out(self) -> LoaderTimeout:
        error, pipeline = LoaderTimeout(self._timeout), self._pipeline
        if pipeline is not None:
            with contextlib.suppress(LoaderClosed):  # closed by another thread just now
                report = self._bridge.run(pipeline.report())
                error.add_note(report)
                if (trace := self._statistics.trace) is not None and (written := trace.timed_out(report)):
                    error.add_note(written)
        return error

    def _end(self, item: Action) -> BaseException:
        """End the epoch with this item. Returns the exception to raise."""
        consumer = self._consumer
        if isinstance(item, Finish):
            # First: if Ctrl-C ends one of the calls below, the next call ends too, and does not wait for batches.
            self._ended = ""
            self._progress.finish()
            if self._persistent_workers:
                self._end_epoch()
            else:
                self._shutdown_workers()
            if consumer is not None:
                consumer.drain_notices()
            return StopIteration()
        assert isinstance(item, Fail)
        again = self._ended is None and (
            is_tried_again(item.error) or (not self._rcvd_idx and self._progress.agreement is None)
        )
        if again:
            self._raised = said_again(item.error)
        if again and self._persistent_workers and not self._pool.broken:
            self._ended = ""
            self._end_epoch()  # the workers are well: a store failed, or one of them could not begin
        else:
            self._fail(item.error)
        return item.error

    def _fail(self, error: BaseException) -> None:
        """End the epoch with this error, which the caller raises."""
        self._ended = f"{type(error).__name__}: {error}"  # for the next call, if Ctrl-C comes in between
        self._shutdown_workers()
        self._ended = ""  # raised once; a caller that ignores it gets a normal end next

    def _end_epoch(self) -> None:
        """Detach the pool from the loop and discard the batches that were not taken."""
        # The queue comes last: until the pipeline is closed and the stages have ended, both may put batches there.
        # The slot of a batch that stays in the queue is never freed.
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._bridge.run(_close(pipeline))
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        self._queue.discard()

    def _shutdown_workers(self) -> None:
        """End the epoch and the workers, and wait until they have ended. Idempotent. The name is torch's."""
        if os.getpid() != self._owner:
            return
        in_loop_thread = self._bridge.in_loop_thread
        # No calls between this test and the mark: other threads, and handlers of signals, come in at calls alone.
        if self._shutdown:
            # There is no pool if the first start failed.
            if hasattr(self, "_pool") and not in_loop_thread:
                self._wait_for_shutdown(self._pool)
            return
        if in_loop_thread:  # which cannot wait for itself
            self._close_soon()
            return
        # Set before anything that waits: a signal handler, or another thread, that calls this again then waits in
        # `stop` instead of ending the epoch a second time.
        self._shutdown = True
        if self._ended is None:
            self._ended = _SHUT_DOWN
        try:
            self._end_epoch()
        finally:
            # In this order: if `_end_epoch` failed, `stop` has to detach the pool, which this thread may do only once
            # the loop is closed.
            self._bridge.release()
            self._pool.stop()
            # Wakes a thread that may be waiting in `next`. Last: that thread may begin the next epoch at once.
            self._queue.put(Fail(LoaderClosed(self._ended or "this iterator has ended")))

    def _wait_for_shutdown(self, pool: WorkerPool) -> None:
        """Wait until the workers have ended, which another thread, or the code that a signal interrupted, has begun."""
        if not pool.stopped:
            # The epoch may not have ended yet. `stop` detaches the pool, and in a loop that runs only the loop's thread
            # may do that.
            with contextlib.suppress(LoaderClosed):  # the loop has ended
                self._bridge.run(_detach(pool))
        pool.stop()  # waits if another thread is stopping it

    def _close_soon(self) -> None:
        if os.getpid() != self._owner or self._shutdown:  # in this order: see `_shutdown_workers`
            return
        self._shutdown = True
        if self._ended is None:
            self._ended = _SHUT_DOWN
        # The parts without the iterator, which is being freed.
        self._bridge.release_soon(_close_dropped, self._pipeline, self._consumer, self._queue, self._pool)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The attribute is missing if `__init__` raised before it was set: then no worker was started.
        if not exiting() and not getattr(self, "_shutdown", True):
            self._close_soon()
            if not self._bridge.in_loop_thread:
                # As with torch's iterator the workers end with it; the threads end later. The loop's thread must not
                # wait for that.
                self._pool.hang_up()


async def _close(pipeline: Pipeline) -> None:
    reader = pipeline.close()
    if reader is not None:
        with contextlib.suppress(asyncio.CancelledError):
            await reader


async def _detach(pool: WorkerPool) -> None:
    pool.detach()


async def _close_dropped(
    pipeline: Pipeline | None, consumer: Consumer | None, ready: BlockingQueue, pool: WorkerPool
) -> None:
    """End the parts of an iterator that was dropped, or that a thread may still read at exit."""
    if pipeline is not None:
        await _close(pipeline)

    def end() -> None:
        try:
            if consumer is not None:
                consumer.close()
            ready.discard()
        finally:
            pool.stop()
            # Last, as in `_shutdown_workers`. A program may wait at its exit for a thread that is in `next`.
            ready.put(Fail(LoaderClosed(_SHUT_DOWN)))

    # In a thread, because closing the stages and stopping the workers both block.
    await in_thread(end)
