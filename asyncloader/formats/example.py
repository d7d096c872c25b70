"""tf.train.Example without TensorFlow: a bounded parser of the few protobuf messages that it is made of. Pure.

    Example  { Features features = 1 }             Feature   { oneof: BytesList 1, FloatList 2, Int64List 3 }
    Features { map<string, Feature> feature = 1 }  BytesList { repeated bytes value = 1 }; numbers are packed or not

Source: tensorflow/core/example/{example,feature}.proto and the protobuf encoding guide. Merged as protobuf merges: of a
repeated map key or a repeated choice the last one counts, repeated messages of the same choice are joined, and unknown
fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Feature", "parse_example"]

Feature: TypeAlias = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def parse_example(data: bytes) -> dict[str, Feature]:
    """The features of a serialized tf.train.Example.

    Returns:
        By name: a list of bytes, a float32 array or an int64 array, each of one dimension (arrays are private and
        writable). A feature without a value is an empty list.

    Raises:
        ValueError: not a valid message: truncated, a length that leads outside, a number too long, a name not UTF-8.
    """
    found: dict[str, Feature] = {}
    for number, wire, features in fields(memoryview(data)):
        if (number, wire) != (1, BYTES):
            continue
        for number_, wire_, entry in fields(features):
            if (number_, wire_) == (1, BYTES):
                name, value = _entry(entry)
                found[name] = value
    return found


def _entry(entry: memoryview) -> tuple[str, Feature]:
    """A map entry: the name is field 1, the feature field 2."""
    name, pieces = "", list[memoryview]()
    for number, wire, value in fields(entry):
        if (number, wire) == (1, BYTES):
            name = bytes(value).decode()  # UnicodeDecodeError is a ValueError
        elif (number, wire) == (2, BYTES):
            pieces.append(value)
    kind, lists = 0, list[memoryview]()
    for piece in pieces:
        for number, wire, value in fields(piece):
            if wire == BYTES and number in (1, 2, 3):
                if number != kind:
                    kind, lists = number, []
                lists.append(value)
    if kind == 2:
        return name, _joined([part for each in lists for part in _floats(each)], np.dtype(np.float32))
    if kind == 3:
        return name, _joined([part for each in lists for part in _integers(each)], np.dtype(np.int64))
    return name, [bytes(item) for each in lists for number, wire, item in fields(each) if (number, wire) == (1, BYTES)]


def _joined(parts: list[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)


def _floats(message: memoryview) -> Iterator[npt.NDArray[Any]]:
    for number, wire, value in fields(message):
        if number == 1 and wire in (BYTES, FIXED32):
            if len(value) % 4:
                raise ValueError(f"{len(value)} bytes of packed floats; a float has 4")
            yield np.frombuffer(value, "<f4")


def _integers(message: memoryview) -> Iterator[npt.NDArray[Any]]:
    for number, wire, value in fields(message):
        if number == 1 and wire in (BYTES, VARINT):
            yield varints(value)


def varints(data: memoryview) -> npt.NDArray[np.int64]:
    """Decode varints that lie side by side, as 64-bit two's complement."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):  # each in one byte
        return raw.astype(np.int64)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise ValueError("packed integers end inside a varint")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > 10:
        raise ValueError(f"a varint of {longest} bytes; 10 are allowed")
    values = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        here = np.flatnonzero(sizes > place)
        values[here] |= (raw[starts[here] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)


def fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The fields of a message: number, wire type, and the value's bytes (of a varint: itself)."""
    pos, size = 0, len(message)
    while pos < size:
        tag, pos = _varint(message, pos)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise ValueError(f"the impossible field number {number}")
        if wire == BYTES:
            length, begin = _varint(message, pos)
        elif wire == VARINT:
            begin, length = pos, _varint(message, pos)[1] - pos
        elif wire in (FIXED64, FIXED32):
            begin, length = pos, 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"field {number} has wire type {wire}, which no Example has")
        pos = begin + length
        if pos > size:
            raise ValueError(f"field {number} claims {length:,} bytes; {size - begin:,} are left")
        yield number, wire, message[begin:pos]


def _varint(message: memoryview, pos: int) -> tuple[int, int]:
    """The varint at `pos`, and the position after it."""
    value = shift = 0
    for byte in message[pos : pos + 10]:
        value |= (byte & 0x7F) << shift
        pos += 1
        shift += 7
        if byte < 0x80:
            return value, pos
    raise ValueError("a varint that is truncated or longer than 10 bytes")
