"""Reads Parquet shards: a row is a sample, a column a field. The footer locates the row groups; pyarrow parses both.

Data path: ranges -> [footer -> windows -> pyarrow -> record batches] -> rows.

    PAR1    row groups: column chunks, each in pages    metadata    its length: u4    PAR1

pyarrow decodes synchronously, so this module runs in a separate thread, and gets its bytes by a function `fetch`, which
another thread serves. pyarrow is imported when the first Parquet file is read.

The claims of the footer are checked before a byte is read by them. What lies in a column chunk is parsed by pyarrow
alone.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from asyncloader.errors import ShardError
from asyncloader.formats.base import MAX_SAMPLE_BYTES
from asyncloader.formats.rows import pyarrow

TAIL_BYTES = 1 << 16
"""Bytes of a file's end that are read at once: most footers are smaller."""

MAX_FOOTER_BYTES = 64 << 20
"""Larger metadata is refused; parsed metadata takes several times its size."""

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
LEAST = 12  # the magic twice and the length

BUFFER = 1 << 16
"""Bytes that pyarrow reads at a time, unless a page is larger."""

LEAST_WINDOW = 1 << 16

STEP_BYTES = 4 << 20
MOST_ROWS = 1024

Fetch: TypeAlias = Callable[[Sequence[tuple[int, int]]], "Future[Sequence[bytes]]"]
"""Starts to read ``(start, length)`` ranges; the future has their bytes, in the same order. Never blocks."""


class RowOptions(NamedTuple):
    """How rows are read.

    Attributes:
        columns: names of the columns to read; of nested columns, the outermost name. None: all.
        max_sample_bytes: refuse a row whose values take more (decoded) bytes. pyarrow decodes up to 1,024 rows at a
            time, of up to 4 MiB by the file's metadata.
        window_bytes: approximate number of bytes of a row group in memory; the same number may be on its way.
    """

    columns: Sequence[str] | None = None
    max_sample_bytes: int = MAX_SAMPLE_BYTES
    window_bytes: int = 8 << 20


class RowGroup(NamedTuple):
    """The part of a row group that is read: start and length of its column chunks, ascending; and their decompressed
    bytes, by the file's metadata.
    """

    number: int
    chunks: tuple[tuple[int, int], ...]
    uncompressed: int


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
        chunks: list[tuple[int, int]] = []
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
            chunks.append((start, length))
        chunks.sort()
        # Overlapping chunks would let a small file claim the same bytes many times.
        for (start, length), (following, _) in pairwise(chunks):
            if start + length > following:
                raise self.error(f"column chunks of row group {number} overlap at byte {following:,}")
        return RowGroup(number, tuple(chunks), uncompressed)

    def error(self, message: str) -> ShardError:
        """Make an error about the metadata."""
        return ShardError(message, url=self.url, offset=self.end)


def footer_size(tail: bytes, size: int, url: str) -> int:
    """Return the number of bytes at the end of a file that `parse_footer` needs, from its last 8 bytes or more, or the
    whole file.

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
    """Parse and check the metadata, the last `footer_size` bytes of a file. Takes CPU time: call it in a thread.

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


