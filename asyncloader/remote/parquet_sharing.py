"""Decodes a Parquet row group once for all streams of a worker that read a part of it at the same time.

Data path: transport -> [parquet_sharing: byte ranges -> thread -> rows] -> prefetch.RangeReading -> stream_blocks.

A row group can only be decoded from its beginning on. Fixed streams begin and end anywhere: where four of them read a
quarter of a row group each, decoding it for each would take two and a half times as long. So a row group of which a
stream reads a part is decoded by a `_SharedGroup`, which keeps the rows that no stream has read yet, while a stream
reads the file. The bytes that are kept are bounded for all files together: a stream whose rows are not kept any more,
or whose row group could not be decoded for another stream, reads its rows alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from asyncloader.formats import LocatedSamples, OnBad, ShardError
from asyncloader.formats.parquet import Footer, RecordBatchRows, read_batches
from asyncloader.remote.parquet_reading import Ranges, RangeThread, read_footer, read_parquet, result_of
from asyncloader.shielding import shielded, wait_until_done
from asyncloader.transports import ObjectInfo, PinnedReader

MOST_BYTES = 64 << 20
"""Bytes of decoded rows, in Arrow's memory, that a worker keeps for its other streams."""


class RowOptions(NamedTuple):
    """How rows are read: arguments of `formats.parquet.read_rows`."""

    columns: Sequence[str] | None
    max_sample_bytes: int
    window_bytes: int


