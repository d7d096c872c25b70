"""Parquet shards: a row is a sample, a column a field. Reads windows of column chunks, never a whole row group's.

Data path: ranges -> [windows -> pyarrow -> rows] -> samples.

pyarrow decodes synchronously and asks for bytes as it goes. So this part runs in a thread of its own, and is given
`fetch`, which has ranges read elsewhere. pyarrow reads each column chunk from its beginning to its end; `Windows` holds
a part of each, and has the next part fetched while the present one is decoded.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias

from asyncloader.formats.base import MAX_SAMPLE_BYTES, Located, OnBad, Sample, ShardError, base_name
from asyncloader.formats.parquet_arrow import pyarrow, values
from asyncloader.formats.parquet_meta import Footer, RowGroup
from asyncloader.formats.parquet_pages import PageCheck

__all__ = ["Fetch", "RangeFile", "Windows", "read_rows"]

Fetch: TypeAlias = Callable[[Sequence[tuple[int, int]]], "Future[Sequence[bytes]]"]
"""Has ``(start, length)`` ranges read, near ones together; gives their bytes in the same order. Never blocks."""

LEAST_WINDOW = 1 << 16

BUFFER = 1 << 16
"""Bytes that pyarrow asks for at a time, unless a page is larger."""

LARGEST_PAGE = 64 << 20
"""A page may have that much, or `max_sample_bytes` if that is more."""

STEP_BYTES = 4 << 20
MOST_ROWS = 1024


class Windows:
    """The bytes of one row group: of each column chunk a window, and the next one on its way.

    Args:
        chunks: ``(start, length)`` of each, ascending.
        most: bytes of all windows together, about; each has at least 64 KiB, and those on their way come on top.
        fetch: has ranges read.

    Attributes:
        whole: all of the row group fits into the windows.
        pages: what is read of each chunk is checked by these, if they are set.
    """

    def __init__(self, chunks: Sequence[tuple[int, int]], most: int, fetch: Fetch) -> None:
        total = sum(length for _, length in chunks)
        self._fetch = fetch
        self._starts = [start for start, _ in chunks]
        self._ends = [start + length for start, length in chunks]
        self._sizes = [max(LEAST_WINDOW, most * length // max(total, 1)) for _, length in chunks]
        self._held: list[tuple[int, bytes]] = [(start, b"") for start in self._starts]
        self._coming: list[tuple[int, Future[Sequence[bytes]], int] | None] = [None] * len(chunks)
        self.whole = total <= most
        self.pages: Sequence[PageCheck] = ()

    def begin(self) -> None:
        """Have the first window of each chunk fetched, all at once."""
        ranges = [self._window(number, start) for number, start in enumerate(self._starts)]
        if ranges:
            coming = self._fetch(ranges)
            self._coming = [(start, coming, index) for index, (start, _) in enumerate(ranges)]

    def find(self, at: int) -> int | None:
        """The chunk that byte `at` is in."""
        number = bisect_right(self._starts, at) - 1
        return number if number >= 0 and at < self._ends[number] else None

    def read(self, number: int, at: int, length: int) -> bytes:
        """Read of chunk `number`; waits for what is on its way. Shorter at the chunk's end."""
        length = min(length, self._ends[number] - at)
        parts: list[bytes] = []
        while length > 0:
            start, data = self._held[number]
            if not start <= at < start + len(data):
                self._advance(number, at, length)
                continue
            part = data[at - start : at - start + length]
            parts.append(part)
            at += len(part)
            length -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if self.pages:
            self.pages[number].feed(at - len(data), data)
        return data

    def _window(self, number: int, at: int, length: int = 0) -> tuple[int, int]:
        return at, min(max(self._sizes[number], length), self._ends[number] - at)

    def _advance(self, number: int, at: int, length: int) -> None:
        """Hold the bytes from `at` on, and have those behind them fetched."""
        coming, self._coming[number] = self._coming[number], None
        self._held[number] = (at, b"")  # the old window goes before the new one comes
        if coming is None or coming[0] != at:
            coming = (at, self._fetch([self._window(number, at, length)]), 0)
        data = coming[1].result()[coming[2]]
        self._held[number] = (at, data)
        after = at + len(data)
        if after < self._ends[number]:
            self._coming[number] = (after, self._fetch([self._window(number, after)]), 0)