def read_batches(
    footer: Footer, fetch: Fetch, *, start: int, stop: int | None, options: RowOptions
) -> Iterator[tuple[Any, int, int]]:
    """Read the record batches that contain rows ``[start, stop)``; None: to the end. Blocks while bytes are fetched:
    iterate in a thread.

    `rows.RecordBatchRows` makes samples of them. The key of a sample is the shard's name and the row's number, `resume`
    the number of the row after it. Columns named ``__key__`` and ``__url__`` are overwritten.

    Yields:
        A record batch of up to 1,024 rows, the number of its first row, and the offset of its row group.

    Raises:
        ShardError: the file violates its format; raised after the rows before the fault.
        ValueError: the options name a column that the file lacks; `start` or `stop` is negative.
        ImportError: pyarrow is not installed.
        Exception: the error of `fetch`.
    """
    columns = options.columns
    if start < 0 or (stop is not None and stop < 0):
        raise ValueError(f"start={start} and stop={stop} are numbers of rows: 0 or more")
    if options.max_sample_bytes < 1:
        raise ValueError(f"max_sample_bytes is {options.max_sample_bytes}; it must be at least 1")
    if columns is not None and not columns:
        raise ValueError("columns= names no column; None reads all of them")
    if missing := sorted(set(columns or ()) - set(footer.names)):
        raise ValueError(f"{footer.url!r} has no column {missing[0]!r}; it has {', '.join(map(repr, footer.names))}")
    stop = footer.rows if stop is None else min(stop, footer.rows)
    # The row groups that contain a wanted row; a group without rows contains none.
    numbers = [
        number
        for number, (first, after) in enumerate(pairwise(footer.edges))
        if first < stop and max(start, first) < after
    ]
    groups = _RowGroups(footer, fetch, options)
    following: tuple[RowGroup, Windows] | None = None
    # Not strict: without a wanted row there is None alone.
    for number, next_number in zip(numbers, [*numbers[1:], None], strict=False):
        group, windows = following or groups.begin(number)
        following = None
        # The next group's windows are fetched while this group is decoded, if memory allows.
        if windows.whole and next_number is not None:
            # An error of the next group is raised when that group is decoded.
            with suppress(ShardError):
                following = groups.begin(next_number)
        place = group.chunks[0][0] if group.chunks else footer.end
        at, end = footer.edges[number : number + 2]
        try:
            for batch in groups.batches(group, windows):
                # Row numbers are keys and positions to resume at: extra rows would shift those of all later rows.
                if at + batch.num_rows > end:
                    raise footer.error(f"row group {number} has more rows than it claims")
                yield batch, at, place
                at += batch.num_rows
                if at >= stop:
                    break
        except ShardError:
            raise
        except Exception as error:
            # pyarrow wraps the errors of the file that it reads: a transport's must reach the caller as it is. pyarrow
            # keeps the file, too, where no collector looks: the file must not refer to the error, nor to windows that
            # do, because the error's traceback refers to this frame, and that to pyarrow.
            failure, groups.file.failure, groups.file.windows = groups.file.failure, None, None
            if failure is not None:
                try:
                    raise failure from None
                finally:
                    del failure
            raise ShardError(
                f"row group {number} is damaged, after row {at:,}: {_text(error)}", url=footer.url, offset=place
            ) from error
        if at < min(stop, end):
            raise footer.error(f"row group {number} has {end - at:,} rows fewer than it claims")


