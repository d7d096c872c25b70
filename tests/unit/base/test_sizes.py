"""Sizes in bytes, as numbers or texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.base.sizes import bytes_of, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0B", 0),
        ("4096 b", 4096),
        ("512MB", 512_000_000),
        ("8GiB", 8 << 30),
        ("1.5kB", 1500),
        ("0.5 KiB", 512),
        (" 2tb ", 2 * 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_texts(text: str, expected: int) -> None:
    """Units are powers of 1000, with an i of 1024; case and blanks make no difference."""
    assert bytes_of(text) == expected


@given(st.integers(0, 1 << 60))
def test_numbers(number: int) -> None:
    """A number is bytes, and so is its text with a B."""
    assert bytes_of(number) == number
    assert size("ring_bytes", number, least=0) == number


@pytest.mark.parametrize("value", ["", "MB", "12", "1 iB", "1XB", "-1MB", "1e3MB", 1.5, None, True, b"1MB"])
def test_what_is_no_size(value: object) -> None:
    """A text needs a unit, so that megabytes are not mistaken for bytes; the error has the argument and an example."""
    assert bytes_of(value) is None
    with pytest.raises(ValueError, match=r'cache_bytes should be a number of bytes.*"512MB".*but got cache_bytes='):
        size("cache_bytes", value)  # type: ignore[arg-type]


def test_the_least() -> None:
    """A size below `least` is refused, however it is written."""
    assert size("read_ahead", "1kB", least=1000) == 1000
    for value in (999, "0.9kB"):
        with pytest.raises(ValueError, match="at least 1000"):
            size("read_ahead", value, least=1000)
