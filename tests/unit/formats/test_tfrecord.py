"""TFRecord: lengths are verified, and Examples are parsed as by protobuf."""

from __future__ import annotations

import functools
import importlib
import struct
import sys
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import ShardError, TFRecordReader, parse_example
from asyncloader.formats.tfrecord import crc32c
from tests.drawn import scaled
from tests.unit.formats.shard_readers import (
    NAME,
    URL,
    check_resume,
    corrupted,
    error_of,
    plain,
    samples_of,
)


def reference_crc32c(data: bytes) -> int:
    """Computed bit by bit, by the definition; the reader has a table."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def mask(crc: int) -> bytes:
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + mask(reference_crc32c(length)) + data + mask(reference_crc32c(data))


def make(start: int = 0) -> TFRecordReader:
    return TFRecordReader(URL, start=start)


SMALL = record(b"first") + record(b"") + record(b"third" * 50)


def test_checksum_of_the_standard() -> None:
    """The check value of CRC-32C, and agreement with the definition."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert all(crc32c(bytes(range(n))) == reference_crc32c(bytes(range(n))) for n in range(40))


def test_a_known_record() -> None:
    """The record has the bytes that TensorFlow writes for an empty record."""
    assert record(b"") == bytes.fromhex("0000000000000000 29039807 d8ea82a2")
    assert samples_of(make(), record(b"")) == [{"record": b"", "__key__": f"{NAME}:0", "__url__": URL}]


def test_records_are_samples() -> None:
    """The key is the shard's name and the record's offset; each resume offset works."""
    samples = samples_of(make(), SMALL)
    assert [sample["record"] for sample in samples] == [b"first", b"", b"third" * 50]
    assert [sample["__key__"] for sample in samples] == [f"{NAME}:{at}" for at in (0, 21, 37)]
    check_resume(make, SMALL)
    assert samples_of(TFRecordReader(URL, start=21, stop=37), SMALL) == samples[1:2]


@pytest.mark.parametrize("end", [1, 12, 20, 22, len(SMALL) - 1])
def test_truncated(end: int) -> None:
    """A shard may end only between records."""
    text, offset = error_of(make, SMALL[:end])
    assert "truncated" in text
    assert offset == end


def test_a_lying_length() -> None:
    """A wrong checksum of a length is an error at once; a huge length with a right checksum exceeds the limit."""
    assert "checksum of its length" in error_of(make, b"\xff" + SMALL[1:])[0]
    length = struct.pack("<Q", 1 << 62)
    text, offset = error_of(make, record(b"a") + length + mask(reference_crc32c(length)) + b"x" * 100)
    assert "max_sample_bytes" in text
    assert offset == 17


def test_damaged_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checksum damage is detected, and may be skipped; without one only lengths are verified."""
    data = SMALL.replace(b"first", b"fir5t")
    assert error_of(make, data) == (f"a damaged TFRecord: the checksum of its data is wrong ({URL} at byte 0)", 0)
    told: list[ShardError] = []
    assert len(samples_of(TFRecordReader(URL, on_bad=told.append), data)) == 2
    assert [bad.offset for bad in told] == [0]
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert len(samples_of(make(), data)) == 3


# ------------------------------------------------------------------------------------------------- tf.train.Example


@functools.cache
def example_class(packed: bool = True) -> Any:
    """tf.train.Example, declared through Google's protobuf package from the published .proto files."""
    names = ("descriptor_pb2", "descriptor_pool", "message_factory")
    descriptor_pb2, descriptor_pool, message_factory = (
        cast("Any", importlib.import_module(f"google.protobuf.{name}")) for name in names
    )

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        declared = file.message_type.add(name=name)
        for name_, number, label, kind, type_name in fields:
            added = declared.field.add(name=name_, number=number, label=label, type=kind, type_name=type_name or None)
            if label == field.LABEL_REPEATED and kind in (field.TYPE_FLOAT, field.TYPE_INT64):
                added.options.packed = packed
        return declared

    many, one, sub = field.LABEL_REPEATED, field.LABEL_OPTIONAL, field.TYPE_MESSAGE
    message("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    kinds = ("bytes_list", "float_list", "int64_list")
    types = (".tf.BytesList", ".tf.FloatList", ".tf.Int64List")
    feature = message("Feature", *((k, n, one, sub, t) for n, (k, t) in enumerate(zip(kinds, types, strict=True), 1)))
    feature.oneof_decl.add(name="kind")
    for each in feature.field:
        each.oneof_index = 0
    features = message("Features", ("feature", 1, many, sub, ".tf.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=sub, type_name=".tf.Feature")
    message("Example", ("features", 1, one, sub, ".tf.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def as_ours(message: Any) -> dict[str, Any]:
    """Protobuf's own parse, in our types."""
    out: dict[str, Any] = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        value = list(getattr(feature, kind).value) if kind else []
        dtype = {"float_list": np.float32, "int64_list": np.int64}.get(kind)
        out[name] = value if dtype is None else np.array(value, dtype)
    return out


features = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=9), max_size=4)),
        st.tuples(st.just("float_list"), st.lists(st.floats(width=32, allow_nan=False), max_size=6)),
        st.tuples(st.just("int64_list"), st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), max_size=9)),
    ),
    max_size=4,
)


