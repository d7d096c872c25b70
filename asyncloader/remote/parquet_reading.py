"""Reads a range of a Parquet shard: from its transport to its samples.

Data path: transport -> [parquet_reading: byte ranges -> thread -> rows] -> prefetch.RangeReading -> worker_stream.

pyarrow decodes in a separate thread, which waits for bytes that the event loop fetches: `Ranges` connects the two. One
batch of rows is decoded ahead. (The loop's default executor is not used, because it may also look up host names: a
look-up could be queued behind the threads that wait for it.)

A row group can only be decoded from its beginning on. Fixed streams begin and end anywhere: where four of them read a
quarter of a row group each, decoding it for each would take two and a half times as long. So a row group of which a
stream of a worker reads a part is decoded once for all streams that read it at the same time (`SharedRows`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from asyncloader.base.bridge import in_thread
from asyncloader.base.shielding import retrieve_error, shielded, wait_until_done
from asyncloader.formats import LocatedSamples, OnBad, ShardError
from asyncloader.formats.parquet import TAIL_BYTES, Footer, RowOptions, footer_size, parse_footer, read_batches
from asyncloader.formats.rows import RecordBatchRows
from asyncloader.transports import ObjectInfo, PinnedReader, TransportClosed
from asyncloader.workers.fetch.threads import JobThreads

MOST_BYTES = 64 << 20
"""Bytes of decoded rows, in Arrow's memory, that a worker keeps for its other streams."""

_MOST_FOOTERS = 64  # that a worker keeps


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


class SharedRows:
    """The row groups that the streams of one worker read at present, and share. Used in one event loop.

    The bytes of rows that are kept are bounded for all files together: a stream whose rows are not kept, or whose row
    group could not be decoded for another stream, reads its rows alone.

    Args:
        most: bytes of decoded rows that are kept for other streams.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.decodings: dict[tuple[PinnedReader, int], _Decoding] = {}
        # The lock is held while a footer is read: the first stream reads it for all. If it fails or is cancelled, the
        # next one does, and gets an error of its own.
        self._footers: OrderedDict[PinnedReader, tuple[asyncio.Lock, list[Footer]]] = OrderedDict()
        self._left = most
        self._lock = threading.Lock()  # for `take`, which each row group's thread calls

    async def footer(self, pinned: PinnedReader, url: str) -> Footer:
        """Return a file's footer, which is kept for its other streams. Raises the errors of `read_footer`."""
        lock, found = self._footers.setdefault(pinned, (asyncio.Lock(), []))
        if len(self._footers) > _MOST_FOOTERS:
            self._footers.popitem(last=False)
        async with lock:
            if not found:
                found.append((await read_footer(pinned, url))[0])
        return found[0]

    def take(self, size: int) -> bool:
        """Whether that many bytes may be kept; then they count until they are taken back, as a negative number."""
        with self._lock:
            fits = size <= self._left
            self._left -= size if fits else 0
            return fits


async def read_parquet(
    pinned: PinnedReader,
    url: str,
    *,
    options: RowOptions,
    start: int = 0,
    stop: int | None = None,
    on_bad: OnBad | None = None,
    shared: SharedRows | None = None,
    footer: Footer | None = None,
) -> AsyncGenerator[LocatedSamples, None]:
    """Read rows ``[start, stop)`` of a file. Rows that `on_bad` can skip: rows with a value that has no Python form.
    It is called in the loop.

    Args:
        pinned: reads the file.
        url: of the file.
        options: how rows are read; the same for all that share row groups.
        start: number of the first row.
        stop: number of the row after the last; None: to the end.
        on_bad: called with each bad row. None: it is raised.
        shared: the row groups that are read at the same time. None: it shares none.
        footer: the file's, if it was read before.

    Raises:
        ShardError: the file is damaged.
        TransportError: the bytes cannot be read, or are of another version of the file than its footer.
    """
    if footer is None:
        footer = (await read_footer(pinned, url))[0] if shared is None else await shared.footer(pinned, url)
    after = footer.rows if stop is None else min(stop, footer.rows)
    parts = [_RowPart(start, after, None)] if shared is None else _parts(footer.edges, start, after)
    for first, end, number in parts:
        decoding: _Decoding | None = None
        if shared is None or number is None:
            decoding = _Decoding(pinned, footer, first, end, options, None)
        elif (decoding := shared.decodings.get((pinned, number))) is None:
            begin, close = footer.edges[number : number + 2]
            decoding = shared.decodings[pinned, number] = _Decoding(pinned, footer, begin, close, options, shared)
        decoding.users += 1
        try:
            async with aclosing(decoding.rows(first, end, on_bad)) as rows:
                async for found in rows:
                    yield found
        finally:
            decoding.users -= 1
            if not decoding.users:
                # First: a user that comes while it is closed gets another.
                if shared is not None and number is not None:
                    del shared.decodings[pinned, number]
                await decoding.aclose()


class _RowPart(NamedTuple):
    """Some rows of a file, and the number of the row group that they are a part of; None: of whole row groups."""

    start: int
    stop: int
    number: int | None


def _parts(edges: Sequence[int], start: int, stop: int) -> list[_RowPart]:
    """Return rows ``[start, stop)`` in parts: those of row groups of which only a part is read, and those of whole row
    groups, together.
    """
    found: list[_RowPart] = []
    for number, (first, after) in enumerate(pairwise(edges)):
        at, end = max(first, start), min(after, stop)
        if at >= end:
            continue
        if (at, end) != (first, after):
            found.append(_RowPart(at, end, number))
        elif found and found[-1].number is None:
            found[-1] = found[-1]._replace(stop=end)
        else:
            found.append(_RowPart(at, end, None))
    return found


