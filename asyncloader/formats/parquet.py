"""Reads Parquet shards: a row is a sample, a column a field. The footer locates the row groups; pyarrow parses both.

Data path: ranges -> [footer -> windows -> pyarrow -> rows] -> samples.

    PAR1    row groups: column chunks, each in pages    metadata    its length: u4    PAR1

pyarrow decodes synchronously, so this module runs in a separate thread, and gets its bytes by a function `fetch`, which
another thread serves. pyarrow is imported when the first Parquet file is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from asyncloader.formats.arrow_values import pyarrow, values
from asyncloader.formats.base import MAX_SAMPLE_BYTES, LocatedSamples, OnBad, ShardError, base_name
from asyncloader.formats.parquet_file import Fetch, RangeFile, Windows
from asyncloader.formats.parquet_pages import PageHeaders, PageLimits
from asyncloader.formats.rows import Rows, RowTable

TAIL_BYTES = 1 << 16
"""Bytes of a file's end that are read at once: most footers are smaller."""

MAX_FOOTER_BYTES = 64 << 20
"""Larger metadata is refused; parsed metadata takes several times its size."""

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
LEAST = 12  # the magic twice and the length

BUFFER = 1 << 16
"""Bytes that pyarrow reads at a time, unless a page is larger."""

LARGEST_PAGE = 64 << 20
"""The most bytes of a page; `max_sample_bytes`, if that is more."""

MOST_VALUES = 64 << 20
"""The most values of a page of a column of lists; for other columns, the number of rows in the row group."""

STEP_BYTES = 4 << 20
MOST_ROWS = 1024


