"""Writes TFRecords: raw records, or tf.train.Example messages. Pure.

Data path: samples -> [tfrecord_writer] -> parts -> shard.

A sample whose one field is ``record`` is that record. Any other becomes a tf.train.Example, its fields the features.
`tfrecord` reads both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from numbers import Integral, Real
from struct import pack
from typing import Any

import numpy as np

from asyncloader.formats.encoder import RESERVED, BadSample, RecordEncoder, bytes_of_value, check_names, to_floats
from asyncloader.formats.tfrecord import fast_crc32c, mask_crc


class TFRecordEncoder(RecordEncoder):
    """Encodes each sample as a record.

    Features of an Example: bytes or text, one or a list of them; integers (64 bits) and booleans; floats, which become
    32 bits wide: one, a list, or an array of one dimension.

    Raises:
        ImportError: google_crc32c, which computes the checksums, is not installed.
    """

    def __init__(self) -> None:
        _ = self._crc32c

    def __getstate__(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _crc32c(self) -> Callable[[bytes], int]:
        if (function := fast_crc32c()) is None:
            raise ImportError("TFRecords are written with google-crc32c: pip install 'asyncloader[shards]'")
        return function

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's record, like `RecordEncoder.encode_sample`."""
        fields = {name: value for name, value in sample.items() if name not in RESERVED}
        data = bytes_of_value("record", fields["record"]) if fields.keys() == {"record"} else encode_example(fields)
        length = pack("<Q", len(data))
        return [length, self._checksum(length), data, self._checksum(data)]

    def _checksum(self, data: bytes) -> bytes:
        return pack("<I", mask_crc(self._crc32c(data)))


def encode_example(fields: Mapping[str, Any]) -> bytes:
    """Return a tf.train.Example with these features, ordered by name.

    Raises:
        BadSample: a value is of no type that an Example has.
    """
    features: list[bytes] = []
    check_names(fields)
    for name in sorted(fields):
        try:
            encoded = name.encode()
        except UnicodeEncodeError as error:
            raise BadSample(f"the name of its field {name!r} cannot be UTF-8: {error}") from None
        features.append(message(1, message(1, encoded) + message(2, encode_feature(name, fields[name]))))
    return message(1, b"".join(features))


def encode_feature(name: str, value: Any) -> bytes:
    """Return a feature: a list of bytes (1), of 32-bit floats (2) or of 64-bit integers (3).

    Raises:
        BadSample: the value is of none of these types.
    """
    if isinstance(value, np.ndarray):
        if value.ndim > 1:
            raise BadSample(f"its field {name!r} has {value.ndim} dimensions; a feature has one: flatten it")
        items: list[Any] = value.reshape(-1).tolist()
        if not items and value.dtype.kind == "f":
            return message(2, b"")
    else:
        some: Any = value if isinstance(value, list | tuple) else [value]
        items = list(some)
        if not items:
            return message(1, b"")  # as an empty list of bytes is read
    if items and all(isinstance(each, str | bytes | bytearray | memoryview) for each in items):
        return message(1, b"".join(message(1, _bytes(name, each)) for each in items))
    if all(isinstance(each, Integral | np.bool_) for each in items):
        numbers = [int(each) for each in items]
        if any(not -(1 << 63) <= each < 1 << 63 for each in numbers):
            raise BadSample(f"its field {name!r} has an integer of more than 64 bits")
        return message(3, message(1, b"".join(varint(each & (1 << 64) - 1) for each in numbers)) if numbers else b"")
    if all(isinstance(each, Real) for each in items):
        try:
            return message(2, message(1, to_floats(items, "<f4").tobytes()))
        except (ValueError, OverflowError) as error:
            raise BadSample(f"its field {name!r} does not fit floats of 32 bits: {error}") from None
    raise BadSample(f"its field {name!r} is a {type(value).__name__} that is neither bytes, text, integers nor floats")


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        return bytes_of_value(name, value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadSample(f"its field {name!r} is a text that UTF-8 cannot hold: {error}") from None


def message(number: int, data: bytes) -> bytes:
    """Return field `number` of a message with a value of bytes."""
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """Encode a number that is not negative."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
