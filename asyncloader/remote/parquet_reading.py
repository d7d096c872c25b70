"""Reads a range of a Parquet shard: from its transport to its samples.

Data path: transport -> [parquet_reading: byte ranges -> thread -> rows] -> prefetch.RangeReading -> worker_stream.

pyarrow decodes in a separate thread, which waits for bytes that the event loop fetches: `Ranges` connects the two. One
batch of rows is decoded ahead. (The loop's default executor is not used, because it may also look up host names: a
look-up could be queued behind the threads that wait for it.)

A row group can only be decoded from its beginning on. Fixed streams begin and end anywhere: where four of them read a
quarter of a row group each, decoding it for each would take two and a half times as long. So `SharedParquet` decodes a
row group of which a stream of a worker reads a part once for all streams that read it at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from contextvars import copy_context
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from asyncloader.bridge import in_thread
from asyncloader.formats import LocatedSamples, OnBad, ShardError
from asyncloader.formats.parquet import TAIL_BYTES, Footer, RowOptions, footer_size, parse_footer, read_batches
from asyncloader.formats.rows import RecordBatchRows
from asyncloader.shielding import shielded, wait_until_done
from asyncloader.transports import ObjectInfo, PinnedReader, TransportClosed

MOST_BYTES = 64 << 20
"""Bytes of decoded rows, in Arrow's memory, that a worker keeps for its other streams."""

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
    options: RowOptions,
    start: int = 0,
    stop: int | None = None,
    on_bad: OnBad | None = None,
    footer: Footer | None = None,
) -> AsyncGenerator[LocatedSamples, None]:
    """Read rows ``[start, stop)`` of a file. Rows that `on_bad` can skip: rows with a value that has no Python form.
    It is called in the loop. `footer` is the file's, if it was read before.

    Raises:
        ShardError: the file is damaged.
        TransportError: the bytes cannot be read, or are of another version of the file than its footer.
    """
    if footer is None:
        footer, _ = await read_footer(pinned, url)
    after = footer.rows if stop is None else min(stop, footer.rows)
    decoding = _Decoding(pinned, footer, start, after, options, None)
    async with aclosing(decoding), aclosing(decoding.rows(start, after, on_bad)) as rows:
        async for found in rows:
            yield found


class SharedParquet:
    """The Parquet files that the streams of one worker read at present. Used in one event loop.

    A row group of which a stream reads a part is decoded for all streams of its file. The bytes of rows that are kept
    are bounded for all files together: a stream whose rows are not kept, or whose row group could not be decoded for
    another stream, reads its rows alone.

    Args:
        most: bytes of decoded rows that are kept for other streams.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._footers: dict[PinnedReader, _SharedFooter] = {}
        self._groups: dict[tuple[PinnedReader, int], _Decoding] = {}
        self._budget = _Budget(most)

    async def read(
        self,
        pinned: PinnedReader,
        url: str,
        *,
        options: RowOptions,
        start: int = 0,
        stop: int | None = None,
        on_bad: OnBad | None = None,
    ) -> AsyncGenerator[LocatedSamples, None]:
        """Read rows ``[start, stop)`` of a file, like `read_parquet`. `options` are the same for all streams."""
        async with _use(self._footers, pinned, partial(_SharedFooter, pinned, url)) as shared:
            footer = await shared.read()
            for first, after, number in _parts(footer.edges, start, footer.rows if stop is None else stop):
                if number is None:
                    found = read_parquet(
                        pinned, url, start=first, stop=after, options=options, on_bad=on_bad, footer=footer
                    )
                    async with aclosing(found) as alone:
                        async for rows in alone:
                            yield rows
                    continue
                begin, end = footer.edges[number : number + 2]
                make = partial(_Decoding, pinned, footer, begin, end, options, self._budget)
                async with (
                    _use(self._groups, (pinned, number), make) as group,
                    aclosing(group.rows(first, after, on_bad)) as together,
                ):
                    async for rows in together:
                        yield rows


def _parts(edges: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int | None]]:
    """Return rows ``[start, stop)`` in parts: those of row groups of which only a part is read, each with the group's
    number; and those of whole row groups, together.
    """
    found: list[tuple[int, int, int | None]] = []
    for number, (first, after) in enumerate(pairwise(edges)):
        at, end = max(first, start), min(after, stop)
        if at >= end:
            continue
        if (at, end) != (first, after):
            found.append((at, end, number))
        elif found and found[-1][2] is None:
            found[-1] = (found[-1][0], end, None)
        else:
            found.append((at, end, None))
    return found


class _Budget:
    """Bytes that may be kept. Several threads use it."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Whether that many bytes may be kept; then they count until they are taken back, as a negative number."""
        with self._lock:
            fits = size <= self._left
            self._left -= size if fits else 0
            return fits


_Used = TypeVar("_Used", "_SharedFooter", "_Decoding")


@asynccontextmanager
async def _use(objects: dict[Any, _Used], key: Any, make: Callable[[], _Used]) -> AsyncGenerator[_Used, None]:
    """Give the object of this key to one more user: `make` it for the first, and close it after the last."""
    found = objects.get(key)
    if found is None:
        found = objects[key] = make()
    found.users += 1
    try:
        yield found
    finally:
        found.users -= 1
        if not found.users:
            # First: a user that comes while it is closed gets another.
            del objects[key]
            await found.aclose()


