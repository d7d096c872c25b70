"""Fetches samples of the next batches ahead of the consumer in this process, for loading without workers.

Data path: sampler -> [prefetch: fetch] -> inline: collate -> consumer. For map datasets that are async or fetched by
threads.

Only samples are fetched ahead. The sampler is advanced and batches are collated while the consumer waits for a batch,
so draws from the global generators happen in the same order as without prefetching. An error is raised when its batch
is due. If a store failed, the batch stays, and is fetched again at the next call, with all others at which it failed.

A prefetcher belongs to one loop's thread. The consumer's thread may only call `pull_ahead`, while the loop waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from asyncloader.errors import interrupts, is_tried_again
from asyncloader.workers.fetch.context import DatasetContext
from asyncloader.workers.fetch.data_end import EndOfData, not_the_end
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import SkippedSample
from asyncloader.workers.memory.ring_manager import CREDIT_BYTES

_UNKNOWN: Any = object()


class _Entry:
    """One batch. `index` is set before `samples` is done."""

    __slots__ = ("index", "records", "samples")

    def __init__(self) -> None:
        self.index: Any = _UNKNOWN
        self.records: list[SkippedSample] = []
        self.samples: asyncio.Future[Any] | None = None


class BatchPrefetcher:
    """The batches that are being fetched, in order.

    Args:
        reader: reads the dataset, which must be a map dataset; must be `asynchronous`.
        context: the dataset's context, entered before the first sample.
        credits: batches in flight while they are small; at least 1.
    """

    def __init__(self, reader: DatasetReader, context: DatasetContext, credits: int) -> None:
        self._reader = reader
        self._context = context
        self.credits = credits
        self._entries: deque[_Entry] = deque()
        self._pulled: deque[tuple[Any, Exception | None]] = deque()  # indices that are not started; or an error instead
        self._given = 0  # of these, so far
        self._index_lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many more batches may be started."""
        return self.credits - len(self._entries)

    def pull_ahead(self, pull: Callable[[int], Any]) -> None:
        """Take as many indices from a plain sampler as there is room for. `pull` gives the index of a number, and the
        same again until the next number. In the consumer's thread.
        """
        failed = False
        while not failed and len(self._pulled) < self.room:
            number, error = self._given, None
            try:
                index = pull(number)
            except EndOfData:
                break
            except Exception as raised:  # raised after the batches that were started before
                index, error, failed = None, raised, True
            # No calls from here on: after Ctrl-C each index must be either kept, or taken again.
            self._pulled += ((index, error),)
            self._given, error = number + 1, None

    def start(self, next_index: Callable[[], Awaitable[Any]] | None) -> None:
        """Start the batches of the indices that were pulled; or, with `next_index`, of those that it gives, in the
        order of its calls. In the loop's thread.
        """
        while self._pulled:
            entry = _Entry()
            entry.index, error = self._pulled.popleft()
            self._entries.append(entry)
            if error is None:
                self._begin(entry, self._fetch(entry))
                continue
            entry.index, entry.samples = _UNKNOWN, asyncio.get_running_loop().create_future()
            entry.samples.set_exception(error)
            entry.samples.exception()  # marks it as retrieved, in case the consumer stops before it
        while next_index is not None and self.room > 0:
            entry = _Entry()
            self._entries.append(entry)
            self._begin(entry, self._fetch_next(entry, next_index))

    def _begin(self, entry: _Entry, coroutine: Any) -> None:
        self._loop = asyncio.get_running_loop()
        entry.samples = self._loop.create_task(coroutine)
        entry.samples.add_done_callback(mark_retrieved)

    def _keep(self, entry: _Entry) -> None:
        """Put back a batch that is tried again."""
        self._entries.appendleft(entry)
        for each in self._entries:
            if each is entry or (each.index is not _UNKNOWN and _interrupted(each.samples)):
                each.samples, each.records = None, []

    async def _fetch(self, entry: _Entry) -> Any:
        await self._context.open()
        return await self._reader.samples(entry.index, entry.records)

    async def _fetch_next(self, entry: _Entry, next_index: Callable[[], Awaitable[Any]]) -> Any:
        if self._index_lock is None:
            self._index_lock = asyncio.Lock()
        async with self._index_lock:  # a fair lock: waiters get it in order
            entry.index = await next_index()
        return await self._fetch(entry)

    async def take(self, records: list[SkippedSample]) -> tuple[Any, Any]:
        """The next batch, with its index. Adds to `records` those of its bad samples, also if this raises.

        Raises:
            EndOfData: nothing was started.
            Exception: the batch's.
        """
        if not self._entries:
            raise EndOfData
        for each in self._entries if self._entries[0].samples is None else ():
            if each.samples is None:
                self._begin(each, self._fetch(each))
        # Taken out first: `cancel` leaves this batch to who calls it, and cancels the task that waits here.
        entry = self._entries.popleft()
        assert entry.samples is not None
        try:
            samples = await entry.samples
            try:
                # Only now, while the consumer waits: draws from the global generators keep their order.
                return entry.index, self._reader.collated(entry.index, samples)
            except StopIteration as stop:  # a coroutine cannot raise it
                raise not_the_end(stop, "collate_fn") from stop
        except BaseException as error:
            if entry.index is not _UNKNOWN and interrupts(error):
                self._keep(entry)
            raise
        finally:
            records += entry.records
            # An error's traceback refers to this frame, and so to the entry, which must not refer back to the error.
            entry.samples = None

    def note_batch_size(self, nbytes: int) -> None:
        """Lower `credits` so that batches of this size fit into `CREDIT_BYTES` together; at least one stays."""
        if nbytes:
            self.credits = min(self.credits, max(1, CREDIT_BYTES // nbytes))

    def cancel(self) -> None:
        """Cancel all batches in flight, but for the batch that `take` waits for. In the loop's thread."""
        for entry in self._entries:
            if entry.samples is not None:
                entry.samples.cancel()

    def cancel_soon(self) -> None:
        """`cancel`, and leave the dataset's context. Any thread; does not wait."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self.cancel)
        self._context.close_soon()
        self._reader.close()

    async def aclose(self) -> BaseException | None:
        """`cancel`, wait until the batches have ended, and leave the dataset's context. No `take` may be in progress.

        Returns:
            The error that leaving the context raised, if any.
        """
        self.cancel()
        pending = [entry.samples for entry in self._entries if entry.samples is not None]
        self._entries.clear()
        if pending:
            # Their code may use the dataset's context, which exits below.
            await asyncio.wait(pending)
        await self._reader.aclose_resources()
        self._reader.close()
        return await self._context.close()


def _interrupted(samples: asyncio.Future[Any] | None) -> bool:
    """Whether a store has failed at these samples."""
    if samples is None or not samples.done() or samples.cancelled():
        return False
    error = samples.exception()
    return error is not None and is_tried_again(error)


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Have the loop not log the error of a future that is done: it is raised elsewhere, or not wanted any more."""
    if not future.cancelled():
        future.exception()
