"""The file object that pyarrow reads. It holds a window of each column chunk, and never a whole row group.

Data path: ranges -> [parquet_file: windows] -> pyarrow.

pyarrow requests bytes as it decodes, and reads each column chunk from its beginning to its end. `Windows` holds a part
of each chunk, and has the next part fetched while pyarrow decodes the present part.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from asyncloader.errors import LoaderError
from asyncloader.formats.base import ShardError
from asyncloader.formats.parquet_pages import PageHeaders

Fetch: TypeAlias = Callable[[Sequence[tuple[int, int]]], "Future[Sequence[bytes]]"]
"""Starts to read ``(start, length)`` ranges; the future has their bytes, in the same order. Never blocks."""

LEAST_WINDOW = 1 << 16


class Windows:
    """The bytes of one row group: a window of each column chunk, and the next window on its way.

    Args:
        chunks: ``(start, length)`` of each chunk, ascending, without overlaps.
        most: approximate bytes of all windows together; a window has at least 64 KiB. Windows on their way come on top.
        fetch: reads ranges.
        pages: check the bytes of each chunk before pyarrow gets them; empty: no checks.

    Attributes:
        whole: the whole row group fits into the windows.
    """

    def __init__(
        self, chunks: Sequence[tuple[int, int]], most: int, fetch: Fetch, pages: Sequence[PageHeaders] = ()
    ) -> None:
        total = sum(length for _, length in chunks)
        self._fetch = fetch
        self._pages = pages
        self._starts = [start for start, _ in chunks]
        self._ends = [start + length for start, length in chunks]
        self._sizes = [max(LEAST_WINDOW, most * length // max(total, 1)) for _, length in chunks]
        self._held: list[tuple[int, bytes]] = [(start, b"") for start in self._starts]
        self._coming: list[tuple[int, Future[Sequence[bytes]], int] | None] = [None] * len(chunks)
        self.whole = total <= most

    def begin(self) -> None:
        """Start to fetch the first window of each chunk, all in one call."""
        ranges = [self._window(number, start) for number, start in enumerate(self._starts)]
        if ranges:
            coming = self._fetch(ranges)
            self._coming = [(start, coming, index) for index, (start, _) in enumerate(ranges)]

    def later(self) -> list[tuple[int, int]]:
        """Return, for each chunk, the bytes behind its first window, and those of each further window."""
        sizes = zip(self._starts, self._ends, self._sizes, strict=True)
        return [(max(0, end - start - size), size) for start, end, size in sizes]

    def find(self, at: int) -> int | None:
        """Return the number of the chunk that contains byte `at`; None if no chunk does."""
        number = bisect_right(self._starts, at) - 1
        return number if number >= 0 and at < self._ends[number] else None

    def read(self, number: int, at: int, length: int) -> bytes:
        """Read bytes of chunk `number`; waits for a window that is on its way. Shorter at the chunk's end.

        Raises:
            ValueError: a page's header is impossible.
        """
        length = min(length, self._ends[number] - at)
        parts: list[bytes] = []
        while length > 0:
            start, data = self._held[number]
            if not start <= at < start + len(data):
                self._advance(number, at, length)
                continue
            part = data[at - start : at - start + length]
            if self._pages:
                self._check(number, at, part)
            parts.append(part)
            at += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, number: int, at: int, part: bytes) -> None:
        pages = self._pages[number]
        unchecked = self._starts[number] + pages.given - at  # the first byte of this part that was not checked
        # Bytes that were jumped over could contain a header that is not checked.
        if unchecked < 0:
            raise ValueError("pages are not read in their order")
        if unchecked < len(part):
            pages.feed(part[unchecked:])

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
    """A file object for pyarrow. `read` blocks, so it is used in a thread.

    Args:
        size: of the file.
        largest: the most bytes of a read.
        fetch: reads ranges.
        url: for errors.

    Attributes:
        empty: reads return no bytes, as at the end of a file.
        asked: `read` was called.
        windows: of the row groups that are read. While there are none, `read` fetches the requested bytes.
        failure: the error of `fetch` or of a limit; pyarrow may wrap it.
    """

    def __init__(self, size: int, largest: int, fetch: Fetch, url: str) -> None:
        super().__init__()
        self.empty = False
        self.asked = False
        self.windows: list[Windows] = []
        self.failure: BaseException | None = None
        self._size = size
        self._largest = largest
        self._fetch = fetch
        self._url = url
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
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
        if self.empty:
            return b""
        left = max(0, self._size - self._at)
        length = left if size < 0 else min(size, left)
        try:
            if length > self._largest:
                raise ShardError(
                    f"a page takes {length:,} bytes; {self._largest:,} are allowed: raise max_sample_bytes",
                    url=self._url,
                    offset=self._at,
                )
            try:
                data = self._take(length) if length else b""
            except ValueError as error:
                # A transport's errors may be ValueErrors, too; only the check of the pages says that the shard is
                # damaged.
                if isinstance(error, LoaderError):
                    raise
                raise ShardError(str(error), url=self._url, offset=self._at) from None
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
        if self.windows:
            raise ValueError("bytes are asked for that lie in no column chunk")
        return self._fetch([(self._at, length)]).result()[0]
