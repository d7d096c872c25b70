"""How MDS writes a column's values, as decoders by the name that the index gives. Pure; nothing is ever unpickled.

    bytes                    as they are; so are jpeg[:quality], jpegarray, png and pil, which `decode=` may decode
    str  str_int  str_float  str_decimal  json      UTF-8 text
    int  int8 ... int64  uint8 ... uint64  float16 ... float64       little-endian
    ndarray[:dtype[:shape]]  [dtype: 1, if not named] [ndim << 2 | log2 of the dims' size: 1, dims, if not named] values

Source: mosaicml/streaming, `streaming/base/format/mds/encodings.py`. `pkl` is refused: to unpickle what came over a
network is to run it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Encoding", "mds_encoding"]

Decode: TypeAlias = Callable[[bytes], Any]


class Encoding(NamedTuple):
    """How one column is written.

    Attributes:
        size: bytes of every value; None where values differ in size.
        decode: a value from its bytes; raises ValueError, ArithmeticError or RecursionError when they are none.
    """

    size: int | None
    decode: Decode


SCALARS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
RAW = frozenset(("bytes", "jpeg", "jpegarray", "png", "pil"))
DTYPE_OF_CODE = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
MAX_DIMS = 63


def mds_encoding(text: str) -> Encoding:
    """The encoding that the index names `text`.

    Raises:
        ValueError: it is unknown, malformed, or `pkl`.
    """
    name, colon, options = text.partition(":")
    if name == "ndarray":
        return _ndarray(options)
    if colon and name != "jpeg":
        raise ValueError(f"encoding {text!r} has options, and {name!r} takes none")
    if name in RAW:
        return Encoding(None, _raw)
    if name == "int":
        return Encoding(8, lambda data: int.from_bytes(data, "little", signed=True))
    if name in SCALARS:
        return _scalar(np.dtype(name).newbyteorder("<"))
    if name in TEXTS:
        return Encoding(None, TEXTS[name])
    if name == "pkl":
        raise ValueError(
            "encoding 'pkl' is a pickle, which runs code when it is read: write the column as bytes, json or ndarray"
        )
    raise ValueError(f"encoding {text[:80]!r} is unknown")


def _raw(data: bytes) -> bytes:
    return data


def _text(data: bytes) -> str:
    return data.decode()


TEXTS: dict[str, Decode] = {
    "str": _text,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": lambda data: json.loads(data.decode()),
}


def _scalar(dtype: np.dtype[Any]) -> Encoding:
    return Encoding(dtype.itemsize, lambda data: np.frombuffer(data, dtype)[0])


def _ndarray(options: str) -> Encoding:
    name, _, dims = options.partition(":")
    if name and name not in SCALARS:
        raise ValueError(f"encoding ndarray has the unknown dtype {name[:80]!r}")
    dtype = np.dtype(name).newbyteorder("<") if name else None
    shape: tuple[int, ...] | None = None
    if dims:
        parts = dims.split(",", MAX_DIMS)
        if len(parts) > MAX_DIMS or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
            raise ValueError(f"encoding ndarray has the impossible shape {dims[:80]!r}")
        shape = tuple(int(part) for part in parts)
        if 0 in shape:
            raise ValueError(f"encoding ndarray has the empty shape {dims[:80]!r}")
    size = dtype.itemsize * math.prod(shape) if dtype is not None and shape is not None else None
    return Encoding(size, lambda data: _array(data, dtype, shape))


def _array(data: bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    """A private, writable array; its claimed size is compared with `data` before anything is made of it."""
    pos = 0
    if dtype is None:
        code = data[0] if data else None
        if code not in DTYPE_OF_CODE:
            raise ValueError(f"an array of the unknown dtype {code}")
        dtype = np.dtype(DTYPE_OF_CODE[code]).newbyteorder("<")
        pos = 1
    if shape is None:
        if len(data) <= pos:
            raise ValueError("an array without a shape")
        ndim, width = data[pos] >> 2, 1 << (data[pos] & 3)
        pos += 1
        dims = data[pos : pos + ndim * width]
        if len(dims) < ndim * width:
            raise ValueError(f"an array of {ndim} dimensions, cut off inside its shape")
        shape = tuple(int.from_bytes(dims[at : at + width], "little") for at in range(0, len(dims), width))
        pos += len(dims)
    if math.prod(shape) * dtype.itemsize != len(data) - pos:
        raise ValueError(f"an array of shape {shape[:8]} and type {dtype.name} cannot have {len(data) - pos:,} bytes")
    return np.frombuffer(data, dtype, offset=pos).reshape(shape).copy()
