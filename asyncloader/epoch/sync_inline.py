"""Iterates a DataLoader without workers; also holds what both sync iterators share.

Data path: sampler -> [sync_inline: fetch -> collate] -> the user.

A blocking dataset is read in the caller's thread, only inside `next()`, as torch does. Async datasets and samplers are
read on the bridge's loop while the caller waits. There the samples of async map datasets, and with `fetch_threads`, are
prefetched while the caller does other work (`prefetch.py`); the sampler is advanced and batches are collated only
inside `next()`.

`CountedNext` is the base of both sync iterators; `close_at_exit` ends iterators that are still alive when the process
exits.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

from asyncloader.bridge import Bridge, join_all
from asyncloader.delivery.stage import torch_pin
from asyncloader.delivery.transfer import transfer_of
from asyncloader.epoch.async_inline import (
    batch_nbytes,
    count_samples,
    make_inline_reader,
    make_prefetcher,
    warn_of_exit,
)
from asyncloader.epoch.plan import TorchIterator, warn_over_length
from asyncloader.epoch.prefetch import BatchPrefetcher
from asyncloader.errors import LoaderClosed, TooManyBadSamples
from asyncloader.options import LoaderSpec, async_index_source, is_iterable
from asyncloader.samplers.distributed import even_ranks, without_batch
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.state.progress import Progress
from asyncloader.statistics import BadSampleLog, Statistics
from asyncloader.workers.fetch.context import DatasetContext, UnexpectedCancellation
from asyncloader.workers.fetch.reader import Reader
from asyncloader.workers.fetch.sample_errors import BadSample, NoSamples
from asyncloader.workers.pool import install_exit_hook

__all__ = ["CountedNext", "SyncInlineIterator", "close_at_exit"]

_EXIT_SECONDS = 6.0
"""How long an exiting process waits for all its iterators together: a little longer than workers are given."""


class CountedNext(TorchIterator):
    """torch's `__next__`, but the profiler range (10 microseconds) is only entered while a profiler is active."""

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