class RowGroup(NamedTuple):
    """The part of a row group that is read.

    Attributes:
        number: its index in the file.
        first: number of its first row in the file.
        rows: number of its rows.
        chunks: ``(start, length)`` in bytes of each column chunk, ascending.
        uncompressed: decompressed bytes of the chunks, by the file's metadata.
        values: the most values of a page, for each column chunk.
    """

    number: int
    first: int
    rows: int
    chunks: tuple[tuple[int, int], ...]
    uncompressed: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Footer:
    """A file's parsed metadata.

    Attributes:
        url: the file's.
        size: bytes of the file.
        end: offset of the metadata; all data lies before it.
        metadata: pyarrow's object.
        edges: the number of each row group's first row and, last, of all rows; ascending.
        names: of the columns; of nested columns, the outermost name.
    """

    url: str
    size: int
    end: int
    metadata: Any
    edges: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows in the file."""
        return self.edges[-1]

    def group(self, number: int, columns: Sequence[str] | None = None) -> RowGroup:
        """Return the ranges of a row group. `columns`: only of these columns, and of columns that pyarrow takes for
        them.

        Only for a row group that pyarrow could open: with some damaged row groups, reading a column's metadata would
        end the process.

        Raises:
            ShardError: a range does not lie in the file.
        """
        group, schema = self.metadata.row_group(number), self.metadata.schema
        chunks: list[tuple[int, int, int]] = []
        first, after = self.edges[number : number + 2]
        uncompressed = 0
        for index in range(len(schema)):
            path = schema.column(index).path
            if columns is not None and not any(path == name or path.startswith(f"{name}.") for name in columns):
                continue
            column = group.column(index)
            # A chunk begins with its dictionary page, if it has one; any other offset names none.
            start, length = column.data_page_offset, column.total_compressed_size
            if 0 < (column.dictionary_page_offset or 0) < start:
                start = column.dictionary_page_offset
            where = f"column {path[:80]!r} of row group {number}"
            if column.file_path:
                raise self.error(f"{where} lies in another file")
            if start < len(MAGIC) or length < 0 or start + length > self.end:
                raise self.error(f"{where} claims {length:,} bytes at byte {start:,}, which do not lie in the file")
            uncompressed += column.total_uncompressed_size
            repeats = schema.column(index).max_repetition_level > 0
            chunks.append((start, length, MOST_VALUES if repeats else after - first))
        chunks.sort()
        # Overlapping chunks would let a small file claim the same bytes many times.
        for (start, length, _), (following, _, _) in pairwise(chunks):
            if start + length > following:
                raise self.error(f"column chunks of row group {number} overlap at byte {following:,}")
        places = tuple((start, length) for start, length, _ in chunks)
        return RowGroup(number, first, after - first, places, uncompressed, tuple(values for _, _, values in chunks))

    def error(self, message: str) -> ShardError:
        """Make an error about the metadata."""
        return ShardError(message, url=self.url, offset=self.end)


def footer_size(tail: bytes, size: int, url: str) -> int:
    """Return the number of bytes at the end of a file that `parse_footer` needs, from the file's last bytes.

    Args:
        tail: the last 8 bytes or more; the whole file, if it is shorter.
        size: of the file.
        url: of the file, for errors.

    Raises:
        ShardError: the file is not Parquet, is encrypted, or claims a footer that is larger than the file or the limit.
    """
    if size < LEAST or len(tail) < 8:
        raise ShardError(f"no Parquet file: it has {size:,} bytes", url=url, offset=0)
    magic = tail[-4:]
    if magic == ENCRYPTED:
        raise ShardError("an encrypted Parquet file: write it without encryption", url=url, offset=size - 4)
    if magic != MAGIC:
        raise ShardError("no Parquet file, or a truncated one: it does not end with PAR1", url=url, offset=size - 4)
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - LEAST:
        raise ShardError(f"the footer claims {length:,} bytes, and there are {size:,}", url=url, offset=size - 8)
    if length > MAX_FOOTER_BYTES:
        raise ShardError(f"the footer has {length:,} bytes; {MAX_FOOTER_BYTES:,} are allowed", url=url, offset=size - 8)
    return length + 8


def parse_footer(data: bytes, size: int, url: str) -> Footer:
    """Parse and check the metadata. Takes CPU time: call it in a thread.

    Args:
        data: the last `footer_size` bytes of the file.
        size: of the file.
        url: of the file.

    Raises:
        ShardError: the metadata is damaged or impossible.
        ImportError: pyarrow is not installed.
    """
    arrow, parquet = pyarrow()
    end = size - len(data)
    edges = [0]
    try:
        metadata = parquet.read_metadata(arrow.BufferReader(data))
        names = tuple(metadata.schema.to_arrow_schema().names)
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            if rows < 0:
                raise ValueError(f"row group {number} claims {rows} rows")
            edges.append(edges[-1] + rows)
        if edges[-1] != metadata.num_rows:
            raise ValueError(f"the file claims {metadata.num_rows:,} rows, its row groups {edges[-1]:,}")
        if len(set(names)) != len(names):
            raise ValueError("two columns have the same name")
    except Exception as error:
        raise ShardError(f"the Parquet footer is damaged: {_text(error)}", url=url, offset=end) from error
    return Footer(url, size, end, metadata, tuple(edges), names)


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
) -> Iterator[LocatedSamples]:
    """Read rows ``[start, stop)``. Blocks while bytes are fetched: iterate in a thread.

    The key of a sample is the shard's name and the row's number, `resume` the number of the row after it. Columns named
    ``__key__`` and ``__url__`` are overwritten. `values` decodes the values. Rows that `on_bad` can skip: rows with a
    value that has no Python form.

    Args:
        footer: of the file.
        fetch: reads ranges.
        start: number of the first row.
        stop: number of the row after the last row. None: to the end.
        columns: names of the columns to read; of nested columns, the outermost name. None: all.
        max_sample_bytes: refuse a row whose values take more (decoded) bytes. A page that takes more than that and 64
            MiB in the file is refused before it is read. pyarrow decodes up to 1,024 rows at a time, of up to 4 MiB by
            the file's metadata.
        on_bad: called with each bad row.
        window_bytes: approximate number of bytes of a row group in memory; the same number may be on its way.

    Yields:
        Up to 1,024 rows.

    Raises:
        ShardError: the file violates its format; raised after the rows before the fault.
        ValueError: `columns` names a column that the file lacks; `start` or `stop` is negative.
        ImportError: pyarrow is not installed.
        Exception: the error of `fetch`.
    """
    found = RecordBatchRows(footer.url, max_sample_bytes, on_bad)
    batches = read_batches(
        footer,
        fetch,
        start=start,
        stop=stop,
        columns=columns,
        max_sample_bytes=max_sample_bytes,
        window_bytes=window_bytes,
    )
    for batch, at, found.place in batches:
        yield from found.read(batch, at, start, footer.rows if stop is None else stop)


def read_batches(
    footer: Footer,
    fetch: Fetch,
    *,
    start: int,
    stop: int | None,
    columns: Sequence[str] | None,
    max_sample_bytes: int,
    window_bytes: int,
) -> Iterator[tuple[Any, int, int]]:
    """Read the record batches that contain rows ``[start, stop)``, as `read_rows` does; its arguments and errors.

    Yields:
        A record batch, the number of its first row, and the offset of its row group.
    """
    if start < 0 or (stop is not None and stop < 0):
        raise ValueError(f"start={start} and stop={stop} are numbers of rows: 0 or more")
    if max_sample_bytes < 1:
        raise ValueError(f"max_sample_bytes is {max_sample_bytes}; it must be at least 1")
    if columns is not None and not columns:
        raise ValueError("columns= names no column; None reads all of them")
    if missing := sorted(set(columns or ()) - set(footer.names)):
        raise ValueError(f"{footer.url!r} has no column {missing[0]!r}; it has {', '.join(map(repr, footer.names))}")
    stop = footer.rows if stop is None else min(stop, footer.rows)
    # The row groups that contain a wanted row; a group without rows contains none.
    numbers = [
        number
        for number in range(len(footer.edges) - 1)
        if footer.edges[number] < stop and max(start, footer.edges[number]) < footer.edges[number + 1]
    ]
    groups = RowGroups(footer, fetch, columns, max(max_sample_bytes, LARGEST_PAGE), window_bytes)
    following: tuple[RowGroup, Windows] | None = None
    for position, number in enumerate(numbers):
        group, windows = following or groups.begin(number)
        following = None
        place = group.chunks[0][0] if group.chunks else footer.end
        # The next group's windows are fetched while this group is decoded, if memory allows.
        if windows.whole and position + 1 < len(numbers):
            # An error of the next group is raised when that group is decoded.
            with suppress(ShardError):
                following = groups.begin(numbers[position + 1])
        at = group.first
        try:
            for batch in groups.batches(group, windows):
                # Row numbers are keys and positions to resume at: extra rows would shift those of all later rows.
                if at + batch.num_rows > group.first + group.rows:
                    raise footer.error(f"row group {number} has more rows than the {group.rows:,} that it claims")
                yield batch, at, place
                at += batch.num_rows
                if at >= stop:
                    break
        except ShardError:
            raise
        except Exception as error:
            # pyarrow wraps the errors of the file that it reads: a transport's must reach the caller as it is.
            if groups.file.failure is not None:
                raise groups.file.failure from None
            raise ShardError(
                f"row group {number} is damaged, after row {at:,}: {_text(error)}", url=footer.url, offset=place
            ) from error
        if at < min(stop, group.first + group.rows):
            raise footer.error(f"row group {number} has {at - group.first:,} rows, and claims {group.rows:,}")


class RowGroups:
    """Checks the row groups of a file, has their bytes fetched, and decodes them by pyarrow.

    Attributes:
        file: the file object that pyarrow reads.
    """

    def __init__(
        self, footer: Footer, fetch: Fetch, columns: Sequence[str] | None, largest: int, window_bytes: int
    ) -> None:
        arrow, parquet = pyarrow()
        self.file = RangeFile(footer.size, largest, fetch, footer.url)
        self._footer = footer
        self._fetch = fetch
        self._columns = None if columns is None else list(columns)
        self._window_bytes = window_bytes
        self._largest = largest
        try:
            self._source = parquet.ParquetFile(
                arrow.PythonFile(self.file, mode="r"),
                metadata=footer.metadata,
                pre_buffer=False,
                buffer_size=BUFFER,
                page_checksum_verification=True,
            )
        except Exception as error:
            raise footer.error(f"the Parquet footer is damaged: {_text(error)}") from error

    def begin(self, number: int) -> tuple[RowGroup, Windows]:
        """Check the ranges of a row group, and start to fetch its first windows.

        Raises:
            ShardError: pyarrow cannot open it, or a range does not lie in the file.
        """
        self._open(number)
        group = self._footer.group(number, self._columns)
        pages = [
            PageHeaders(length, PageLimits(self._largest, values))
            for (_, length), values in zip(group.chunks, group.values, strict=True)
        ]
        windows = Windows(group.chunks, self._window_bytes, self._fetch, pages)
        windows.begin()
        return group, windows

    def _open(self, number: int) -> None:
        """Let pyarrow open the row group, without any of its bytes.

        So contradictions in a column's metadata, and encrypted columns, raise an error. In `Footer.group` they would
        end the process.
        """
        self.file.empty, self.file.asked = True, False
        try:
            next(self._batches(number, 1), None)
        except Exception as error:
            # If pyarrow wanted bytes, it has opened the row group, and the error is only that none came.
            if not self.file.asked:
                raise self._footer.error(f"pyarrow cannot open row group {number}: {_text(error)}") from error
        finally:
            self.file.empty = False

    def batches(self, group: RowGroup, windows: Windows) -> Iterator[Any]:
        """Decode a row group to record batches of the wanted columns."""
        self.file.windows = [windows]
        # Batches of about `STEP_BYTES` by the metadata, which `RecordBatchRows` does not trust: it compares sizes.
        size = max(1, group.uncompressed // max(group.rows, 1))
        for batch in self._batches(group.number, max(1, min(MOST_ROWS, STEP_BYTES // size))):
            # pyarrow takes "a.b" for field b of column a, too.
            wanted = [name for name in batch.schema.names if self._columns is None or name in self._columns]
            yield batch.select(wanted)

    def _batches(self, number: int, rows: int) -> Iterator[Any]:
        batches: Iterator[Any] = self._source.iter_batches(
            rows, row_groups=[number], columns=self._columns, use_threads=False
        )
        return batches


class RecordBatchRows:
    """Turns record batches into samples. `place` is the offset of their row group, for errors."""

    place = 0

    def __init__(self, url: str, max_sample_bytes: int, on_bad: OnBad | None) -> None:
        self._url = url
        self._name = base_name(url)
        self._max = max_sample_bytes
        self._on_bad = on_bad

    def read(self, batch: Any, at: int, start: int, stop: int) -> Iterator[LocatedSamples]:
        """Yield the rows in ``[start, stop)`` of a batch whose first row is number `at`; then raise the first error."""
        first, after = max(start, at), min(stop, at + batch.num_rows)
        if first >= after:
            return
        batch = batch.slice(first - at, after - first)
        found: LocatedSamples | None = None
        # Otherwise a row is bad: read again, row by row, to find it and keep the others.
        with suppress(Exception):
            # Row by row only if a row may be too large: the size of a slice takes long to compute.
            if batch.nbytes > self._max:
                self._check_sizes(batch, first)
            found = self._rows(batch, first)
        if found is not None:
            yield found
        else:
            yield from self._read_single_rows(batch, first)

    def _rows(self, batch: Any, first: int) -> LocatedSamples:
        columns = {name: values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        table = RowTable(columns, shard=self._name, url=self._url, first=first)
        return LocatedSamples(Rows(table, range(batch.num_rows)), range(first + 1, first + batch.num_rows + 1))

    def _read_single_rows(self, batch: Any, first: int) -> Iterator[LocatedSamples]:
        """Yield the good rows: those between two bad rows together.

        Raises:
            ShardError: a row is bad and cannot be skipped.
        """
        good = 0  # the first good row that is not returned yet
        for row in range(batch.num_rows):
            bad = self._fault(batch.slice(row, 1), first + row)
            if bad is None:
                continue
            if good < row:
                yield self._rows(batch.slice(good, row - good), first + good)
            if bad.resume is None or self._on_bad is None:
                try:
                    raise bad
                finally:
                    del bad  # its traceback refers to this frame
            self._on_bad(bad)
            good = row + 1
        if good < batch.num_rows:
            yield self._rows(batch.slice(good), first + good)

    def _fault(self, row: Any, number: int) -> ShardError | None:
        """Return the error of a row, if it is bad; with a position to resume at, if it can be skipped."""
        try:
            self._check_sizes(row, number)
            self._rows(row, number)
        except ShardError as error:
            return error
        except Exception as error:
            bad = self._error(f"row {number:,} has a value with no Python form: {_text(error)}")
            bad.resume = number + 1
            bad.__cause__ = error
            return bad
        return None

    def _check_sizes(self, batch: Any, first: int) -> None:
        arrow, _ = pyarrow()
        for row in range(batch.num_rows):
            # A dictionary is the batch's: of it, a row takes one value.
            size = sum(
                (column.dictionary_decode() if isinstance(column, arrow.DictionaryArray) else column).nbytes
                for column in batch.slice(row, 1).columns
            )
            if size > self._max:
                raise self._error(f"row {first + row:,} takes {size:,} bytes, more than max_sample_bytes={self._max:,}")

    def _error(self, message: str) -> ShardError:
        return ShardError(f"{message}, in the row group that begins here", url=self._url, offset=self.place)


def _text(error: Exception) -> str:
    return str(error)[:300] or type(error).__name__