def serialized(content: dict[str, tuple[str, list[Any]]], packed: bool = True) -> bytes:
    message = example_class(packed)()
    for name, (kind, values) in content.items():
        feature = getattr(message.features.feature[name], kind)
        feature.SetInParent()
        feature.value.extend(values)
    return bytes(message.SerializeToString())


@given(content=features, packed=st.booleans())
@settings(deadline=None, max_examples=scaled(60))
def test_examples_of_protobuf(content: dict[str, tuple[str, list[Any]]], packed: bool) -> None:
    """Messages that Google's protobuf writes, packed or not, are read with names, types and values; arrays can become
    tensors without a warning or a copy.
    """
    data = serialized(content, packed)
    found = parse_example(data)
    assert plain(found) == plain(as_ours(example_class().FromString(data)))
    assert all(isinstance(value, list) or value.flags.writeable for value in found.values())


GOOD: dict[str, tuple[str, list[Any]]] = {
    "img": ("bytes_list", [b"jpeg"]),
    "box": ("float_list", [0.5, 1.5]),
    "n": ("int64_list", [1, -1, 300]),
}


@given(message=corrupted(serialized(GOOD)))
@settings(deadline=None, max_examples=scaled(100))
def test_damaged_examples(message: bytes) -> None:
    """Features, or a ValueError; where both protobuf and we read a damaged message, no feature is lost."""
    with suppress(ValueError):
        found = parse_example(message)
        try:
            theirs = as_ours(example_class().FromString(message))
        except Exception:  # its DecodeError, which has another name in each backend
            return
        # Google's C backend drops a map entry that has unknown fields beside name and feature; its guide skips them.
        assert theirs.keys() <= found.keys()


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no length
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x",  # a length of 2**64 - 1
        b"\x0a\x05ab",  # longer than the message
        b"\xff" * 11,  # a tag too long
        b"\x0b",  # a group
        b"\x02\x00",  # field number 0
        b"\x0a\x05\x0a\x03\x0a\x01\xff",  # a name that is not UTF-8
        b"\x0a\x0a\x0a\x08\x12\x06\x12\x04\x0a\x02\x00\x00",  # two bytes of packed floats
        b"\x0a\x09\x0a\x07\x12\x05\x1a\x03\x0a\x01\x80",  # a packed integer without its end
        b"\x0a\x13\x0a\x11\x12\x0f\x1a\x0d\x0a\x0b" + b"\x80" * 10 + b"\x01",  # a varint of 11 bytes
    ],
)
def test_no_example(data: bytes) -> None:
    """Each bound is checked."""
    with pytest.raises(ValueError, match=r"."):
        parse_example(data)


def test_repeated_choices_merge_as_in_protobuf() -> None:
    """Of different kinds in one feature the last counts, lists of one kind are joined, as in protobuf."""

    def tagged(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    ones, twos, text = (tagged(n, tagged(1, data)) for n, data in ((3, b"\1\1"), (3, b"\2"), (1, b"x")))
    cases = [
        ones + twos,
        text + ones,
        ones + text,
        ones + text + twos,
        b"",
        tagged(2, b"") + twos,
        twos + tagged(2, b""),
    ]
    cases += [tagged(9, b"unknown") + ones, b"\x4d\1\2\3\4" + text, b"\x49" + bytes(8) + text, b"\x48\x85\1" + text]
    for feature in cases:
        message = tagged(1, tagged(1, tagged(1, b"name") + tagged(2, feature)))
        assert plain(parse_example(message)) == plain(as_ours(example_class().FromString(message)))
        twice = message + tagged(1, tagged(1, tagged(1, b"name") + tagged(2, ones)))
        assert plain(parse_example(twice)) == plain(as_ours(example_class().FromString(twice)))