class SyncInlineIterator(CountedNext):
    """Iterates without workers: in the caller's thread, or on the bridge's loop if dataset or sampler is async."""

    queue_depth = 0

    def __init__(self, loader: LoaderSpec[Any], statistics: Statistics, bridge: Bridge, keeper: StateKeeper) -> None:
        progress = keeper.begin(loader)
        super().__init__(loader, progress)
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
            # An iterator that was dropped leaves the dataset's context before this one enters it.
            bridge.wait_for_releases()
            bridge.acquire()
            self._bridge = bridge
            close_at_exit(self)
        self._transfer = transfer_of(loader)
        self._pin = torch_pin(self._pin_memory_device) if self._pin_memory else None
        self._begun = self._statistics.begin()
        self._statistics.log = BadSampleLog(loader._asyncloader_options.max_bad_samples)
        self._over = False  # more samples raised than allowed
        self._closed = False

    def _begin(self, progress: Progress) -> None:
        self._progress = progress
        self._agreement = progress.agreement
        self._tasks = 0
        self._given = 0  # indices that were passed to the prefetcher
        self._fresh = True
        self._reader = make_inline_reader(self._spec, self, progress)
        if not self._reader.asynchronous:
            progress.live = weakref.WeakMethod(self._reader.live_cursor)
        self._context = self._reader.context()
        self._prefetcher = make_prefetcher(self._spec, self._reader, self._context)

    def _next_data(self) -> Any:
        if self._closed:
            raise LoaderClosed("this iterator was shut down")
        begin = perf_counter()
        if self._fresh:
            if self._progress.outdated:
                progress = self._keeper.begin(self._spec)
                self._begin_order(self._spec, progress)
                self._begin(progress)
            self._fresh = False
        while not self._over:
            bad: list[BadSample] = []
            try:
                index, data = self._fetched(bad)
                if self._agreement is not None and not self._agreement.batch():
                    raise StopIteration
                cursor = self._reader.cursor()
                if self._transfer is not None:
                    data = self._transfer.take(self._transfer.start(data, locked=False))
                elif self._pin is not None:
                    data = self._pin(data)
            except NoSamples:
                ranks = even_ranks(self._spec, iterable=is_iterable(self._spec))
                if ranks > 1:
                    self._progress.failed(self._tasks)
                    self._tasks += 1
                    self._record(bad)
                    raise without_batch(ranks) from None
                self._progress.delivered(self._tasks, 0, self._reader.cursor())
                self._tasks += 1
                self._record(bad)
                continue
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
                self._record(bad)
                raise
            if bad:
                self._record(bad)
            self._progress.delivered(self._tasks, 0, cursor)
            self._tasks += 1
            nbytes = batch_nbytes(data)
            if self._prefetcher is not None:
                self._prefetcher.note_batch_size(nbytes)
                self._statistics.credits = self._prefetcher.credits
            passed = perf_counter() - begin
            if not self._num_yielded:
                self._statistics.first_batch(self._begun)
            self._statistics.batch(count_samples(self._spec, index, bad), nbytes, 0, passed, passed, 1)
            self._statistics.count_here()
            return data
        raise StopIteration

    def _record(self, bad: list[BadSample]) -> None:
        try:
            self._statistics.bad(bad)
        except TooManyBadSamples:
            self._over = True
            if self._agreement is not None:
                self._agreement.fail()
            raise

    def _fetched(self, bad: list[BadSample]) -> tuple[Any, Any]:
        if not self._uses_loop:
            index = self._next_index_plain()
            return index, self._reader.fetch(index, bad)
        if self._bridge is None:
            raise StopIteration
        try:
            if self._prefetcher is not None:
                return self._bridge.run(self._take(self._prefetcher, self._more(self._prefetcher), bad))
            return self._bridge.run(self._fetch(bad))
        except StopAsyncIteration:
            self._release()
            raise StopIteration from None

    async def _fetch(self, bad: list[BadSample]) -> tuple[Any, Any]:
        with UnexpectedCancellation("the dataset's or sampler's"):
            index = await self._next_index_async()
            if self._reader.asynchronous:
                await self._context.open()
                return index, await self._reader.fetch_async(index, bad)
            return index, self._reader.fetch(index, bad)

    def _more(self, prefetcher: BatchPrefetcher) -> list[Any]:
        """Indices for the prefetcher, from a plain sampler, which is advanced here in the caller's thread. If the
        sampler raised, the last item is a `_SamplerFailure`.
        """
        more: list[Any] = []
        while self.order is not None and len(more) < prefetcher.room:
            task, self._given = self._given, self._given + 1
            try:
                step, index = self.pull()
            except StopIteration:
                break
            except Exception as error:
                more.append(_SamplerFailure(error))
                break
            else:
                self._progress.pulled(task, step)
                more.append(index)
        return more

    async def _take(self, prefetcher: BatchPrefetcher, more: list[Any], bad: list[BadSample]) -> tuple[Any, Any]:
        for index in more:
            if isinstance(index, _SamplerFailure):
                prefetcher.add_error(index.error)
            else:
                prefetcher.start(index)
        while self.order is None and prefetcher.room > 0:
            prefetcher.start_next(self._next_index_async)
        with UnexpectedCancellation("the dataset's or sampler's"):
            return await prefetcher.take(bad)

    def _next_index_plain(self) -> Any:
        step, index = self.pull()
        if self.order is None:  # an iterable dataset's index only says how many samples
            return index
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
        if bridge is None or os.getpid() != self._owner:
            return  # in a forked child nothing of it runs
        if bridge.in_loop_thread:  # the loop's own thread cannot wait for the loop
            bridge.release_soon(_close_reader_and_warn, self._prefetcher, self._reader, self._context)
            return
        try:
            warn_of_exit(bridge.run(_close_reader(self._prefetcher, self._reader, self._context)))
        except LoaderClosed:
            pass
        finally:
            bridge.release()

    def _shutdown_workers(self) -> None:
        """End the epoch. The name is torch's."""
        self._closed = True
        if self._agreement is not None:
            self._agreement.give_up()
        self._release()

    def _close_soon(self) -> None:
        self._closed = True
        if self._agreement is not None:
            self._agreement.give_up()
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            bridge.release_soon(_close_reader_and_warn, self._prefetcher, self._reader, self._context)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and getattr(self, "_owner", None) == os.getpid():
            self._close_soon()


async def _close_reader(
    prefetcher: BatchPrefetcher | None, reader: Reader, context: DatasetContext
) -> BaseException | None:
    """Stop reading. Returns the error that leaving the dataset's context raised, if any."""
    if prefetcher is not None:
        return await prefetcher.aclose()
    await reader.aclose()
    return await context.close()


async def _close_reader_and_warn(prefetcher: BatchPrefetcher | None, reader: Reader, context: DatasetContext) -> None:
    warn_of_exit(await _close_reader(prefetcher, reader, context))


class _SamplerFailure:
    """Stands for an index: the sampler raised this error instead."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class ClosesAtExit(Protocol):
    """An iterator that must be closed before the process exits."""

    def _close_soon(self) -> None:
        """Begin to close, without waiting, as in a finalizer."""


# Live iterators. At exit they are closed, and all loop threads end, including those of iterators that were dropped just
# before: once the interpreter is finalizing, no daemon thread runs and our finalizers do nothing.
_live: weakref.WeakSet[ClosesAtExit] = weakref.WeakSet()


def close_at_exit(iterator: ClosesAtExit) -> None:
    """Close this iterator when the process exits, if it is still alive."""
    _install_exit_hook()
    _live.add(iterator)


@functools.cache
def _install_exit_hook() -> None:
    install_exit_hook()  # registered first, so called last: pools stop after their iterators
    atexit.register(_close_all)


def _close_all() -> None:
    for iterator in list(_live):
        iterator._close_soon()
    join_all(_EXIT_SECONDS)