class RangeFile(io.RawIOBase):
    """What pyarrow takes for a file. Blocks in `read`, so it is used in a thread.

    Args:
        size: of the file.
        largest: bytes that may be asked for at once.
        fetch: has ranges read.
        url: for errors.

    Attributes:
        windows: of the row groups that are read; what lies in none of them is fetched as it is asked for.
        failure: what `fetch` or a limit raised; pyarrow may wrap it on its way.
    """

    def __init__(self, size: int, largest: int, fetch: Fetch, url: str) -> None:
        super().__init__()
        self.windows: list[Windows] = []
        self.failure: BaseException | None = None
        self._size = size
        self._largest = largest
        self._fetch = fetch
        self._url = url
        self._at = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move, as a file does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read as many bytes as there are, `size` at most."""
        left = max(0, self._size - self._at)
        length = left if size < 0 else min(size, left)
        try:
            if length > self._largest:
                raise ShardError(
                    f"a page takes {length:,} bytes; {self._largest:,} are allowed: raise max_sample_bytes",
                    url=self._url,
                    offset=self._at,
                )
            data = self._take(length) if length else b""
        except BaseException as error:
            self.failure = error
            raise
        self._at += len(data)
        return data

    def _take(self, length: int) -> bytes:
        for windows in self.windows:
            number = windows.find(self._at)
            if number is not None:
                return windows.read(number, self._at, length)
        return self._fetch([(self._at, length)]).result()[0]


def read_rows(
    footer: Footer,
    fetch: Fetch,
    *,
    start: int = 0,
    stop: int | None = None,
    columns: Sequence[str] | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
    on_bad: OnBad | None = None,
    window_bytes: int = 8 << 20,
) -> Iterator[list[Located]]:
    """Read rows ``[start, stop)``. Blocks while bytes are fetched: iterate in a thread.

    The key of a sample is the shard's name and the row's number, `resume` the number of the row after it. Columns named
    ``__key__`` and ``__url__`` give way to ours. Values: see `parquet_arrow.values`. Rows that `on_bad` can have
    stepped over: those with a value that has no Python form.

    Args:
        footer: of the file.
        fetch: has ranges read.
        start: number of the first row.
        stop: number of the row after the last one. None: to the end.
        columns: names of those to read, of nested ones the outermost. None: all.
        max_sample_bytes: refuse a row whose values take more (decoded) bytes. A page of more than that and 64 MiB is
            refused before it is read. pyarrow decodes up to 1,024 rows, of 4 MiB by what the file says, at a time.
        on_bad: is told of bad rows.
        window_bytes: of a row group that are held, about; the same again may be on its way.

    Yields:
        Up to 1,024 rows.

    Raises:
        ShardError: the file breaks the rules of its format, after the rows before the fault.
        ValueError: `columns` names one that is not there; `start` or `stop` is negative.
        ImportError: pyarrow is not installed.
        Exception: what `fetch` raised.
    """
    arrow, parquet = pyarrow()
    if start < 0 or (stop is not None and stop < 0):
        raise ValueError(f"start={start} and stop={stop} are numbers of rows: 0 or more")
    if max_sample_bytes < 1:
        raise ValueError(f"max_sample_bytes is {max_sample_bytes}; it must be at least 1")
    if columns is not None and not columns:
        raise ValueError("columns= names no column; None reads all of them")
    chosen = None if columns is None else frozenset(columns)
    if missing := sorted((chosen or frozenset()) - set(footer.names)):
        raise ValueError(f"{footer.url!r} has no column {missing[0]!r}; it has {', '.join(map(repr, footer.names))}")
    stop = footer.rows if stop is None else min(stop, footer.rows)
    numbers = [
        number
        for number in range(len(footer.edges) - 1)
        if footer.edges[number] < stop and max(start, footer.edges[number]) < footer.edges[number + 1]
    ]
    largest = max(max_sample_bytes, LARGEST_PAGE)
    file = RangeFile(footer.size, largest, fetch, footer.url)
    found = _Rows(footer, max_sample_bytes, on_bad)
    source: Any = None
    following: tuple[RowGroup, Windows] | None = None
    for position, number in enumerate(numbers):
        group, windows = following or _begin(footer, number, chosen, window_bytes, largest, fetch)
        following = None
        file.windows = [windows]
        found.place = group.chunks[0][0] if group.chunks else footer.end
        if windows.whole and position + 1 < len(numbers):
            # Its error, if it has one, comes when it is its turn.
            with suppress(ShardError):
                following = _begin(footer, numbers[position + 1], chosen, window_bytes, largest, fetch)
        size = max(1, group.uncompressed // max(group.rows, 1))
        rows = max(1, min(MOST_ROWS, STEP_BYTES // size))
        at = group.first
        try:
            if source is None:
                source = parquet.ParquetFile(
                    arrow.PythonFile(file, mode="r"),
                    metadata=footer.metadata,
                    pre_buffer=False,
                    buffer_size=BUFFER,
                    page_checksum_verification=True,
                )
            names = None if columns is None else list(columns)
            for batch in source.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                if at + batch.num_rows > group.first + group.rows:
                    raise footer.error(f"row group {number} has more rows than the {group.rows:,} that it claims")
                # pyarrow takes "a.b" for field b of column a, too.
                wanted = [name for name in batch.schema.names if chosen is None or name in chosen]
                yield from found.read(batch.select(wanted), at, start, stop)
                at += batch.num_rows
                if at >= stop:
                    break
        except ShardError:
            raise
        except Exception as error:
            if file.failure is not None:
                raise file.failure from None
            text = str(error)[:300] or type(error).__name__
            raise ShardError(
                f"row group {number} is damaged, after row {at:,}: {text}", url=footer.url, offset=found.place
            ) from error
        if at < min(stop, group.first + group.rows):
            raise footer.error(f"row group {number} has {at - group.first:,} rows, and claims {group.rows:,}")


def _begin(
    footer: Footer, number: int, columns: frozenset[str] | None, window_bytes: int, largest: int, fetch: Fetch
) -> tuple[RowGroup, Windows]:
    group = footer.group(number, columns)
    windows = Windows(group.chunks, window_bytes, fetch)
    windows.pages = [PageCheck(start, start + length, largest, footer.url) for start, length in group.chunks]
    windows.begin()
    return group, windows


class _Rows:
    """Record batches to samples. `place` is where their row group begins, for errors."""

    place = 0

    def __init__(self, footer: Footer, max_sample_bytes: int, on_bad: OnBad | None) -> None:
        self._footer = footer
        self._name = base_name(footer.url)
        self._max = max_sample_bytes
        self._on_bad = on_bad

    def read(self, batch: Any, at: int, start: int, stop: int) -> Iterator[list[Located]]:
        """Give the rows in ``[start, stop)`` of a batch whose first row is number `at`; then raise, if one is bad."""
        first, after = max(start, at), min(stop, at + batch.num_rows)
        if first >= after:
            return
        batch = batch.slice(first - at, after - first)
        out: list[Located] = []
        fault: ShardError | None = None
        try:
            # One by one only if they might be too large: a slice's size takes a while to find out.
            if batch.nbytes > self._max:
                self._check_sizes(batch, first)
            self._give(self._columns(batch), batch.num_rows, first, out)
        except Exception:
            fault = self._one_by_one(batch, first, out)
        if out:
            yield out
        if fault is not None:
            raise fault

    def _columns(self, batch: Any) -> dict[str, list[Any]]:
        return {name: values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}

    def _give(self, columns: dict[str, list[Any]], rows: int, first: int, out: list[Located]) -> None:
        names = list(columns)
        table = zip(*columns.values(), strict=True) if names else iter([()] * rows)
        for number, row in enumerate(table, first):
            sample: Sample = dict(zip(names, row, strict=True))
            sample["__key__"] = f"{self._name}:{number}"
            sample["__url__"] = self._footer.url
            out.append(Located(sample, number + 1))

    def _one_by_one(self, batch: Any, first: int, out: list[Located]) -> ShardError | None:
        """The rows that are good; gives the error that ends the shard, if one does."""
        for row in range(batch.num_rows):
            alone = batch.slice(row, 1)
            try:
                self._check_sizes(alone, first + row)
                self._give(self._columns(alone), 1, first + row, out)
            except ShardError as error:
                return error
            except Exception as error:
                text = str(error)[:300]
                bad = self._error(f"row {first + row:,} has a value with no Python form: {text}")
                bad.resume = first + row + 1
                bad.__cause__ = error
                if self._on_bad is None:
                    return bad
                self._on_bad(bad)
        return None

    def _check_sizes(self, batch: Any, first: int) -> None:
        for row in range(batch.num_rows):
            size = batch.slice(row, 1).nbytes
            if size > self._max:
                raise self._error(f"row {first + row:,} takes {size:,} bytes, more than max_sample_bytes={self._max:,}")

    def _error(self, message: str) -> ShardError:
        return ShardError(f"{message}, in the row group that begins here", url=self._footer.url, offset=self.place)
