"""Checks arguments that several samplers share: numbers, and the lengths of samples. Tells them for a state. Pure.

Data path: none; called when a sampler is made.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import index

import numpy as np
import numpy.typing as npt


def check_positive(name: str, value: int) -> int:
    """Return a checked number as an int of Python's: products of numpy's would overflow.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} should be an integer, but got {name}={value!r}")
    if value < 1:
        raise ValueError(f"{name} should be positive, but got {name}={value}")
    return index(value)


def check_lengths(lengths: npt.ArrayLike, of: str) -> npt.NDArray[np.integer]:
    """Return lengths as an array of integers with one axis. `of`: the name of an object that has a length.

    Raises:
        TypeError: they are not integers.
        ValueError: they have more than one axis.
    """
    given = np.asarray(lengths)
    if given.ndim != 1:
        raise ValueError(f"lengths should have one axis, one length a {of}, but got shape {given.shape}")
    if not given.size:
        return np.zeros(0, np.uint8)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"lengths should be integers, but got {given.dtype}")
    return given


def checksum(*arrays: npt.ArrayLike | None) -> str:
    """Return 16 hexadecimal digits that stand for arrays in a loader's state."""
    total = blake2b(digest_size=8)
    for array in arrays:
        given = np.asarray(() if array is None else array)
        total.update(f"{given.dtype.str}{given.shape}".encode())
        total.update(np.ascontiguousarray(given).data)
    return total.hexdigest()
