"""Reads a range of a Parquet shard: from its transport to its samples.

Data path: transport -> [parquet_reading: byte ranges -> thread -> rows] -> prefetch.RangeReading -> worker_stream.

pyarrow decodes in a separate thread, which waits for bytes that the event loop fetches: `Ranges` connects the two. One
batch of rows is decoded ahead. (The loop's default executor is not used, because it may also look up host names: a
look-up could be queued behind the threads that wait for it.)

A row group can only be decoded from its beginning on. Fixed streams begin and end anywhere: where four of them read a
quarter of a row group each, decoding it for each would take two and a half times as long. So a row group of which a
stream of a worker reads a part is decoded once for all streams that read it at the same time (`SharedRows`), if it is
small enough to be kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

from asyncloader.base.bridge import in_thread
from asyncloader.base.shielding import retrieve_error, shielded, wait_until_done
from asyncloader.formats import LocatedSamples, OnBad, ShardError
from asyncloader.formats.parquet import TAIL_BYTES, Footer, RowOptions, footer_size, parse_footer, read_batches
from asyncloader.formats.rows import RecordBatchRows
from asyncloader.transports import ObjectInfo, PinnedReader, TransportClosed
from asyncloader.workers.fetch.threads import JobThreads

_R = TypeVar("_R")

_Batch: TypeAlias = tuple[Any, int, int]  # as `read_batches` yields them

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

    The bytes of rows that are kept are bounded for all files together: the streams of a row group that does not fit, or
    that is damaged, read it alone.

    Args:
        most: bytes of decoded rows that are kept.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._groups: dict[tuple[PinnedReader, int], _KeptGroup] = {}
        # The lock is held while a footer is read: the first stream reads it for all. If it fails or is cancelled, the
        # next one does, and gets an error of its own.
        self._footers: OrderedDict[PinnedReader, tuple[asyncio.Lock, list[Footer]]] = OrderedDict()
        self._left = most

    async def footer(self, pinned: PinnedReader, url: str) -> Footer:
        """Return a file's footer, which is kept for its other streams. Raises the errors of `read_footer`."""
        lock, found = self._footers.setdefault(pinned, (asyncio.Lock(), []))
        if len(self._footers) > _MOST_FOOTERS:
            self._footers.popitem(last=False)
        async with lock:
            if not found:
                found.append((await read_footer(pinned, url))[0])
        return found[0]

    @asynccontextmanager
    async def rows(
        self, pinned: PinnedReader, footer: Footer, number: int, options: RowOptions
    ) -> AsyncGenerator[Sequence[_Batch] | None, None]:
        """Return the record batches of a row group, which are kept until the last of its streams leaves this context;
        None: they are not kept.

        Raises:
            TransportError: the bytes cannot be read. The next stream tries again.
        """
        key = (pinned, number)
        group = self._groups.setdefault(key, _KeptGroup(asyncio.Lock()))
        group.users += 1
        try:
            async with group.lock:  # the first stream decodes for all
                if group.batches is None and not group.refused:
                    await self._decode(group, pinned, footer, number, options)
            yield group.batches
        finally:
            group.users -= 1
            if not group.users:
                del self._groups[key]
                self._left += group.nbytes

    async def _decode(
        self, group: _KeptGroup, pinned: PinnedReader, footer: Footer, number: int, options: RowOptions
    ) -> None:
        # Of some columns the size is not known: they are decoded until they do not fit.
        if options.columns is None and footer.metadata.row_group(number).total_byte_size > self._left:
            group.refused = True
            return
        decoding = _Decoding(pinned, footer, *footer.edges[number : number + 2], options)
        found: list[_Batch] = []
        try:
            while (batch := await decoding.next()) is not None:
                # The file's claim of its size is not trusted.
                if batch[0].nbytes > self._left:
                    group.refused = True
                    return
                group.nbytes += batch[0].nbytes
                self._left -= batch[0].nbytes
                found.append(batch)
            group.batches = found
        except ShardError:
            group.refused = True  # each stream gets the rows before the fault, and the error
        finally:
            if group.batches is None:
                self._left, group.nbytes = self._left + group.nbytes, 0
            await decoding.aclose()