class _SharedFooter:
    """The footer of a file that streams read at present."""

    def __init__(self, pinned: PinnedReader, url: str) -> None:
        self.users = 0
        self._pinned = pinned
        self._url = url
        self._reading: asyncio.Task[tuple[Footer, ObjectInfo]] | None = None

    async def read(self) -> Footer:
        """Return the file's footer, which is read once, unless that fails. Raises the errors of `read_footer`."""
        reading = self._reading
        if reading is not None:
            try:
                return (await shielded(reading))[0]
            except Exception:
                # An error is that of the caller who began to read: no two of them raise the same.
                return (await read_footer(self._pinned, self._url))[0]
        reading = self._reading = asyncio.create_task(
            read_footer(self._pinned, self._url), name="asyncloader-parquet-footer"
        )
        # Retrieves the error, so that asyncio does not log it: the caller raises it, unless it was cancelled.
        reading.add_done_callback(lambda done: None if done.cancelled() else (done.exception(), None)[1])
        return (await shielded(reading))[0]

    async def aclose(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await wait_until_done([self._reading])


class _Found(NamedTuple):
    """Rows as far as they are good, each part with the bad rows before it; the bad rows behind them; the number of the
    row after all of them; and the error that ended them.
    """

    rows: list[tuple[list[ShardError], LocatedSamples]]
    bad_rows: list[ShardError]
    after: int
    fault: Exception | None


class _KeptBatch(NamedTuple):
    """A record batch of pyarrow, the numbers of its rows, and the offset of its row group."""

    batch: Any
    rows: range
    place: int


class _Decoding:
    """Rows ``[start, stop)`` of a file, decoded in a thread as far as their readers need them.

    Args:
        pinned: reads the file.
        footer: the file's.
        start, stop: the numbers of the rows.
        options: how they are read.
        budget: of the bytes that are kept for further readers. None: there is one reader.
    """

    def __init__(
        self, pinned: PinnedReader, footer: Footer, start: int, stop: int, options: RowOptions, budget: _Budget | None
    ) -> None:
        self.users = 0
        self._pinned = pinned
        self._footer = footer
        self._options = options
        self._budget = budget
        ranges = Ranges(pinned)
        self._thread = RangeThread(ranges)
        # Of the thread:
        self._batches = read_batches(footer, ranges.fetch, start=start, stop=stop, options=options)
        self._at = start  # the first row that is not decoded
        self._kept: list[_KeptBatch] = []
        self._bytes = 0  # of the rows that are kept
        self._failed = False

    async def rows(self, start: int, stop: int, on_bad: OnBad | None) -> AsyncGenerator[LocatedSamples, None]:
        """Read some of the rows, like `read_parquet`. What is not kept any more, or cannot be decoded for another
        reader, is read alone.
        """
        if start >= stop:
            return
        at, tolerant = start, on_bad is not None
        coming = self._thread.call(partial(self._read, at, stop, tolerant))
        # Shielded: a cancelled wait must not cancel the future, which the thread resolves and `aclose` waits for.
        while (found := await shielded(asyncio.wrap_future(coming))) is not None:
            at = found.after
            if at < stop and found.fault is None:
                # Before the consumer gets these rows: others are decoded while it works.
                coming = self._thread.call(partial(self._read, at, stop, tolerant))
            for bad_rows, rows in found.rows:
                _report(bad_rows, on_bad)
                yield rows
            _report(found.bad_rows, on_bad)
            if found.fault is not None:
                raise found.fault
            if at >= stop:
                return
        alone = read_parquet(
            self._pinned,
            self._footer.url,
            start=at,
            stop=stop,
            options=self._options,
            on_bad=on_bad,
            footer=self._footer,
        )
        async with aclosing(alone):
            async for rows in alone:
                yield rows

    def _read(self, start: int, stop: int, tolerant: bool) -> _Found | None:
        """Make the first of these rows, at least one; None: they are not kept any more, or could not be decoded.

        Args:
            start: number of a row.
            stop: number of the row after the last that is wanted.
            tolerant: leave out rows that can be skipped. False: they are errors.
        """
        kept = next((each for each in self._kept if start in each.rows), None)
        if kept is None and (start < self._at or self._failed):
            return None
        try:
            while kept is None:
                kept = self._decode(start)
        except Exception as error:
            self._failed = True
            return _Found([], [], start, error)
        rows: list[tuple[list[ShardError], LocatedSamples]] = []
        bad: list[ShardError] = []
        made = RecordBatchRows(self._footer.url, self._options.max_sample_bytes, bad.append if tolerant else None)
        made.place = kept.place
        after = min(stop, kept.rows.stop)
        try:
            for each in made.read(kept.batch, kept.rows.start, start, after):
                rows.append((bad[:], each))
                bad.clear()
        except ShardError as error:
            return _Found(rows, bad, after, error)
        return _Found(rows, bad, after, None)

    def _decode(self, start: int) -> _KeptBatch | None:
        """Decode the next record batch, and keep it if possible; return it if row `start` is in it."""
        batch, first, place = next(self._batches)
        kept = _KeptBatch(batch, range(first, first + batch.num_rows), place)
        self._at = kept.rows.stop
        if self._budget is not None and self._budget.take(batch.nbytes):
            self._kept.append(kept)
            self._bytes += batch.nbytes
        return kept if start in kept.rows else None

    async def aclose(self) -> None:
        """Stop decoding."""
        try:
            await self._thread.aclose()
        finally:
            if self._budget is not None:
                self._budget.take(-self._bytes)
                self._kept.clear()


def _report(bad_rows: Sequence[ShardError], on_bad: OnBad | None) -> None:
    for error in bad_rows:
        assert on_bad is not None
        on_bad(error)


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
