"""Checks the page headers of a Parquet column chunk before pyarrow sees them. Pure.

Data path: ranges -> windows -> [parquet_pages] -> pyarrow.

    column chunk: page, page, ...    page: header (Thrift's compact protocol), then its bytes

pyarrow trusts a header: it allocates the size that a page claims to have when decompressed, up to 2 GiB, and a level
for each value that the page claims. So this module parses the headers, too, as their bytes pass by, and refuses
impossible headers. A header is checked before pyarrow has its last byte. Source: apache/parquet-format,
`parquet.thrift`; the Thrift specification of the compact protocol.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

MOST_HEADER = 1 << 20
"""Bytes of a header; a header with the longest statistics that writers make has some kilobytes."""

MOST_DEPTH = 16

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 5, 7, 8
"""The fields of a page's header that contain the header of its kind; in each, field 1 is the number of values."""


class PageLimits(NamedTuple):
    """The most that a page may claim.

    Attributes:
        size: bytes, compressed and decompressed.
        values: of a data page.
    """

    size: int
    values: int


class Short(Exception):
    """The bytes end inside the header."""


class PageHeaders:
    """Follows the pages of one column chunk. `feed` must get its bytes from the beginning, in pieces of any size.

    Args:
        length: bytes of the chunk.
        limits: of its pages.
    """

    def __init__(self, length: int, limits: PageLimits) -> None:
        self._limits = limits
        self._left = length  # bytes of the chunk that were not fed yet
        self._skip = 0  # bytes until the next header
        self._header = b""  # the beginning of a header that was fed in part
        self.given = 0
        """Bytes that were checked."""

    def feed(self, data: bytes) -> None:
        """Check the next bytes.

        Raises:
            ValueError: a header is impossible.
        """
        self.given += len(data)
        position = min(self._skip, len(data))
        self._skip -= position
        self._left -= position
        while position < len(data):
            held = len(self._header)
            # A header takes some dozens of bytes: more are parsed only if these do not contain all of it.
            more = max(256, held)
            part = self._header + data[position : position + more]
            try:
                length, page = self._parse(part)
            except Short:
                # Without a limit, a header that never ends would be kept in memory as it grows.
                if len(part) > MOST_HEADER:
                    self._fail(f"a page's header has more than {MOST_HEADER:,} bytes")
                self._header = part
                taken = len(part) - held
                position += taken
                continue
            self._header = b""
            taken = length - held
            self._left -= length
            if page > self._left:
                self._fail(f"a page claims {page:,} bytes, and its column chunk has {max(0, self._left):,}")
            position += taken
            step = min(page, len(data) - position)
            position += step
            self._left -= step
            self._skip = page - step

    def _parse(self, data: bytes) -> tuple[int, int]:
        """Return the length of the header, and the length of the page's bytes."""
        header = _Compact(data)
        sizes = {2: -1, 3: -1}
        entries = 0
        for number, kind in header.fields(0):
            if kind == I32 and number in sizes:
                sizes[number] = header.integer()
            elif kind == STRUCT and number in (DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2):
                entries = max(entries, self._check_kind(header, number))
            else:
                header.skip(kind, 0)
        unpacked, packed = sizes[2], sizes[3]
        for claim in (unpacked, packed):
            if claim < 0:
                self._fail("a page's header has no size, or a negative one")
            if claim > self._limits.size:
                self._fail(f"a page claims {claim:,} bytes; {self._limits.size:,} are allowed: raise max_sample_bytes")
        # pyarrow allocates by the number of entries.
        if entries > unpacked:
            self._fail(f"a dictionary claims {entries:,} values in {unpacked:,} bytes")
        return header.at, packed

    def _check_kind(self, header: _Compact, kind_of_page: int) -> int:
        """Check the header of a page of this kind; return the entries of a dictionary."""
        entries = 0
        for number, kind in header.fields(1):
            if kind != I32:
                header.skip(kind, 1)
                continue
            claim = header.integer()
            # Of a data page of version 2, fields 5 and 6 are the bytes of its levels.
            if number == 1 and kind_of_page == DICTIONARY_PAGE:
                # A negative number becomes one that fails the check of the entries.
                entries = claim if claim >= 0 else self._limits.size + 1
            elif number == 1 and not 0 <= claim <= self._limits.values:
                self._fail(f"a page claims {claim:,} values; {self._limits.values:,} are allowed")
            if kind_of_page == DATA_PAGE_V2 and number in (2, 3, 5, 6) and not 0 <= claim <= self._limits.size:
                self._fail(f"a page's header has the impossible number {claim:,}")
        return entries

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Compact:
    """Reads the part of Thrift's compact protocol that page headers use. Raises `Short` at the end of the bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def fields(self, depth: int) -> _Fields:
        """Iterate over the fields of a struct; the caller takes the value of each."""
        if depth > MOST_DEPTH:
            raise ValueError("a page's header is nested too deeply")
        return _Fields(self)

    def byte(self) -> int:
        """Take a byte."""
        if self.at >= len(self._data):
            raise Short
        self.at += 1
        return self._data[self.at - 1]

    def varint(self) -> int:
        """Take an unsigned number."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a page's header has a number of more than 64 bits")

    def integer(self) -> int:
        """Take a signed number of 32 bits. A longer number is cut, as by Thrift."""
        value = self.varint() & 0xFFFFFFFF
        # Zigzag encoding: the lowest bit is the sign.
        return value >> 1 ^ -(value & 1)

    def skip(self, kind: int, depth: int) -> None:
        """Skip a value."""
        if kind in (TRUE, FALSE):
            return
        if kind == I8:
            self._step(1)
        elif kind in (I16, I32, I64):
            self.varint()
        elif kind == DOUBLE:
            self._step(8)
        elif kind == BINARY:
            self._step(self.varint())
        elif kind == STRUCT:
            for _, inner in self.fields(depth + 1):
                self.skip(inner, depth + 1)
        else:  # page headers have no lists, sets or maps
            raise ValueError(f"a page's header has a field of the impossible type {kind}")

    def _step(self, size: int) -> None:
        if size > MOST_HEADER:
            raise ValueError(f"a page's header has a field of {size:,} bytes")
        if self.at + size > len(self._data):
            raise Short
        self.at += size


class _Fields:
    def __init__(self, compact: _Compact) -> None:
        self._compact = compact
        self._number = 0

    def __iter__(self) -> _Fields:
        return self

    def __next__(self) -> tuple[int, int]:
        head = self._compact.byte()
        if not head:
            raise StopIteration
        kind, step = head & 15, head >> 4
        if step:
            number = self._number + step
        else:
            value = self._compact.varint()
            number = value >> 1 ^ -(value & 1)
        self._number = (number + 0x8000 & 0xFFFF) - 0x8000  # of 16 bits, as Thrift's are
        return self._number, kind
