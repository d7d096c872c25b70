from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports import AccessDenied, ObjectNotFound, ReadFailed
from asyncloader.transports.http_answers import (
    ContentRange,
    content_length,
    foreign_encoding,
    parse_content_range,
    safe_url,
    status_error,
    version_of,
)

OLD = {"Last-Modified": "Sun, 06 Nov 1994 08:49:37 GMT", "Date": "Sun, 06 Nov 1994 08:50:37 GMT"}
FRESH = {**OLD, "Date": "Sun, 06 Nov 1994 08:50:36 GMT"}

names = ["ETag", "Last-Modified", "Date", "Content-Length", "Content-Encoding", "Repr-Digest", "Content-MD5"]
values = st.text() | st.sampled_from([*OLD.values(), '"a"', 'W/"a"', "sha-256=:AAAA:", "5", "gzip"])
hostile = st.dictionaries(st.sampled_from(names), values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-4/10", ContentRange(0, 5, 10)),
        (" Bytes 7-7/8 ", ContentRange(7, 8, 8)),
        ("bytes 0-4/*", ContentRange(0, 5, None)),
        ("bytes */10", ContentRange(None, None, 10)),
        ("bytes 4-3/10", None),  # ends before it begins
        ("bytes 0-10/10", None),  # ends after the object
        ("items 0-4/10", None),
        ("bytes 0-4", None),
        ("bytes -4/10", None),
        ("bytes 0-9999999999999999999/*", None),
        (None, None),
    ],
)
def test_content_range(text: str | None, expected: ContentRange | None) -> None:
    """A legal header is read with an exclusive end; a contradictory header counts as missing."""
    assert parse_content_range(text) == expected


@given(hostile, hostile, st.none() | st.integers(0))
def test_hostile_headers_never_raise(mine: dict[str, str], other: dict[str, str], size: int | None) -> None:
    """No header raises; and no version both proves another and differs from it."""
    one, two = version_of(mine, size), version_of(other, size)
    assert not (one.proves(two) and one.differs(two))
    assert one.differs(two) == two.differs(one)
    assert not one.differs(one)
    assert content_length(mine) is None or isinstance(content_length(mine), int)
    foreign_encoding(mine)
    parse_content_range(mine.get("ETag"))


@pytest.mark.parametrize(
    ("headers", "validator"),
    [
        ({"ETag": '"a"'}, '"a"'),
        ({"ETag": '"a"', **OLD}, '"a"'),
        ({"ETag": 'W/"a"', **OLD}, OLD["Last-Modified"]),
        ({"ETag": 'W/"a"', **FRESH}, None),
        (OLD, OLD["Last-Modified"]),
        (FRESH, None),
        ({"Last-Modified": OLD["Last-Modified"]}, None),
        ({"Last-Modified": "yesterday", "Date": OLD["Date"]}, None),
        ({"ETag": '"\x01"', **OLD}, OLD["Last-Modified"]),
        ({"Last-Modified": OLD["Last-Modified"] + " \x7f", "Date": OLD["Date"]}, None),
        ({}, None),
    ],
)
def test_what_proves_equality(headers: dict[str, str], validator: str | None) -> None:
    """Equality is proved by a strong ETag only, or without an ETag by a date that is at least a minute old."""
    assert version_of(headers, None).validator == validator


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        (({"ETag": '"a"'}, 5), ({"ETag": '"a"'}, 5), False),
        (({"ETag": '"a"'}, 5), ({"ETag": '"b"'}, 5), True),
        (({"ETag": 'W/"a"'}, 5), ({"ETag": 'W/"b"'}, 5), True),
        (({"ETag": '"a"'}, 5), ({"ETag": '"a"'}, 6), True),
        (({"ETag": '"a"'}, 5), ({"ETag": '"a"'}, None), False),
        ((OLD, 5), ({**OLD, "Last-Modified": "Mon, 07 Nov 1994 08:49:37 GMT"}, 5), True),
        (({}, 5), (OLD, 5), False),
    ],
)
def test_what_shows_a_difference(
    one: tuple[dict[str, str], int], two: tuple[dict[str, str], int], differ: bool
) -> None:
    """Sizes, ETags of either kind and dates are compared, as far as both responses have them."""
    assert version_of(*one).differs(version_of(*two)) is differ


@pytest.mark.parametrize(
    ("value", "expected"),
    [("gzip", "gzip"), ("identity", None), ("", None), (" Identity ", None), ("br, gzip", "br, gzip")],
)
def test_foreign_encoding(value: str, expected: str | None) -> None:
    """Every encoding but `identity` is named."""
    assert foreign_encoding({"Content-Encoding": value}) == expected


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/b", "https://host/a/b"),
        ("https://user:pass@host:8/a?sig=1#x", "https://host:8/a?..."),
        ("http://u@evil@host/", "http://host/"),
        ("http://[", "(a malformed URL)"),
    ],
)
def test_safe_url(url: str, shown: str) -> None:
    """Userinfo, queries and fragments are left out."""
    assert safe_url(url) == shown


@given(st.integers(100, 599))
def test_each_status_has_an_error(status: int) -> None:
    """The class follows from the status; the error has the path, and its text the status, URL and note."""
    error = status_error(status, "Reason", "https://me:secret@host/a?secret", "a", "note")
    kinds = {404: ObjectNotFound, 410: ObjectNotFound, **dict.fromkeys((401, 403, 407, 451), AccessDenied)}
    assert type(error) is kinds.get(status, ReadFailed)
    assert error.path == "a"
    assert str(error).endswith(f"https://host/a?... answered {status} Reason; note")
