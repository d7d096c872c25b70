"""Reads a range of a Parquet shard: from its transport to its samples.

Data path: transport -> [parquet_reading: byte ranges -> thread -> rows] -> prefetch.RangeReading -> worker_stream.

pyarrow decodes in a separate thread, which waits for bytes that the event loop fetches: `Ranges` connects the two. One
batch of rows is decoded ahead. (The loop's default executor is not used, because it may also look up host names: a
look-up could be queued behind the threads that wait for it.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from asyncloader.bridge import in_thread
from asyncloader.formats import MAX_SAMPLE_BYTES, LocatedSamples, OnBad, ShardError
from asyncloader.formats.parquet import TAIL_BYTES, Footer, footer_size, parse_footer, read_rows
from asyncloader.shielding import shielded, wait_until_done
from asyncloader.transports import ObjectInfo, PinnedReader, TransportClosed

T = TypeVar("T")


async def read_footer(pinned: PinnedReader, url: str) -> tuple[Footer, ObjectInfo]:
    """Read a file's footer, in one or two requests, and its metadata in the store.

    Raises:
        ShardError: the file is not Parquet, or its footer is damaged.
        TransportError: the file cannot be read.
        ImportError: pyarrow is not installed.
    """
    info = await pinned.info()
    length = min(TAIL_BYTES, info.size)
    (tail,) = await pinned.read_ranges([(info.size - length, length)])
    wanted = footer_size(tail, info.size, url)
    if wanted > length:
        (before,) = await pinned.read_ranges([(info.size - wanted, wanted - length)])
        tail = before + tail
    return await in_thread(partial(parse_footer, tail[-wanted:], info.size, url)), info


async def read_parquet(
    pinned: PinnedReader,
    url: str,
    *,
    start: int = 0,
    stop: int | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    on_bad: OnBad | None = None,
    read_ahead: int = 8 << 20,
    columns: Sequence[str] | None = None,
    footer: Footer | None = None,
) -> AsyncGenerator[LocatedSamples, None]:
    """Read rows ``[start, stop)`` of a file, like `formats.parquet.read_rows`, but call `on_bad` in the loop.
    `footer` is the file's, if it was read before.

    Raises:
        ShardError: the file is damaged.
        TransportError: the bytes cannot be read, or are of another version of the file than its footer.
    """
    if footer is None:
        footer, _ = await read_footer(pinned, url)
    ranges = Ranges(pinned)
    bad: list[ShardError] = []
    rows = read_rows(
        footer,
        ranges.fetch,
        start=start,
        stop=stop,
        columns=columns,
        max_sample_bytes=max_sample_bytes,
        on_bad=None if on_bad is None else bad.append,
        window_bytes=read_ahead,
    )

    def step() -> Step:
        batch: LocatedSamples | None = None
        fault: Exception | None = None
        try:
            batch = next(rows, None)
        except Exception as error:
            fault = error
        # Handed over with the result: the thread and the loop never use the list at the same time.
        bad_rows = bad[:]
        bad.clear()
        return Step(batch, bad_rows, fault)

    async with aclosing(RangeThread(ranges)) as thread:
        coming = thread.call(step)
        while True:
            made = await result_of(coming)
            if on_bad is not None:
                for error in made.bad_rows:
                    on_bad(error)
            if made.fault is not None:
                raise made.fault
            if made.batch is None:
                break
            # Before the consumer gets this batch: the next batch is decoded while the consumer works.
            coming = thread.call(step)
            yield made.batch


class Step(NamedTuple):
    """The result of one step of the thread: rows (None: no more), bad rows, and the error that ended it."""

    batch: LocatedSamples | None
    bad_rows: list[ShardError]
    fault: Exception | None


class Ranges:
    """Reads byte ranges of one object in the running loop, for a thread that waits for them."""

    def __init__(self, pinned: PinnedReader) -> None:
        self._pinned = pinned
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], Future[Sequence[bytes]]] = {}
        self._closed = False

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
        """Start to read; called in the thread. The future fails with TransportClosed after `aclose`.

        Raises:
            RuntimeError: the loop is closed.
        """
        answer: Future[Sequence[bytes]] = Future()
        self._loop.call_soon_threadsafe(self._begin, list(ranges), answer)
        return answer

    async def aclose(self) -> None:
        """Cancel all reads and wait for their end. Then all futures are done, including those requested later."""
        # Before the reads are cancelled: `_begin` may still be queued in the loop, and must not start a read after
        # them.
        self._closed = True
        for task in self._tasks:
            task.cancel()
        # A cancelled caller waits to the end, too: a future that is never done would block the thread for ever.
        await wait_until_done(self._tasks)

    def _begin(self, ranges: list[tuple[int, int]], answer: Future[Sequence[bytes]]) -> None:
        if self._closed:
            answer.set_exception(_closed_error())
            return
        task = self._loop.create_task(self._read(ranges, answer), name="asyncloader-parquet-ranges")
        self._tasks[task] = answer
        task.add_done_callback(self._ended)

    async def _read(self, ranges: list[tuple[int, int]], answer: Future[Sequence[bytes]]) -> None:
        try:
            answer.set_result(await self._pinned.read_ranges(ranges))
        except Exception as error:
            answer.set_exception(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        answer = self._tasks.pop(task)
        # The task was cancelled: a future that is never done would block the thread.
        if not answer.done():
            answer.set_exception(_closed_error())


def _closed_error() -> TransportClosed:
    return TransportClosed("the shard is no longer read: its reader was closed")


async def result_of(coming: Future[T]) -> T:
    """Wait for a call of `RangeThread`."""
    # Shielded: a cancelled wait must not cancel the future, which the thread resolves and `aclose` waits for.
    return await shielded(asyncio.wrap_future(coming))


class RangeThread:
    """Calls blocking functions in a separate thread, one after the other.

    The thread is a daemon: if the loop dies before `aclose`, the interpreter's exit does not wait for it.

    Args:
        ranges: read the bytes that the functions wait for.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(
            target=copy_context().run, args=(_serve, self._asked), name="asyncloader-parquet", daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the thread call a function after those before."""
        coming: Future[T] = Future()
        self._last = coming
        self._asked.put((coming, function))
        return coming

    async def aclose(self) -> None:
        """End the reads, the calls that wait for them, and the thread."""
        # The thread ends after the calls so far, which end because their reads fail.
        self._asked.put(None)
        try:
            await self._ranges.aclose()
        finally:
            if self._last is not None and not self._last.done():
                await wait_until_done([asyncio.wrap_future(self._last)])


def _serve(asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := asked.get()) is not None:
        answer, function = call
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
        # Otherwise the thread would keep the last batch while it waits for the next call.
        del call, answer, function
