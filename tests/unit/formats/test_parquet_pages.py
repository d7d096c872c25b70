"""Page headers are checked in whatever pieces their bytes come, and none is passed over."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import ShardError
from asyncloader.formats.parquet_pages import LONGEST_HEADER, PageCheck
from asyncloader.formats.thrift import BINARY, I32, Struct, encode

HEADER = Struct({1: I32, 2: I32, 3: I32, 5: Struct({1: I32, 5: Struct({1: BINARY})})})


def page(body: int, uncompressed: int | None = None, statistics: bytes = b"") -> bytes:
    sizes = {2: body if uncompressed is None else uncompressed, 3: body}
    return encode({1: 0, **sizes, 5: {1: 7, 5: {1: statistics}}}, HEADER) + b"\xff" * body


def check(data: bytes, cuts: list[int], *, start: int = 100, largest: int = 1000) -> None:
    pages = PageCheck(start, start + len(data), largest, "u")
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for first, after in pairwise(edges):
        pages.feed(start + first, data[first:after])


pages_of = st.lists(st.tuples(st.integers(0, 900), st.binary(max_size=200)), min_size=1, max_size=8)
cuts_of = st.lists(st.integers(0, 10_000), max_size=20)


@given(pages_of, cuts_of)
@settings(deadline=None)
def test_good_pages_in_any_pieces(pages: list[tuple[int, bytes]], cuts: list[int]) -> None:
    """Headers that span pieces, and many pages in one piece."""
    check(b"".join(page(body, statistics=statistics) for body, statistics in pages), cuts)


@given(pages_of, cuts_of, st.integers(0, 7))
@settings(deadline=None)
def test_a_page_that_is_too_large_is_found_in_any_pieces(
    pages: list[tuple[int, bytes]], cuts: list[int], at: int
) -> None:
    """Its place is that of its header."""
    good = [page(body, statistics=statistics) for body, statistics in pages]
    before = b"".join(good[:at])
    data = before + page(10, uncompressed=1001) + b"".join(good[at:])
    with pytest.raises(ShardError, match="a page claims 1,001 bytes; 1,000 are allowed") as caught:
        check(data, cuts)
    assert caught.value.offset == 100 + len(before)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (page(50)[:-1], "claims 50 bytes, which its column chunk does not have"),
        (page(0, uncompressed=-1), "does not have"),
        (b"\x00", "claims -1 bytes"),
        (b"\x18\x00\x00", "a damaged page header"),
        (b"\x28\xff\xff\xff\x7f" + bytes(LONGEST_HEADER + 10), "a page header has no end|damaged"),
    ],
    ids=range(5),
)
def test_headers_that_are_none(data: bytes, match: str) -> None:
    """Larger than the chunk, negative, without sizes, damaged, endless."""
    with pytest.raises(ShardError, match=match):
        check(data, [])


def test_bytes_may_come_again_but_not_be_left_out() -> None:
    """A page that nobody looked at is not let through."""
    data = page(50) + page(60)
    pages = PageCheck(0, len(data), 1000, "u")
    pages.feed(0, data[:30])
    pages.feed(10, data[10:40])
    pages.feed(5, data[5:20])
    with pytest.raises(ShardError, match="passed over"):
        pages.feed(41, data[41:])
    pages.feed(40, data[40:])