class SharedParquet:
    """The Parquet files that the streams of one worker read at present. Used in one event loop.

    Args:
        most: bytes of decoded rows that are kept for other streams.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._files: dict[PinnedReader, _SharedFile] = {}
        self._budget = _Budget(most)

    async def read(
        self, pinned: PinnedReader, url: str, start: int, stop: int | None, options: RowOptions, on_bad: OnBad | None
    ) -> AsyncGenerator[LocatedSamples, None]:
        """Read rows ``[start, stop)`` of a file, like `read_parquet`."""
        make = partial(_SharedFile, pinned, url, options, self._budget)
        async with _use(self._files, pinned, make) as file:
            footer = await file.footer()
            for first, after, number in _parts(footer.edges, start, footer.rows if stop is None else stop):
                at = first
                if number is not None:
                    async with file.group(footer, number) as group:
                        coming = group.read(at, after, tolerant=on_bad is not None)
                        while (found := await result_of(coming)) is not None:
                            at = found.after
                            if at < after and found.fault is None:
                                # Before the consumer gets these rows: others are made ready while it works.
                                coming = group.read(at, after, tolerant=on_bad is not None)
                            if on_bad is not None:
                                for error in found.bad_rows:
                                    on_bad(error)
                            for rows in found.rows:
                                yield rows
                            if found.fault is not None:
                                raise found.fault
                            if at >= after:
                                break
                if at < after:
                    alone = read_parquet(
                        pinned,
                        url,
                        start=at,
                        stop=after,
                        max_sample_bytes=options.max_sample_bytes,
                        on_bad=on_bad,
                        read_ahead=options.window_bytes,
                        columns=options.columns,
                        footer=footer,
                    )
                    async with aclosing(alone):
                        async for rows in alone:
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
        """Whether that many bytes may be kept; then they count until `give_back`."""
        with self._lock:
            fits = size <= self._left
            self._left -= size if fits else 0
            return fits

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


_Used = TypeVar("_Used", "_SharedFile", "_SharedGroup")


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


class _SharedFile:
    """A file that streams read at present.

    Args:
        pinned: reads the file.
        url: the file's.
        options: how its rows are read.
        budget: of the bytes that are kept.
    """

    def __init__(self, pinned: PinnedReader, url: str, options: RowOptions, budget: _Budget) -> None:
        self._pinned = pinned
        self.users = 0
        self._url = url
        self._options = options
        self._budget = budget
        self._groups: dict[int, _SharedGroup] = {}
        self._reading: asyncio.Task[tuple[Footer, ObjectInfo]] | None = None

    async def footer(self) -> Footer:
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
        reading.add_done_callback(_retrieve)
        return (await shielded(reading))[0]

    def group(self, footer: Footer, number: int) -> AbstractAsyncContextManager[_SharedGroup]:
        """Open a row group for one reader."""
        make = partial(_SharedGroup, self._pinned, footer, number, self._options, self._budget)
        return _use(self._groups, number, make)

    async def aclose(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await wait_until_done([self._reading])


class _Found(NamedTuple):
    """Rows of a row group, as far as they are good; bad rows among them; the number of the row after all of them; and
    the error that ended them.
    """

    rows: list[LocatedSamples]
    bad_rows: list[ShardError]
    after: int
    fault: Exception | None


class _KeptRows(NamedTuple):
    """A record batch that is kept.

    Attributes:
        batch: pyarrow's object.
        rows: the numbers of its rows.
        place: offset of its row group.
        read: for each row a byte, 1 if it was read.
        size: bytes in memory.
    """

    batch: Any
    rows: range
    place: int
    read: bytearray
    size: int


class _SharedGroup:
    """A row group, decoded in a thread as far as its readers need it.

    Args:
        pinned: reads the file.
        footer: the file's.
        number: the row group's.
        options: how its rows are read.
        budget: of the bytes that are kept.
    """

    def __init__(self, pinned: PinnedReader, footer: Footer, number: int, options: RowOptions, budget: _Budget) -> None:
        self.users = 0
        ranges = Ranges(pinned)
        self._thread = RangeThread(ranges)
        self._url = footer.url
        self._options = options
        self._budget = budget
        first, after = footer.edges[number : number + 2]
        self._batches = read_batches(footer, ranges.fetch, start=first, stop=after, **options._asdict())
        # Of the thread:
        self._at = first  # the first row that is not decoded
        self._kept: list[_KeptRows] = []
        self._failed = False

    def read(self, start: int, stop: int, *, tolerant: bool) -> Future[_Found | None]:
        """Have the thread make the first of these rows, at least one; None: they are not kept any more, or cannot be
        decoded.

        Args:
            start: number of a row.
            stop: number of the row after the last that is wanted.
            tolerant: leave out rows that can be skipped. False: they are errors.
        """
        return self._thread.call(partial(self._read, start, stop, tolerant))

    def _read(self, start: int, stop: int, tolerant: bool) -> _Found | None:
        kept = next((each for each in self._kept if start in each.rows), None)
        if kept is None and (start < self._at or self._failed):
            return None
        try:
            while kept is None:
                kept = self._decode(start)
        except Exception as error:
            self._failed = True
            return _Found([], [], start, error)
        rows: list[LocatedSamples] = []
        bad_rows: list[ShardError] = []
        fault: ShardError | None = None
        made = RecordBatchRows(self._url, self._options.max_sample_bytes, bad_rows.append if tolerant else None)
        made.place = kept.place
        try:
            for each in made.read(kept.batch, kept.rows.start, start, stop):
                rows.append(each)  # noqa: PERF402 - those before an error are kept
        except ShardError as error:
            fault = error
        after = min(stop, kept.rows.stop)
        kept.read[start - kept.rows.start : after - kept.rows.start] = bytes([1]) * (after - start)
        if 0 not in kept.read:
            self._drop(kept)
        return _Found(rows, bad_rows, after, fault)

    def _decode(self, start: int) -> _KeptRows | None:
        """Decode the next record batch, and keep it if possible; return it if row `start` is in it."""
        batch, first, place = next(self._batches)
        rows = range(first, first + batch.num_rows)
        self._at = rows.stop
        kept = _KeptRows(batch, rows, place, bytearray(len(rows)), batch.nbytes)
        if self._budget.take(kept.size):
            self._kept.append(kept)
        return kept if start in rows else None

    def _drop(self, kept: _KeptRows) -> None:
        at = next((at for at, each in enumerate(self._kept) if each is kept), None)
        if at is not None:
            del self._kept[at]
            self._budget.give_back(kept.size)

    async def aclose(self) -> None:
        """Stop decoding."""
        try:
            await self._thread.aclose()
        finally:
            for kept in self._kept[:]:
                self._drop(kept)


def _retrieve(reading: asyncio.Task[Any]) -> None:
    """Mark the error as retrieved, so that asyncio does not log it: the caller that reads raises it, unless it was
    cancelled.
    """
    if not reading.cancelled():
        reading.exception()