class _Found(NamedTuple):
    """Rows as far as they are good, each part behind the bad rows before it, the last maybe without rows; the number of
    the row after all of them; and the error that ended them.
    """

    rows: list[tuple[list[ShardError], LocatedSamples | None]]
    after: int
    fault: Exception | None


class _KeptBatch(NamedTuple):
    """A record batch, the numbers of its rows, and the offset of its row group."""

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
        shared: counts the bytes that are kept for further readers. None: there is one reader.
    """

    def __init__(
        self,
        pinned: PinnedReader,
        footer: Footer,
        start: int,
        stop: int,
        options: RowOptions,
        shared: SharedRows | None,
    ) -> None:
        self.users = 0
        self._pinned = pinned
        self._footer = footer
        self._options = options
        self._shared = shared
        self._ranges = Ranges(pinned)
        self._thread = JobThreads(1, "asyncloader-parquet")
        self._last: asyncio.Future[_Found | None] | None = None  # of the thread's calls
        # Of the thread:
        self._batches = read_batches(footer, self._ranges.fetch, start=start, stop=stop, options=options)
        self._at = start  # the first row that is not decoded
        self._kept: list[_KeptBatch] = []
        self._bytes = 0  # of the rows that are kept
        self._failed = False

    async def rows(self, start: int, stop: int, on_bad: OnBad | None) -> AsyncGenerator[LocatedSamples, None]:
        """Read some of the rows, like `read_parquet`. What is not kept any more, or cannot be decoded for another
        reader, is read alone.
        """
        at = start
        coming = self._call(at, stop, on_bad)
        # Shielded: a cancelled wait must not cancel the future, for which `aclose` waits.
        while at < stop and (found := await shielded(coming)) is not None:
            at = found.after
            if at < stop and found.fault is None:
                # Before the consumer gets these rows: others are decoded while it works.
                coming = self._call(at, stop, on_bad)
            for bad_rows, rows in found.rows:
                for error in bad_rows:
                    assert on_bad is not None
                    on_bad(error)
                if rows is not None:
                    yield rows
            if found.fault is not None:
                raise found.fault
        if at < stop:
            url, options, footer = self._footer.url, self._options, self._footer
            alone = read_parquet(self._pinned, url, options=options, start=at, stop=stop, on_bad=on_bad, footer=footer)
            async with aclosing(alone):
                async for rows in alone:
                    yield rows

    def _call(self, start: int, stop: int, on_bad: OnBad | None) -> asyncio.Future[_Found | None]:
        self._last = self._thread.call(lambda _: self._read(start, stop, on_bad is not None), None)
        self._last.add_done_callback(retrieve_error)  # a reader that was closed does not ask for it
        return self._last

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
            return _Found([], start, error)
        rows: list[tuple[list[ShardError], LocatedSamples | None]] = []
        bad: list[ShardError] = []
        made = RecordBatchRows(self._footer.url, self._options.max_sample_bytes, bad.append if tolerant else None)
        made.place = kept.place
        after, fault = min(stop, kept.rows.stop), None
        try:
            for each in made.read(kept.batch, kept.rows.start, start, after):
                rows.append((bad[:], each))
                bad.clear()
        except ShardError as error:
            fault = error
        return _Found([*rows, (bad, None)], after, fault)

    def _decode(self, start: int) -> _KeptBatch | None:
        """Decode the next record batch, and keep it if possible; return it if row `start` is in it."""
        batch, first, place = next(self._batches)
        kept = _KeptBatch(batch, range(first, first + batch.num_rows), place)
        self._at = kept.rows.stop
        if self._shared is not None and self._shared.take(batch.nbytes):
            self._kept.append(kept)
            self._bytes += batch.nbytes
        return kept if start in kept.rows else None

    async def aclose(self) -> None:
        """Stop decoding, and wait for the end of the call that is running: it ends because its reads fail."""
        self._thread.close()
        try:
            await self._ranges.aclose()
        finally:
            try:
                await wait_until_done([] if self._last is None else [self._last])
            finally:
                if self._shared is not None:
                    self._shared.take(-self._bytes)
                    self._kept.clear()


class Ranges:
    """Reads byte ranges of one object in the running loop, for a thread that waits for them."""

    def __init__(self, pinned: PinnedReader) -> None:
        self._pinned = pinned
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
        """Start to read; called in the thread. The future fails with TransportClosed after `aclose`.

        Raises:
            RuntimeError: the loop is closed.
        """
        reading = self._read(list(ranges))
        try:
            return asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError:
            reading.close()
            raise

    async def aclose(self) -> None:
        """Cancel all reads and wait for their end. Then all futures are done, including those requested later."""
        # Before the reads are cancelled: another may still be queued in the loop, and must not start after them.
        self._closed = True
        for task in self._tasks:
            task.cancel()
        # A cancelled caller waits to the end, too: a future that is never done would block the thread for ever.
        await wait_until_done(self._tasks)

    async def _read(self, ranges: list[tuple[int, int]]) -> Sequence[bytes]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.CancelledError):  # by `aclose`
            if not self._closed:
                return await self._pinned.read_ranges(ranges)
        raise TransportClosed("the shard is no longer read: its reader was closed")
