"""CRC-32C, as TFRecord uses it: in Python for the eight bytes of a length, by google_crc32c for whole records. Pure.

Source: RFC 3720 appendix B.4 (Castagnoli's polynomial, reflected 0x82F63B78); the mask is TFRecord's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["crc32c", "fast_crc32c", "masked"]


def _table() -> list[int]:
    table: list[int] = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


TABLE = _table()


def crc32c(data: bytes) -> int:
    """The checksum of a few bytes: about 10 MB a second."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def fast_crc32c() -> Callable[[bytes], int] | None:
    """The checksum by google_crc32c (gigabytes a second); None where it is not installed."""
    try:
        module: Any = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    return lambda data: int(module.value(data))


def masked(crc: int) -> int:
    """What TFRecord stores for `crc`: rotated right by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
