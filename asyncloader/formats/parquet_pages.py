"""The headers of a column chunk's pages, checked on their way to pyarrow. Pure.

Data path: windows of bytes -> [pages] -> pyarrow -> rows.

pyarrow sets aside what a page header claims before it looks at the page: 2 GiB for a few bytes. So each header is read
here first. Source: the Parquet format's `parquet.thrift`.
"""

from __future__ import annotations

from asyncloader.formats.base import ShardError
from asyncloader.formats.thrift import I32, Struct, Truncated, decode_at

__all__ = ["PageCheck"]

_UNCOMPRESSED, _COMPRESSED = 2, 3
_HEADER = Struct({1: I32, _UNCOMPRESSED: I32, _COMPRESSED: I32})

LONGEST_HEADER = 1 << 20


class PageCheck:
    """Reads the page headers in the bytes of one column chunk, which are given from its beginning on.

    Args:
        start: offset of the chunk.
        end: offset after it.
        largest: bytes that a page may have, decompressed.
        url: for errors.
    """

    def __init__(self, start: int, end: int, largest: int, url: str) -> None:
        self._at = start  # offset after the bytes that were given
        self._end = end
        self._largest = largest
        self._url = url
        self._body = 0  # bytes that are still to come of the present page
        self._head = b""  # the beginning of a header that is not complete

    def feed(self, at: int, data: bytes) -> None:
        """Check `data`, which lies at offset `at`. Bytes may be given again, but none may be left out.

        Raises:
            ShardError: a page is larger than allowed or than its chunk, or a header is none.
        """
        if at > self._at:
            raise self._error("a page was passed over", self._at)
        data = data[self._at - at :]
        self._at += len(data)
        if self._head:
            data, self._head = self._head + data, b""
        pos = 0
        while True:
            step = min(self._body, len(data) - pos)
            self._body -= step
            pos += step
            if pos >= len(data):
                return
            place = self._at - len(data) + pos
            try:
                header, after = decode_at(data, _HEADER, pos)
            except Truncated as error:
                if len(data) - pos > LONGEST_HEADER:
                    raise self._error("a page header has no end", place) from error
                self._head = data[pos:]
                return
            except ValueError as error:
                raise self._error(f"a damaged page header: {error}", place) from error
            uncompressed, self._body = header.get(_UNCOMPRESSED, -1), header.get(_COMPRESSED, -1)
            if uncompressed < 0 or not 0 <= self._body <= self._end - (place + after - pos):
                raise self._error(f"a page claims {self._body:,} bytes, which its column chunk does not have", place)
            if uncompressed > self._largest:
                raise self._error(
                    f"a page claims {uncompressed:,} bytes; {self._largest:,} are allowed: raise max_sample_bytes",
                    place,
                )
            pos = after

    def _error(self, message: str, at: int) -> ShardError:
        return ShardError(message, url=self._url, offset=at)