class _RowGroups:
    """Checks the row groups of a file, has their bytes fetched, and decodes them by pyarrow.

    Attributes:
        file: the file object that pyarrow reads.
    """

    def __init__(self, footer: Footer, fetch: Fetch, options: RowOptions) -> None:
        arrow, parquet = pyarrow()
        self.file = RangeFile(footer.size)
        self._footer = footer
        self._fetch = fetch
        self._columns = None if options.columns is None else list(options.columns)
        self._window_bytes = options.window_bytes
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
        # pyarrow opens the row group, without any of its bytes. So contradictions in a column's metadata, and encrypted
        # columns, raise an error. In `Footer.group` they would end the process.
        windows, self.file.windows, self.file.asked = self.file.windows, None, False
        try:
            next(self._batches(number, 1), None)
        except Exception as error:
            # If pyarrow wanted bytes, it has opened the row group, and the error is only that none came.
            if not self.file.asked:
                raise self._footer.error(f"pyarrow cannot open row group {number}: {_text(error)}") from error
        finally:
            self.file.windows = windows
        group = self._footer.group(number, self._columns)
        return group, Windows(group.chunks, self._window_bytes, self._fetch)

    def batches(self, group: RowGroup, windows: Windows) -> Iterator[Any]:
        """Decode a row group to record batches of the wanted columns."""
        self.file.windows = windows
        # Batches of about `STEP_BYTES` by the metadata, which `RecordBatchRows` does not trust: it compares sizes.
        first, after = self._footer.edges[group.number : group.number + 2]
        size = max(1, group.uncompressed // max(after - first, 1))
        for batch in self._batches(group.number, max(1, min(MOST_ROWS, STEP_BYTES // size))):
            # pyarrow takes "a.b" for field b of column a, too.
            wanted = [name for name in batch.schema.names if self._columns is None or name in self._columns]
            yield batch.select(wanted)

    def _batches(self, number: int, rows: int) -> Iterator[Any]:
        batches: Iterator[Any] = self._source.iter_batches(
            rows, row_groups=[number], columns=self._columns, use_threads=False
        )
        return batches


class Windows:
    """The bytes of one row group: a window of each column chunk, and the next window on its way. pyarrow reads each
    chunk from its beginning to its end.

    Args:
        chunks: ``(start, length)`` of each chunk, ascending, without overlaps.
        most: approximate bytes of all windows together; a window has at least 64 KiB. Windows on their way come on top.
        fetch: reads ranges. The first windows are requested at once, all in one call.

    Attributes:
        whole: the whole row group fits into the windows.
    """

    def __init__(self, chunks: Sequence[tuple[int, int]], most: int, fetch: Fetch) -> None:
        total = sum(length for _, length in chunks)
        self.whole = total <= most
        self._fetch = fetch
        self._starts = [start for start, _ in chunks]
        self._ends = [start + length for start, length in chunks]
        self._sizes = [max(LEAST_WINDOW, most * length // max(total, 1)) for _, length in chunks]
        self._held: list[tuple[int, bytes]] = [(start, b"") for start in self._starts]
        self._coming: list[tuple[int, Future[Sequence[bytes]], int] | None] = []
        if chunks:
            coming = fetch([self._window(number, start) for number, start in enumerate(self._starts)])
            self._coming += [(start, coming, index) for index, start in enumerate(self._starts)]

    def read(self, at: int, length: int) -> bytes:
        """Read bytes of the chunk that contains byte `at`; waits for a window that is on its way. Shorter at the
        chunk's end; no bytes if no chunk contains it.
        """
        number = bisect_right(self._starts, at) - 1
        if number < 0 or at >= self._ends[number]:
            return b""
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
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _window(self, number: int, at: int, length: int = 0) -> tuple[int, int]:
        return at, min(max(self._sizes[number], length), self._ends[number] - at)

    def _advance(self, number: int, at: int, length: int) -> None:
        """Hold the bytes from `at` on, and start to fetch the bytes after them."""
        coming, self._coming[number] = self._coming[number], None
        self._held[number] = (at, b"")  # releases the old window before the new window is held
        if coming is None or coming[0] != at:
            coming = (at, self._fetch([self._window(number, at, length)]), 0)
        data = coming[1].result()[coming[2]]
        self._held[number] = (at, data)
        after = at + len(data)
        if after < self._ends[number]:
            self._coming[number] = (after, self._fetch([self._window(number, after)]), 0)


class RangeFile(io.RawIOBase):
    """The file object that pyarrow reads. `read` blocks, so it is used in a thread.

    Args:
        size: of the file.

    Attributes:
        windows: of the row group that is read. None: reads return no bytes, as at the end of a file.
        asked: `read` was called.
        failure: the error of `fetch`; pyarrow may wrap it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.windows: Windows | None = None
        self.asked = False
        self.failure: Exception | None = None
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def tell(self) -> int:
        """Return the offset at which the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position, like a file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read `size` bytes, or fewer at the end of the file or of a column chunk."""
        self.asked = True
        left = max(0, self._size - self._at)
        length = left if size < 0 else min(size, left)
        if self.windows is None or not length:
            return b""
        try:
            data = self.windows.read(self._at, length)
        except Exception as error:
            self.failure = error
            raise
        self._at += len(data)
        return data


def _text(error: Exception) -> str:
    return str(error)[:300] or type(error).__name__
