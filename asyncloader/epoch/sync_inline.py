"""Iterates a DataLoader without workers; also holds what both sync iterators share.

Data path: sampler -> [sync_inline: fetch -> collate] -> the user.

A blocking dataset is read in the caller's thread, only inside `next()`, as torch does. Async datasets and samplers are
read on the bridge's loop while the caller waits. There the samples of async map datasets, and with `concurrency`, are
prefetched while the caller does other work (`inline_reader.py`); the sampler is advanced and batches are collated
only inside `next()`.

`CountedNext` is the base of both sync iterators; `close_at_exit` ends iterators that are still alive when the process
exits.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from torch.autograd import profiler

from asyncloader.base.bridge import Bridge, Call, join_all
from asyncloader.base.events import SkippedSample
from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import at_exit
from asyncloader.epoch.consumer import NO_BATCH
from asyncloader.epoch.inline import InlineEpoch
from asyncloader.epoch.torch_iterator import TorchIterator, warn_over_length
from asyncloader.errors import LoaderClosed
from asyncloader.options.declaration import LoaderSpec
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.telemetry.counters import recording
from asyncloader.telemetry.profiler_ranges import NVTX, in_range
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.fetch.context import UnexpectedCancellation, warn_of_exit
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.error_pickle import hide_our_frames
from asyncloader.workers.fetch.worker_resource import close_idle
from asyncloader.workers.shutdown import stop_all_pools

_CLOSED = "this iterator was shut down"

_EXIT_SECONDS = 6.0
"""How long an exiting process waits for all its iterators together: a little longer than workers are given."""


class CountedNext(TorchIterator):
    """torch's `__next__`, but the profiler range (10 microseconds) is only entered while a profiler is active."""

    _profiled = False
    """Whether the current call is recorded by a profiler."""

    def __next__(self) -> Any:
        try:
            if NVTX or profiler._is_profiler_enabled:  # `recorded`, without the call
                self._profiled = True
                try:
                    with in_range(self._profile_name):
                        data: Any = self._next_data()
                finally:
                    self._profiled = False
            else:
                data = self._next_data()
        except StopIteration:
            raise
        except Exception as error:
            hide_our_frames(error)
            raise
        self._num_yielded += 1
        if self._IterableDataset_len_called is not None:
            warn_over_length(self)
        return data


class SyncInlineIterator(CountedNext):
    """Iterates without workers: in the caller's thread, or on the bridge's loop if dataset or sampler is async."""

    queue_depth = 0

    def __init__(self, loader: LoaderSpec[Any], statistics: Statistics, bridge: Bridge, keeper: StateKeeper) -> None:
        progress = keeper.begin(loader)
        super().__init__(loader, progress)
        self._owner = os.getpid()
        self._bridge: Bridge | None = None
        # What makes the current batch in the loop, and the records of its bad samples. It goes on after Ctrl-C.
        self._call: tuple[Call[tuple[Any, Any] | None], list[SkippedSample]] | None = None
        self._epoch = InlineEpoch(loader, statistics, keeper, self, progress, alone=True)
        if self._epoch.on_loop:
            # An iterator that was dropped leaves the dataset's context before this iterator enters it.
            bridge.wait_for_releases()
            bridge.acquire()
            self._bridge = bridge
            close_at_exit(self)

    def _next_data(self) -> Any:
        begin = perf_counter()
        epoch = self._epoch
        if epoch.closed:
            raise LoaderClosed(_CLOSED)
        epoch.refresh()
        fetch = self._fetch_on_bridge if epoch.on_loop else self._fetch_here
        if self._profiled:
            fetch = partial(_in_range, fetch)
        batch = NO_BATCH
        with recording(epoch.statistics.recorder):
            while batch is NO_BATCH and not epoch.over:
                try:
                    batch = epoch.step(fetch, begin)
                except EndOfData:
                    break
                except Exception:
                    self._call = None  # the error takes its batch's place, or it has ended with it
                    raise
            if batch is NO_BATCH:
                # Now, and not when the iterator is freed: the dataset's context exits inside `next()`.
                self._release()
        if batch is NO_BATCH:
            raise StopIteration
        # No calls from here on, so that Ctrl-C cannot come before the caller has the batch.
        epoch.progress.pending = self._call = None
        return batch

    def _fetch_here(self, records: list[SkippedSample]) -> tuple[Any, Any]:
        index = self._epoch.next_index()
        return index, self._epoch.reader.fetch(index, records)

    def _fetch_on_bridge(self, records: list[SkippedSample]) -> tuple[Any, Any]:
        epoch, bridge = self._epoch, self._bridge
        if bridge is None:  # the epoch has ended, and a repeated call ends again; or another thread has just closed it
            raise LoaderClosed(_CLOSED) if epoch.closed else EndOfData
        result: tuple[Any, Any] | None = None
        while result is None:  # twice if the epoch was not open
            if self._call is None:
                # Here, and not in the loop's thread: a plain sampler is advanced in the caller's thread, in `next()`.
                if epoch.opened:
                    epoch.pull_ahead()
                found: list[SkippedSample] = []
                self._call = Call(_fetch(epoch, found)), found
            result = self._wait(bridge, *self._call, records)
            if result is None:
                self._call = None
        return result

    def _wait(
        self, bridge: Bridge, call: Call[tuple[Any, Any] | None], found: list[SkippedSample], records: list[Any]
    ) -> tuple[Any, Any] | None:
        epoch = self._epoch
        try:
            return bridge.wait(call)
        except (asyncio.CancelledError, LoaderClosed):
            if epoch.closed:  # by `_close`, for another thread, or by the end of the loop behind it
                raise LoaderClosed(_CLOSED) from None
            raise
        finally:
            records += found
            if call.over:
                self._call = None

    def _release(self) -> None:
        # Taken out first: a second call, as of the finalizer, must not release the bridge again.
        bridge, self._bridge = self._bridge, None
        if os.getpid() != self._owner:
            return  # in a forked child nothing of it runs
        if bridge is None:
            close_idle()
            return
        if bridge.in_loop_thread:  # the loop's own thread cannot wait for the loop
            bridge.release_soon(_close_and_warn, self._epoch)
            return
        try:
            warn_of_exit(bridge.run(_close(self._epoch)))
        except LoaderClosed:
            # The loop has ended, and the reader with it.
            pass
        finally:
            bridge.release()

    def _shutdown_workers(self) -> None:
        """End the epoch. The name is torch's."""
        self._epoch.closed = True
        # Before the dataset's context exits, which takes time: the other ranks may be waiting for this one.
        if self._epoch.agreement is not None:
            self._epoch.agreement.give_up()
        self._release()

    def _close_soon(self) -> None:
        self._epoch.closed = True
        if self._epoch.agreement is not None:
            self._epoch.agreement.give_up()
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.release_soon(_close_and_warn, self._epoch)
        else:
            close_idle()

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The attributes are missing if `__init__` raised before they were set.
        if not exiting() and getattr(self, "_owner", None) == os.getpid() and hasattr(self, "_epoch"):
            self._close_soon()


