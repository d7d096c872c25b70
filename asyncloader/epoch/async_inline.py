"""Iterates an AsyncDataLoader without workers (``num_workers=0``).

Data path: sampler -> [async_inline: fetch -> collate] -> the user.

A blocking dataset is read in one executor thread, always the same one, so that thread-bound handles and the global
generators see a single caller. An async dataset is read on the running loop. For async map datasets, and with
`fetch_threads`, samples are prefetched (`prefetch.py`). The sampler and a blocking dataset are advanced only by
`__anext__`, so that random numbers are drawn in torch's order.

The helpers above the class also serve `sync_inline.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from asyncloader.delivery.stage import torch_pin, use_current_device
from asyncloader.delivery.transfer import transfer_of
from asyncloader.epoch.consumer import NO_BATCH
from asyncloader.epoch.plan import TorchIterator, shared_seed, warn_over_length, worker_setup
from asyncloader.epoch.prefetch import BatchPrefetcher
from asyncloader.epoch.shard_assignment import InlineAssignments
from asyncloader.errors import LoaderClosed, TooManyBadSamples
from asyncloader.options import LoaderSpec, async_index_source, is_iterable, most_credits
from asyncloader.ranks.agreement import Agreement, in_daemon
from asyncloader.samplers.distributed import even_ranks, without_batch
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.state.progress import Progress
from asyncloader.statistics import BadSampleLog, Statistics
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.context import DatasetContext, UnexpectedCancellation
from asyncloader.workers.fetch.reader import Reader
from asyncloader.workers.fetch.sample_errors import BadSample, NoSamples, dropped_count
from asyncloader.workers.memory.recycle import recycling_collate

__all__ = [
    "AsyncInlineIterator",
    "batch_nbytes",
    "count_samples",
    "make_inline_reader",
    "make_prefetcher",
    "warn_of_exit",
]


def make_inline_reader(spec: LoaderSpec[Any], torch_iter: _BaseDataLoaderIter, progress: Progress) -> Reader:
    """Make the dataset's reader for this process, at the iterator's position."""
    dataset: Any = torch_iter._dataset
    collate = spec.collate_fn
    if collate is default_collate:
        collate = recycling_collate()
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        apply_sharding(dataset, torch_iter._world_size, torch_iter._rank)
    drawn = shared_seed(torch_iter)
    base_seed, (start,) = progress.starts(1, int(torch_iter._base_seed), drawn)
    if isinstance(dataset, IterDataPipe) and start.shared_seed not in (None, drawn):
        generator = torch.Generator()
        generator.manual_seed(start.shared_seed or 0)
        dataset = apply_random_seed(dataset, generator)
    setup = worker_setup(spec, 0, torch_iter, base_seed, [start])
    assignments = InlineAssignments(spec, progress, start) if assigns_shards(dataset) else None
    reader = Reader(setup, dataset, collate, in_worker=False, assignments=assignments)
    reader.begin(start)
    progress.begun(0, reader.first_cursor())
    return reader


def make_prefetcher(spec: LoaderSpec[Any], reader: Reader, context: DatasetContext) -> BatchPrefetcher | None:
    """Make the prefetcher; None for blocking datasets and streams."""
    if not reader.asynchronous or is_iterable(spec):
        return None
    return BatchPrefetcher(
        reader,
        context,
        most_credits(
            spec, spec._asyncloader_options.concurrency, spec._asyncloader_options.fetch_threads, iterable=False
        ),
    )


def warn_of_exit(error: BaseException | None) -> None:
    """Warn of an error of the dataset's `__aexit__`. All batches were delivered, so it is not raised."""
    if error is not None:
        warnings.warn(f"the dataset's __aexit__ raised {type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)


def count_samples(spec: LoaderSpec[Any], index: Any, bad: Sequence[BadSample]) -> int:
    """Number of samples in a batch of this index (an iterable dataset's last batch may have fewer)."""
    if spec._asyncloader_options.seed is not None and not is_iterable(spec):
        index = index[1]  # seeded mode: (position, index)
    count = len(index) if spec._auto_collation and hasattr(index, "__len__") else 1
    return count - dropped_count(bad) if bad else count


def batch_nbytes(batch: Any) -> int:
    """Bytes of the tensors in a batch, in plain containers only."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        return sum(map(batch_nbytes, batch.values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(batch_nbytes, batch))
    return 0


class AsyncInlineIterator:
    """Iterates once over a loader without workers. A cancelled `__anext__` loses no batch."""

    queue_depth = 0

    def __init__(self, spec: LoaderSpec[Any], statistics: Statistics, keeper: StateKeeper) -> None:
        if spec.timeout:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._spec = spec
        self._statistics = statistics
        self._keeper = keeper
        progress = keeper.begin(spec)
        self._torch_iter = TorchIterator(spec, progress)
        self._begin(progress)
        self._source = async_index_source(spec)
        self._indices: AsyncIterator[Any] | None = None
        self._transfer = transfer_of(spec)
        self._pin = torch_pin(self._torch_iter._pin_memory_device) if self._torch_iter._pin_memory else None
        # The dataset's code, and pinning, must see this thread's current device. If nothing uses a device, none is
        # touched.
        uses_device = self._pin is not None or torch.cuda.is_initialized()
        initializer = use_current_device() if uses_device else None
        self._executor = ThreadPoolExecutor(1, "asyncloader-fetch", initializer)
        self._owner = os.getpid()
        self._lock = asyncio.Lock()  # several tasks may share this iterator; each gets batches of its own
        self._pending: asyncio.Future[tuple[Any, int, bytes]] | None = None
        self._ended: str | None = None  # why there are no more batches, as in async_iterator.py
        self._begun = statistics.begin()
        statistics.log = BadSampleLog(spec._asyncloader_options.max_bad_samples)

    def _begin(self, progress: Progress) -> None:
        self._progress = progress
        self._agreement = progress.agreement
        self._agreeing = False  # while waiting for the other ranks
        self._tasks = 0
        self._given = 0  # indices that were passed to the prefetcher
        self._fresh = True
        self._bad: list[BadSample] = []  # of the batch that is being fetched
        self._reader = make_inline_reader(self._spec, self._torch_iter, progress)
        self._context = self._reader.context()
        self._prefetcher = make_prefetcher(self._spec, self._reader, self._context)

    def __aiter__(self) -> AsyncInlineIterator:
        return self

    def __len__(self) -> int:
        return len(self._torch_iter)

    def __repr__(self) -> str:
        return f"<AsyncInlineIterator {'running' if self._ended is None else 'over'}>"

    def __reduce__(self) -> Any:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    async def __anext__(self) -> Any:
        async with self._lock:
            while (batch := await self._one()) is NO_BATCH:
                pass
            return batch

    async def _one(self) -> Any:
        if self._ended is not None:
            raise StopAsyncIteration if not self._ended else LoaderClosed(self._ended)
        begin = perf_counter()
        if self._fresh:
            if self._progress.outdated:
                progress = self._keeper.begin(self._spec)
                self._torch_iter._begin_order(self._spec, progress)
                self._begin(progress)
            self._fresh = False
        pending = self._pending
        if pending is None:
            if self._prefetcher is not None:
                self._fill_prefetcher(self._prefetcher)
            pending = self._pending = asyncio.ensure_future(self._next())
        # Shielded: if the caller is cancelled, the batch stays pending and the next call returns it.
        try:
            batch, samples, cursor = await asyncio.shield(pending)
        except asyncio.CancelledError:
            if pending.cancelled() and self._ended is not None:
                raise LoaderClosed(self._ended) from None  # closed by another task
            raise
        except StopAsyncIteration:
            self._end("")
            self._progress.ends[0] = self._reader.last_cursor()
            self._progress.finish()
            raise
        except BaseException:
            self._pending = None
            self._progress.failed(self._tasks)
            self._tasks += 1
            self._record()
            raise
        finally:
            del pending  # its error refers to this frame, which must not refer back to the error
        self._pending = None
        self._progress.delivered(self._tasks, 0, cursor)
        self._tasks += 1
        if self._bad:
            self._record()
        if batch is NO_BATCH:
            return batch
        if self._transfer is not None:
            batch = self._transfer.take(batch)
        nbytes = batch_nbytes(batch)
        if self._prefetcher is not None:
            self._prefetcher.note_batch_size(nbytes)
            self._statistics.credits = self._prefetcher.credits
        passed = perf_counter() - begin
        if not self._torch_iter._num_yielded:
            self._statistics.first_batch(self._begun)
        self._statistics.batch(samples, nbytes, 0, passed, passed, 1)
        self._statistics.count_here()
        self._torch_iter._num_yielded += 1
        warn_over_length(self._torch_iter)
        return batch

    def _record(self) -> None:
        bad, self._bad = self._bad, []
        try:
            self._statistics.bad(bad)
        except TooManyBadSamples:
            self._end("")
            self._close_soon()
            raise

    async def _next(self) -> tuple[Any, int, bytes]:
        """A batch, its number of samples, and the dataset's cursor after it."""
        try:
            return await self._agreed_next()
        except StopAsyncIteration:
            if self._agreement is not None:
                await in_daemon(self._agreement.end)
            await self._close_reader()
            raise
        except asyncio.CancelledError:  # by `aclose`, which notifies the other ranks
            raise
        except BaseException:
            if self._agreement is not None:
                await in_daemon(self._agreement.fail)
            raise

    async def _agreed_next(self) -> tuple[Any, int, bytes]:
        index = None
        try:
            with UnexpectedCancellation("the dataset's or sampler's"):
                if self._prefetcher is not None:
                    index, batch = await self._prefetcher.take(self._bad)
                else:
                    index = await self._next_index()
                    batch = await self._fetch_now(index)
        except NoSamples:
            ranks = even_ranks(self._spec, iterable=is_iterable(self._spec))
            if ranks > 1:
                raise without_batch(ranks) from None
            return NO_BATCH, 0, self._reader.cursor()
        cursor = self._reader.cursor()
        if self._agreement is not None and not await self._agreed(self._agreement):
            raise StopAsyncIteration
        if self._transfer is not None:
            batch = await self._in_thread(partial(self._transfer.start, locked=False), batch)
        elif self._pin is not None:
            batch = await self._in_thread(self._pin, batch)
        return batch, count_samples(self._spec, index, self._bad), cursor

    async def _agreed(self, agreement: Agreement) -> bool:
        self._agreeing = True
        try:
            return bool(await in_daemon(agreement.batch))
        finally:
            self._agreeing = False

    def _fill_prefetcher(self, prefetcher: BatchPrefetcher) -> None:
        """Start as many batches as there is room for."""
        while prefetcher.room > 0:
            if self._torch_iter.order is None:
                prefetcher.start_next(self._next_index)
                continue
            task, self._given = self._given, self._given + 1
            try:
                step, index = self._torch_iter.pull()
            except StopIteration:
                return
            except Exception as error:  # raised after the batches that were started before
                prefetcher.add_error(error)
                return
            self._progress.pulled(task, step)
            prefetcher.start(index)

    async def _fetch_now(self, index: Any) -> Any:
        if not self._reader.asynchronous:
            return await self._in_thread(self._fetch, index)
        await self._context.open()
        return await self._reader.fetch_async(index, self._bad)

    async def _close_reader(self) -> None:
        """Stop reading and leave the dataset's context."""
        if self._prefetcher is not None:
            warn_of_exit(await self._prefetcher.aclose())
        else:
            await self._reader.aclose()
            warn_of_exit(await self._context.close())

    def _in_thread(self, function: Any, argument: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, argument)

    def _fetch(self, index: Any) -> Any:
        try:
            return self._reader.fetch(index, self._bad)
        except StopIteration:
            raise StopAsyncIteration from None  # a future cannot carry StopIteration
        except StopAsyncIteration as error:  # not how a blocking dataset ends
            raise RuntimeError("the dataset's code raised StopAsyncIteration") from error

    async def _next_index(self) -> Any:
        if self._source is not None:
            if self._indices is None:
                self._indices = self._source.reading(self._progress)
            return await anext(self._indices)
        try:
            step, index = self._torch_iter.pull()
        except StopIteration:
            raise StopAsyncIteration from None
        if self._torch_iter.order is None:  # an iterable dataset's index only says how many samples
            return index
        self._progress.pulled(self._tasks, step)
        return index

    def _end(self, why: str) -> None:
        self._ended = why
        self._pending = None
        self._executor.shutdown(wait=False)

    def _close_soon(self) -> None:
        """`_close_reader`, from any thread, without waiting."""
        if self._prefetcher is not None:
            self._prefetcher.cancel_soon()
        self._context.close_soon()
        self._reader.close()

    async def aclose(self) -> None:
        """Let the current fetch end, then stop. Idempotent."""
        pending, self._pending = self._pending, None
        if self._ended is None:
            self._end("this iterator was closed")
        if self._agreement is not None:
            self._agreement.give_up()
        if pending is not None:
            if self._reader.asynchronous or self._agreeing:
                pending.cancel()
            await asyncio.wait([pending])
            if not pending.cancelled():
                pending.exception()
        await self._close_reader()
        indices, self._indices = self._indices, None
        if isinstance(indices, AsyncGenerator):
            await indices.aclose()
        await asyncio.to_thread(self._executor.shutdown)

    def close(self) -> None:
        """`aclose` for code that is not async."""
        if self._ended is None:
            self._end("this iterator was closed")
        self._close_soon()
        if self._agreement is not None:
            self._agreement.give_up()
        self._executor.shutdown(wait=True)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The executor's thread ends with the executor.
        if not exiting() and getattr(self, "_owner", None) == os.getpid():
            if self._agreement is not None:
                self._agreement.give_up()
            self._close_soon()
