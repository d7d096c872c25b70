"""Reads sizes in bytes, as a number or as a text with a unit: ``"512MB"``, ``"8GiB"``.

Data path: none; every argument that is a size takes both.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import TypeAlias

Size: TypeAlias = int | str
"""Bytes, or a text of a number and a unit: B; kB, MB, GB, TB (powers of 1000); KiB, MiB, GiB, TiB (of 1024)."""

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)


def bytes_of(value: object) -> int | None:
    """The size in whole bytes; None if this is no size."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if found is None or (found[3] and not found[2]):
        return None
    power = "bkmgt".index(found[2].lower() or "b")
    number = float(found[1]) * int((1024 if found[3] else 1000) ** power)
    return round(number) if isfinite(number) else None


def size(name: str, value: Size, *, least: int = 1) -> int:
    """The size in bytes of the argument `name`.

    Raises:
        ValueError: it is no size, or below `least` bytes.
    """
    found = bytes_of(value)
    if found is None or found < least:
        raise ValueError(
            f'{name} should be a number of bytes, at least {least}, or a text such as "512MB" or "8GiB", but got '
            f"{name}={value!r}"
        )
    return found


def optional_size(name: str, value: Size | None) -> int | None:
    """`size`, for an argument that may be None."""
    return None if value is None else size(name, value)