def _in_range(fetch: Callable[[list[SkippedSample]], tuple[Any, Any]], records: list[SkippedSample]) -> tuple[Any, Any]:
    with in_range("asyncloader::fetch"):
        return fetch(records)


async def _fetch(epoch: InlineEpoch, records: list[SkippedSample]) -> tuple[Any, Any] | None:
    """The next batch with its index, of an async dataset or from an async sampler. The first call opens the epoch, and
    returns None.
    """
    if epoch.closed:  # since `next` was called: `_close` has run
        raise asyncio.CancelledError
    task = asyncio.current_task()
    assert task is not None
    epoch.fetching.add(task)
    try:
        with UnexpectedCancellation("the dataset's or sampler's"):
            if not epoch.opened:
                await epoch.open()  # not measured, as the first batch is then not looked at
                return None
            with epoch.measured():
                return await epoch.read(records)
    finally:
        epoch.fetching.discard(task)


async def _close(epoch: InlineEpoch) -> BaseException | None:
    """`InlineEpoch.aclose`, after the end of what another thread waits for."""
    for task in epoch.fetching:
        # Once only: Ctrl-C cancels it, too, and a second cancellation would cut the dataset's clean-up short.
        if not task.cancelling():
            task.cancel()
    if epoch.fetching:
        await asyncio.wait(epoch.fetching)
    return await epoch.aclose()


async def _close_and_warn(epoch: InlineEpoch) -> None:
    warn_of_exit(await _close(epoch))


class ClosesAtExit(Protocol):
    """An iterator that must be closed before the process exits."""

    def _close_soon(self) -> None:
        """Begin to close, without waiting, as in a finalizer."""


# Live iterators. At exit they are closed, and all loop threads end, including those of iterators that were dropped just
# before: once the interpreter is finalizing, no daemon thread runs and our finalizers do nothing.
_live: LiveObjects[ClosesAtExit] = LiveObjects()


def close_at_exit(iterator: ClosesAtExit) -> None:
    """Close this iterator when the process exits, if it is still alive."""
    at_exit(stop_all_pools)  # registered first, so called last: pools stop after their iterators
    at_exit(_close_all)
    _live.add(iterator)


def _close_all() -> None:
    threading.excepthook = partial(_report_thread, threading.excepthook)
    for iterator in _live:
        iterator._close_soon()
    join_all(_EXIT_SECONDS)


def _report_thread(report: Callable[[threading.ExceptHookArgs], object], raised: threading.ExceptHookArgs) -> None:
    # A daemon thread that was in `next()` ends by this error, and nothing is wrong with that while the process exits.
    if not issubclass(raised.exc_type, LoaderClosed):
        report(raised)