class _KeptGroup:
    """A row group that streams share: its record batches once they are decoded, unless that is refused."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self.lock = lock
        self.users = self.nbytes = 0
        self.batches: Sequence[_Batch] | None = None
        self.refused = False


async def read_parquet(
    pinned: PinnedReader,
    url: str,
    *,
    options: RowOptions,
    start: int = 0,
    stop: int | None = None,
    on_bad: OnBad | None = None,
    shared: SharedRows | None = None,
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

    Raises:
        ShardError: the file is damaged.
        TransportError: the bytes cannot be read, or are of another version of the file than its footer.
    """
    footer = (await read_footer(pinned, url))[0] if shared is None else await shared.footer(pinned, url)
    after = footer.rows if stop is None else min(stop, footer.rows)
    for first, end, number in [_RowPart(start, after, None)] if shared is None else _parts(footer.edges, start, after):
        alone = shared is None or number is None
        async with nullcontext() if alone else shared.rows(pinned, footer, number, options) as kept:
            decoding = _Decoding(pinned, footer, first, end, options, kept)
            async with aclosing(decoding), aclosing(decoding.rows(first, end, on_bad)) as rows:
                async for found in rows:
                    yield found


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


class _Decoding:
    """Rows ``[start, stop)`` of a file, decoded in a thread as far as they are asked for.

    Args:
        pinned: reads the file.
        footer: the file's.
        start, stop: the numbers of the rows.
        options: how they are read.
        kept: record batches that have these rows, and were decoded already.
    """

    def __init__(
        self,
        pinned: PinnedReader,
        footer: Footer,
        start: int,
        stop: int,
        options: RowOptions,
        kept: Sequence[_Batch] | None = None,
    ) -> None:
        self._footer = footer
        self._options = options
        self._ranges = Ranges(pinned)
        self._thread = JobThreads(1, "asyncloader-parquet")
        self._last: asyncio.Future[Any] | None = None  # of the thread's calls
        self._batches: Iterator[_Batch] = (
            read_batches(footer, self._ranges.fetch, start=start, stop=stop, options=options)
            if kept is None
            else iter(kept)
        )

    async def next(self) -> _Batch | None:
        """Return the next record batch; None at the end. Raises the errors of `read_parquet`."""
        return await shielded(self._call(partial(next, self._batches, None)))

    async def rows(self, start: int, stop: int, on_bad: OnBad | None) -> AsyncGenerator[LocatedSamples, None]:
        """Read the rows, like `read_parquet`."""
        read = partial(self._read, start, stop, on_bad is not None)
        coming = self._call(read)
        # Shielded: a cancelled wait must not cancel the future, for which `aclose` waits.
        while (found := await shielded(coming)) is not None:
            rows, fault = found
            if fault is None:
                # Before the consumer gets these rows: others are decoded while it works.
                coming = self._call(read)
            for each in rows:
                if isinstance(each, LocatedSamples):
                    yield each
                elif on_bad is not None:
                    on_bad(each)
            if fault is not None:
                raise fault

    def _call(self, function: Callable[[], _R]) -> asyncio.Future[_R]:
        self._last = self._thread.call(lambda _: function(), None)
        self._last.add_done_callback(retrieve_error)  # a reader that was closed does not ask for it
        return self._last

    def _read(
        self, start: int, stop: int, tolerant: bool
    ) -> tuple[list[LocatedSamples | ShardError], Exception | None] | None:
        """Return rows of the next record batch, the bad rows among them, and the error that ended them; None at the
        end.

        Args:
            start: number of the first row that is wanted.
            stop: number of the row after the last.
            tolerant: return rows that can be skipped. False: they are errors.
        """
        found: list[LocatedSamples | ShardError] = []
        try:
            for batch, first, place in self._batches:
                if first + batch.num_rows > start and first < stop:
                    rows = RecordBatchRows(
                        self._footer.url, self._options.max_sample_bytes, found.append if tolerant else None
                    )
                    rows.place = place
                    for each in rows.read(batch, first, start, stop):
                        found.append(each)  # noqa: PERF402 - behind the bad rows before it
                    return found, None
        except Exception as error:
            return found, error
        return None

    async def aclose(self) -> None:
        """Stop decoding, and wait for the end of the call that is running: it ends because its reads fail."""
        self._thread.close()
        try:
            await self._ranges.aclose()
        finally:
            await wait_until_done([] if self._last is None else [self._last])


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
