"""Times and rates as people write them."""

from __future__ import annotations

import pytest

from asyncloader.commands.quantities import bytes_per_second, in_rate, in_time, seconds


def test_read() -> None:
    """Units of time; bytes by 1000 and 1024; bits."""
    assert [seconds(each) for each in ("50ms", "1.5 s", "20us", "2min", "0s")] == [0.05, 1.5, 2e-5, 120.0, 0.0]
    assert [bytes_per_second(each) for each in ("1GB/s", "5MiB/s", "10Gbit/s", "800 bit/s")] == [
        1e9,
        5 * 2**20,
        1.25e9,
        100.0,
    ]


@pytest.mark.parametrize("text", ["50", "ms", "-1ms", "1h", "nan s", "1e3ms", ""])
def test_no_time(text: str) -> None:
    """Is refused, with an example."""
    with pytest.raises(ValueError, match="such as 50ms"):
        seconds(text)


@pytest.mark.parametrize("text", ["1GB", "0B/s", "0bit/s", "fast", "-1GB/s", "1Gbit"])
def test_no_rate(text: str) -> None:
    """The same."""
    with pytest.raises(ValueError, match="such as 1GB/s"):
        bytes_per_second(text)


def test_written() -> None:
    """Three digits, and the unit that makes the number readable."""
    assert [in_time(each) for each in (0, 3e-9, 5.2e-5, 0.05, 2.5, 600, 7200)] == [
        "0 s",
        "3 ns",
        "52 us",
        "50 ms",
        "2.5 s",
        "10 minutes",
        "2 hours",
    ]
    assert [in_rate(each) for each in (0.5, 5e3, 123.4e6, 2e9)] == ["0.5 B/s", "5 kB/s", "123 MB/s", "2 GB/s"]
