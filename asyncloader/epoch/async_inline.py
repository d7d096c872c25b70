"""Iterates an AsyncDataLoader without workers (``num_workers=0``).

Data path: sampler -> [async_inline: fetch -> collate] -> the user.

A blocking dataset is called in a thread, or on the running loop while its batches take little time
(`thread_or_loop.py`); never twice at a time. An async dataset is read on the running loop. For async map datasets, and
with `concurrency`, samples are prefetched (`inline_reader.py`). The sampler and a blocking dataset are advanced
only by `__anext__`, so that random numbers are drawn in torch's order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter, thread_time
from typing import Any, Generic, Self, TypeVar

import torch

from asyncloader.base.bridge import in_thread
from asyncloader.base.events import PackedCursor, SkippedSample
from asyncloader.base.shielding import retrieve_error, shielded
from asyncloader.delivery.stage import use_current_device
from asyncloader.epoch.consumer import NO_BATCH
from asyncloader.epoch.inline import InlineEpoch
from asyncloader.epoch.thread_or_loop import HOLD_SECONDS, BatchCosts, FetchPlace
from asyncloader.epoch.torch_iterator import TorchIterator, warn_over_length
from asyncloader.errors import LoaderClosed, TooManySkippedSamples
from asyncloader.options.declaration import B_co, LoaderSpec
from asyncloader.ranks.exchange import in_daemon
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.telemetry.counters import recording
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.context import UnexpectedCancellation, self_cancelled, warn_of_exit
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.error_pickle import hide_our_frames
from asyncloader.workers.fetch.sample_errors import NoSamples

T = TypeVar("T")


class AsyncInlineIterator(Generic[B_co]):
    """Iterates once over a loader without workers. A cancelled `__anext__` loses no batch."""

    queue_depth = 0

    def __init__(self, spec: LoaderSpec[Any], statistics: Statistics, keeper: StateKeeper, costs: BatchCosts) -> None:
        progress = keeper.begin(spec)
        self._torch_iter = TorchIterator(spec, progress)
        self._epoch = epoch = InlineEpoch(spec, statistics, keeper, self._torch_iter, progress, alone=False)
        # The dataset's code, and pinning, must see this thread's current device. If nothing uses a device, none is
        # touched.
        uses_device = self._torch_iter._pin_memory or torch.cuda.is_initialized()
        waits = epoch.on_loop or epoch.copies or epoch.agreement is not None
        self._place = FetchPlace(
            costs,
            use_current_device() if uses_device else None,
            movable=not waits,
        )
        self._owner = os.getpid()
        self._lock = asyncio.Lock()  # several tasks may share this iterator; each gets batches of its own
        self._pending: asyncio.Future[tuple[Any, Any, PackedCursor | None]] | None = None
        self._records: list[SkippedSample] = []  # of the pending batch
        self._ended: str | None = None  # why there are no more batches, as in async_iterator.py

    def __aiter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._torch_iter)

    def __repr__(self) -> str:
        return f"<AsyncInlineIterator {'running' if self._ended is None else 'over'}>"

    def __reduce__(self) -> Any:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    async def __anext__(self) -> B_co:
        batch: B_co
        try:
            while True:
                # A batch that is pending in the thread comes first, and the dataset is not called beside it.
                if self._place.here and self._pending is None and not self._lock.locked():
                    begin = perf_counter()
                    if begin - self._place.turn < HOLD_SECONDS:
                        with recording(self._epoch.statistics.recorder):
                            batch = self._epoch.step(self._fetch_here, begin)
                    else:
                        # Batches that are made on the loop have held it up for HOLD_SECONDS: other tasks get a turn.
                        await asyncio.sleep(0)  # nothing was taken yet, so nothing is lost if this is cancelled
                        self._place.turned()
                        continue
                else:
                    async with self._lock:
                        with recording(self._epoch.statistics.recorder):
                            batch = await self._one()
                    self._place.turned()
                if batch is not NO_BATCH:
                    break
        except EndOfData:
            self._end("")
            raise StopAsyncIteration from None
        except StopAsyncIteration as stop:  # of a plain sampler, or of code that is awaited
            hide_our_frames(stop)
            raise not_the_end(stop, "the dataset's or sampler's code") from stop
        except Exception as error:
            if isinstance(error, TooManySkippedSamples) and self._epoch.over:
                self._end("")
                self._close_soon()
            hide_our_frames(error)
            raise
        self._epoch.progress.pending = None
        self._torch_iter._num_yielded += 1
        if self._torch_iter._IterableDataset_len_called is not None:
            warn_over_length(self._torch_iter)
        return batch

    def _fetch_here(self, records: list[SkippedSample]) -> tuple[Any, Any]:
        epoch = self._epoch
        try:
            index = epoch.next_index()
            return index, self._place.fetch_here(epoch.reader.fetch, index, records)
        except asyncio.CancelledError as error:  # not a cancellation of this task, which is not waiting
            raise self_cancelled("the dataset's or sampler's") from error

    async def _one(self) -> Any:
        if self._ended is not None:
            raise LoaderClosed(self._ended) if self._ended else EndOfData
        begin = perf_counter()
        epoch = self._epoch
        epoch.statistics.waiting_since = begin
        epoch.refresh()
        pending = self._pending
        if pending is None:
            self._records = []
            pending = self._pending = asyncio.ensure_future(self._next())
        # Shielded: if the caller is cancelled, the batch stays pending and the next call returns it.
        try:
            batch, index, cursor = await shielded(pending)
            self._pending = None
            batch = epoch.taken(batch)
        except asyncio.CancelledError:
            if pending.cancelled() and self._ended is not None:
                raise LoaderClosed(self._ended) from None  # closed by another task
            raise
        except BaseException as error:
            self._pending = None
            if epoch.instead(error, self._records):
                return NO_BATCH
            raise
        finally:
            epoch.statistics.waiting_since = None
            del pending  # its error refers to this frame, which must not refer back to the error
        return epoch.delivered(index, batch, cursor, self._records, perf_counter() - begin)

    async def _next(self) -> tuple[Any, Any, PackedCursor | None]:
        """A batch, its index, and the dataset's cursor after it."""
        epoch = self._epoch
        try:
            return await self._agreed_next()
        except (asyncio.CancelledError, NoSamples):  # by `aclose`, which notifies the other ranks
            raise
        except BaseException as error:
            if epoch.agreement is not None:
                # In a thread that is not waited for at exit: it waits for the other ranks.
                await in_daemon(partial(epoch.tell_ranks, error))
            if isinstance(error, EndOfData):
                # Within this task, so that a cancelled consumer cannot cut it short.
                warn_of_exit(await epoch.aclose())
            raise

    async def _agreed_next(self) -> tuple[Any, Any, PackedCursor | None]:
        epoch = self._epoch
        with UnexpectedCancellation("the dataset's or sampler's"):
            index, batch = await self._fetched()
        cursor = epoch.cursor()
        if (ranks := epoch.agreement) is not None and not await epoch.cancellably(
            in_daemon(lambda: epoch.agreed(ranks.batch))
        ):
            raise EndOfData
        if epoch.copies:
            batch = await self._place.in_thread(epoch.copied, batch)
        return batch, index, cursor

    async def _fetched(self) -> tuple[Any, Any]:
        epoch = self._epoch
        if not epoch.opened:
            await epoch.cancellably(epoch.open())
        if not epoch.reader.asynchronous:
            return await epoch.read(
                self._records, partial(self._place.fetch_in_thread, epoch.measured(thread_time)(epoch.reader.fetch))
            )
        epoch.pull_ahead()
        with epoch.measured():
            return await epoch.read(self._records)

    def _end(self, why: str) -> None:
        self._ended = why
        self._pending = None
        self._place.close_soon()

    def _close_soon(self) -> None:
        """`InlineEpoch.aclose`, from any thread, without waiting."""
        epoch = self._epoch
        if epoch.prefetcher is not None:
            epoch.prefetcher.cancel_soon()
        else:
            epoch.context.close_soon()
            epoch.reader.close()

    async def aclose(self) -> None:
        """Let the current fetch end, then stop. Idempotent."""
        epoch = self._epoch
        pending, self._pending = self._pending, None
        if self._ended is None:
            self._end("this iterator was closed")
        if epoch.agreement is not None:
            epoch.agreement.give_up()
        # After `give_up`: the pending batch may be waiting for the other ranks.
        if pending is not None:
            self._abandon(pending)
            await asyncio.wait([pending])
        # After the pending batch, whose code may use the dataset's context.
        warn_of_exit(await epoch.aclose())
        # In a thread, because it waits for the dataset's current call.
        await in_thread(self._place.close)

    def _abandon(self, pending: asyncio.Future[Any]) -> None:
        """End the pending batch. In the loop's thread."""
        # A call in a thread cannot be cancelled.
        if self._epoch.reader.asynchronous or self._epoch.cancellable:
            pending.cancel()
        pending.add_done_callback(retrieve_error)  # perhaps no consumer waits for it

    def close(self) -> None:
        """`aclose` for code that is not async."""
        pending = self._pending
        if self._ended is None:
            self._end("this iterator was closed")
        if pending is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                pending.get_loop().call_soon_threadsafe(self._abandon, pending)
        self._close_soon()
        if self._epoch.agreement is not None:
            self._epoch.agreement.give_up()
        # Last, because it waits for the dataset's current call.
        self._place.close()

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The thread of `_place` ends when that is freed.
        if not exiting() and getattr(self, "_owner", None) == os.getpid():
            if self._epoch.agreement is not None:
                self._epoch.agreement.give_up()
            self._close_soon()
