"""Reads and writes TFRecord shards: one sample per record; and tf.train.Example messages. Pure.

Data path: transport -> chunks -> [tfrecord] -> samples; samples -> [tfrecord: `TFRecordEncoder`] -> parts -> shard.

*Records.* A record is its length (8 bytes, little-endian), the length's masked CRC-32C (4), the data, and the data's
masked CRC-32C (4). There is no mark between records, so a shard cannot be cut without an index. Sources: TensorFlow's
`tfrecord` tutorial and the comment in `record_writer.h`.

*Examples* are parsed without TensorFlow, by a bounded parser of their few protobuf messages:

    Example  { Features features = 1 }             Feature   { oneof: BytesList 1, FloatList 2, Int64List 3 }
    Features { map<string, Feature> feature = 1 }  BytesList { repeated bytes value = 1 }; numbers are packed or not

Messages are merged by protobuf's rules: of a repeated map key or a repeated oneof the last value counts, repeated
messages of the same oneof field are joined, and unknown fields are skipped. Sources:
tensorflow/core/example/{example,feature}.proto and the protobuf encoding guide.

*CRC-32C* is computed in Python for the eight bytes of a length, and by google_crc32c for whole records. Source: RFC
3720 appendix B.4 (Castagnoli's polynomial, reflected 0x82F63B78); the mask is TFRecord's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from struct import Struct, pack
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncloader.formats.base import Parser, PushReader, ReadWhole, Sample, SampleSlices, base_name
from asyncloader.formats.encoder import RESERVED, BadSample, RecordEncoder, bytes_of_value

Feature: TypeAlias = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_RECORD = Struct("<QI")
_CRC = Struct("<I")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return the features of a serialized tf.train.Example.

    Returns:
        By name: a list of bytes, a float32 array or an int64 array, with one dimension (arrays are private and
            writable). A feature without a value is an empty list.

    Raises:
        ValueError: the message is truncated, or has an impossible length, a number that is too long, or a name that is
            not UTF-8.
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
    """Parse a map entry: the name is field 1, the feature field 2."""
    name, features = "", list[memoryview]()
    for number, wire, value in fields(entry):
        if (number, wire) == (1, BYTES):
            name = bytes(value).decode()  # UnicodeDecodeError is a ValueError
        elif (number, wire) == (2, BYTES):
            features.append(value)
    kind, lists = 0, list[memoryview]()
    for feature in features:
        for number, wire, value in fields(feature):
            if wire == BYTES and number in (1, 2, 3):
                # Another field of the oneof replaces the value; the same field extends it.
                if number != kind:
                    kind, lists = number, []
                lists.append(value)
    number_wire = FIXED32 if kind == 2 else VARINT
    values = [
        value
        for each in lists
        for number, wire, value in fields(each)
        if number == 1 and (wire == BYTES or (wire == number_wire and kind > 1))
    ]
    if kind < 2:
        return name, [bytes(value) for value in values]
    if kind == 3:
        return name, np.concatenate([np.empty(0, np.int64), *map(varints, values)])
    if any(len(value) % 4 for value in values):
        raise ValueError("packed floats whose bytes are no multiple of 4")
    return name, np.frombuffer(b"".join(values), "<f4").astype(np.float32)


def varints(data: memoryview) -> npt.NDArray[np.int64]:
    """Decode concatenated varints to 64-bit two's complement numbers."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):  # all of them have one byte
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
    # Byte `index` of all varints at once: at most ten steps, whatever their number.
    for index in range(longest):
        here = np.flatnonzero(sizes > index)
        values[here] |= (raw[starts[here] + index] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * index)
    return values.view(np.int64)


def fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Iterate over the fields of a message: number, wire type, and the value's bytes (of a varint: its bytes)."""
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
    """Return the varint at `pos`, and the position after it."""
    value = shift = 0
    for byte in message[pos : pos + 10]:
        value |= (byte & 0x7F) << shift
        pos += 1
        shift += 7
        if byte < 0x80:
            return value, pos
    raise ValueError("a varint that is truncated or longer than 10 bytes")


class TFRecordReader(PushReader):
    """Reads TFRecords. The one field of a sample is ``record``, the raw bytes, which `parse_example` may parse; its key
    is the shard's name and the record's offset.

    The checksum of each length is always verified before the length is used. Records that `on_bad` can skip: a wrong
    checksum of the data.

    The data's checksum is verified by google_crc32c; if that is not installed, the data is **not verified**, because
    Python alone would take 100 times as long as the rest. Its arguments are those of `base.Reader`.
    """

    def _parse(self) -> Parser:
        checksum = fast_crc32c()
        while self._left and (self._stop is None or self._at < self._stop):
            at = self._at
            # The shard may end before a record, and nowhere else.
            self._may_end = True
            head = yield 12
            self._may_end = False
            length, stated = _RECORD.unpack(head)
            # Verified before the length is used: a wrong length would be requested, or skipped, as bytes.
            if stated != mask_crc(crc32c(head[:8])):
                self._fail("not a TFRecord: the checksum of its length is wrong", at)
            self._check_size(length, at)
            if self._skip:
                yield -(length + 4)
                self._skip -= 1
                continue
            data = yield length
            (stated,) = _CRC.unpack((yield 4))
            if checksum is not None and stated != mask_crc(checksum(data)):
                self._bad("a damaged TFRecord: the checksum of its data is wrong", at, self._at)
                continue
            self._give({"record": data}, at, self._at)


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
    """Return the checksum of a few bytes: about 10 MB per second."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def fast_crc32c() -> Callable[[bytes], int] | None:
    """Return the checksum function of google_crc32c (gigabytes per second); None if it is not installed."""
    try:
        module: Any = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    function: Callable[[bytes], int] = module.value
    return function


def mask_crc(crc: int) -> int:
    """Return the form in which TFRecord stores `crc`: rotated right by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecords(url: str) -> ReadWhole:
    """Return the function that reads samples like a `TFRecordReader`."""
    name, checksum = base_name(url), fast_crc32c()
    of_length = crc32c if checksum is None else checksum

    def read(source: SampleSlices, at: int, end: int, start: int) -> Sample | None:
        if end - at < 16:
            return None
        length, stated = _RECORD.unpack(source[at : at + _RECORD.size])
        if length != end - at - 16 or stated != mask_crc(of_length(source[at : at + 8])):
            return None
        data = source[at + 12 : end - 4]
        if checksum is not None and _CRC.unpack(source[end - 4 : end])[0] != mask_crc(checksum(data)):
            return None
        return {"record": data, "__key__": f"{name}:{start}", "__url__": url}

    return read


class TFRecordEncoder(RecordEncoder):
    """Encodes each sample, whose one field is ``record``, as a record of these bytes.

    Raises:
        ImportError: google_crc32c, which computes the checksums, is not installed.
    """

    def __init__(self) -> None:
        if (function := fast_crc32c()) is None:
            raise ImportError("TFRecords are written with google-crc32c: pip install 'asyncloader[shards]'")
        self._crc32c = function

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's record, like `RecordEncoder.encode_sample`."""
        if sample.keys() - RESERVED != {"record"}:
            raise BadSample(
                "a TFRecord holds one field, 'record': make it the bytes of the sample, such as those of a serialized "
                "tf.train.Example"
            )
        data = bytes_of_value("record", sample["record"])
        length = pack("<Q", len(data))
        return [length, self._checksum(length), data, self._checksum(data)]

    def _checksum(self, data: bytes) -> bytes:
        return pack("<I", mask_crc(self._crc32c(data)))
