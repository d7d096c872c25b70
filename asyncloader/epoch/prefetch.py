"""Batches of a map dataset that are being fetched ahead of the consumer, in this process: loading without workers.

Data path: sampler -> [read_ahead: fetch] -> inline: collate -> consumer. For datasets whose samples are awaited, or
fetched by threads.

What is fetched ahead is samples. The sampler is advanced, and batches are collated, while the consumer waits for one:
what those draw from the process-global generators comes in the order that it would have without reading ahead. A batch
that raises does so in its turn.

A line lives in one loop's thread. Only `room` may be asked by the consumer's thread, while that does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from asyncloader.workers.fetch.context import DatasetContext
from asyncloader.workers.fetch.reader import Reader
from asyncloader.workers.fetch.sample_errors import BadSample
from asyncloader.workers.memory.ring_manager import CREDIT_BYTES

__all__ = ["BatchPrefetcher"]


class _Entry:
    """One batch. `index` is there when `samples` are."""

    __slots__ = ("bad", "index", "samples")

    def __init__(self) -> None:
        self.index: Any = None
        self.bad: list[BadSample] = []
        self.samples: asyncio.Future[Any] | None = None


class BatchPrefetcher:
    """The batches in hand, in order.

    Args:
        reader: reads the dataset; `asynchronous`, and of a map dataset.
        context: the dataset's, entered before the first sample.
        credits: batches in hand at a time, as long as they are small; at least 1.
    """

    def __init__(self, reader: Reader, context: DatasetContext, credits: int) -> None:
        self._reader = reader
        self._context = context
        self.credits = credits
        self._entries: deque[_Entry] = deque()
        self._index_lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many more indices are wanted."""
        return self.credits - len(self._entries)

    def start(self, index: Any) -> None:
        """Have the samples of this index fetched."""
        entry = _Entry()
        entry.index = index
        self._add(entry, self._fetch(entry))

    def start_next(self, next_index: Callable[[], Awaitable[Any]]) -> None:
        """Have the samples fetched of the index that `next_index` gives, which is asked in the order of these calls."""
        entry = _Entry()
        self._add(entry, self._fetch_next(entry, next_index))

    def add_error(self, error: BaseException) -> None:
        """There is an error in the next batch's place."""
        entry = _Entry()
        entry.samples = asyncio.get_running_loop().create_future()
        entry.samples.set_exception(error)
        entry.samples.exception()  # it may be that nobody gets there
        self._entries.append(entry)

    def _add(self, entry: _Entry, coroutine: Any) -> None:
        self._loop = asyncio.get_running_loop()
        entry.samples = self._loop.create_task(coroutine)
        entry.samples.add_done_callback(_look)
        self._entries.append(entry)

    async def _fetch(self, entry: _Entry) -> Any:
        await self._context.open()
        return await self._reader.samples(entry.index, entry.bad)

    async def _fetch_next(self, entry: _Entry, next_index: Callable[[], Awaitable[Any]]) -> Any:
        if self._index_lock is None:
            self._index_lock = asyncio.Lock()
        async with self._index_lock:  # those who wait get it in their order
            entry.index = await next_index()
        return await self._fetch(entry)

    async def take(self, bad: list[BadSample]) -> tuple[Any, Any]:
        """The next batch, with its index. `bad` gets its records, however the call ends.

        Raises:
            StopAsyncIteration: there is nothing in hand.
            Exception: the batch's.
        """
        if not self._entries:
            raise StopAsyncIteration
        entry = self._entries[0]
        assert entry.samples is not None
        try:
            samples = await entry.samples
            return entry.index, self._reader.collated(entry.index, samples)
        finally:
            bad += entry.bad
            if self._entries and self._entries[0] is entry:
                self._entries.popleft()
            entry.samples = None

    def note_batch_size(self, nbytes: int) -> None:
        """A batch had so many bytes. As many of the largest are in hand as fit into `CREDIT_BYTES`; one at least."""
        if nbytes:
            self.credits = min(self.credits, max(1, CREDIT_BYTES // nbytes))

    def cancel(self) -> None:
        """Nobody will take what is in hand. In the loop's thread."""
        for entry in self._entries:
            if entry.samples is not None:
                entry.samples.cancel()

    def cancel_soon(self) -> None:
        """`cancel` and leave the dataset's context, from any thread; does not wait."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self.cancel)
        self._context.close_soon()
        self._reader.close()

    async def aclose(self) -> BaseException | None:
        """Cancel what is in hand, wait until it has ended, and leave the dataset's context.

        Returns:
            What leaving raised.
        """
        self.cancel()
        pending = [entry.samples for entry in self._entries if entry.samples is not None]
        self._entries.clear()
        if pending:
            await asyncio.wait(pending)
        self._reader.close()
        return await self._context.close()


def _look(samples: asyncio.Future[Any]) -> None:
    """So that the loop does not log an error that nobody waited for; who takes the batch gets it."""
    if not samples.cancelled():
        samples.exception()
