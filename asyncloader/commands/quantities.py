"""Reads and writes times and rates as people write them: ``50ms``, ``1GB/s``, ``10Gbit/s``. Pure.

Data path: none; for the arguments and findings of commands.
"""

from __future__ import annotations

import math
import re

from asyncloader.sizes import bytes_of

_MOST = 1e9  # seconds
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "min": 1 / 60}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ]+)\s*")
_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)bit/s\s*", re.IGNORECASE)


def seconds(text: str) -> float:
    """Return the seconds of a text such as ``"50ms"``, ``"1.5s"`` or ``"200us"``.

    Raises:
        ValueError: it is no time, or is longer than 10^9 seconds.
    """
    found = _TIME.fullmatch(text)
    if found is None or found[2] not in _PER_SECOND:
        raise ValueError(f"{text!r} is no time: write a number and us, ms, s or min, such as 50ms")
    number = float(found[1]) / _PER_SECOND[found[2]]
    if number > _MOST:
        raise ValueError(f"{text!r} is too long: at most {_MOST:,.0f} s")
    return number


def bytes_per_second(text: str) -> float:
    """Return the rate of a text such as ``"1GB/s"``, ``"500MiB/s"`` or ``"10Gbit/s"``.

    Raises:
        ValueError: it is no rate, or 0.
    """
    bits = _BITS.fullmatch(text)
    if bits is not None:
        rate: float | None = float(bits[1]) * 1000.0 ** "bkmgt".index(bits[2].lower() or "b") / 8
    else:
        rate = bytes_of(text.strip().removesuffix("/s")) if text.strip().endswith("/s") else None
    if not rate or not math.isfinite(rate):
        raise ValueError(f"{text!r} is no bandwidth: write a number and MB/s, GB/s or Gbit/s, such as 1GB/s")
    return float(rate)


def in_time(number: float) -> str:
    """Return seconds as a text with three digits."""
    if number >= 5400:
        return f"{number / 3600:.3g} hours"
    if number >= 90:
        return f"{number / 60:.3g} minutes"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{math.ceil(number * 1e9)} ns" if number > 0 else "0 s"


def in_rate(number: float) -> str:
    """Return bytes per second as a text with three digits, in units of 1000 like a network's."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} B/s"
