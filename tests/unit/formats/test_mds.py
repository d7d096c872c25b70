"""MDS: MosaicML's shards, with an untrusted index. `mds_writer` names the source of the layout."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

from asyncloader.formats import MdsReader, MdsShard, ShardError, open_reader, parse_mds_index
from asyncloader.formats.mds import mds_encoding
from tests.drawn import scaled
from tests.unit.formats.mds_writer import CODES, encode, shard_entry, write_index, write_shard
from tests.unit.formats.shard_readers import (
    NAME,
    URL,
    check_resume,
    corrupted,
    error_of,
    plain,
    read,
    samples_of,
)

COLUMNS = {
    "image": "jpeg:90",
    "label": "int",
    "name": "str",
    "box": "ndarray:float32:2,2",
    "mask": "ndarray",
    "w": "float64",
}


def sample(n: int) -> dict[str, Any]:
    return {
        "image": bytes([n]) * n,
        "label": -n,
        "name": "é" * n,
        "box": ("float32", (2, 2), [n, 0.5, 1, 2]),
        "mask": ("uint16", (n + 1, 2), [n] * (2 * n + 2)),
        "w": n / 4,
    }


def index_of(columns: dict[str, str], count: int, data: bytes) -> MdsShard:
    (shard,) = parse_mds_index(write_index(shard_entry(columns, count, len(data))))
    return shard


DATA = write_shard(COLUMNS, [sample(n) for n in range(7)])
SHARD = index_of(COLUMNS, 7, DATA)


def make(start: int = 0) -> MdsReader:
    return MdsReader(URL, SHARD, start=start)


def test_the_layout_by_hand() -> None:
    """A shard of one column and two samples, written out byte by byte."""
    columns = {"a": "str"}
    data = struct.pack("<IIII", 2, 18, 24, 28) + b"{}" + struct.pack("<I", 2) + b"hi" + struct.pack("<I", 0)
    reader = MdsReader(URL, index_of(columns, 2, data))
    assert samples_of(reader, data) == [
        {"a": "hi", "__key__": f"{NAME}:18", "__url__": URL},
        {"a": "", "__key__": f"{NAME}:24", "__url__": URL},
    ]


def test_samples_by_their_encodings() -> None:
    """Types and values of each column are read back; arrays are private and writable."""
    samples = samples_of(make(), DATA)
    assert len(samples) == 7
    found = samples[3]
    assert found["image"] == b"\3\3\3"
    assert (found["label"], found["name"], found["w"]) == (-3, "ééé", 0.75)
    assert type(found["label"]) is int
    assert found["w"].dtype == np.float64
    np.testing.assert_array_equal(found["box"], np.array([[3, 0.5], [1, 2]], np.float32))
    assert plain(found["mask"]) == plain(np.full((4, 2), 3, np.uint16))
    assert found["mask"].flags.writeable
    check_resume(make, DATA)


@pytest.mark.parametrize("dtype", CODES)
def test_numbers(dtype: str) -> None:
    """Every numpy type is read as a scalar and in arrays, with and without type and shape in the encoding."""
    low, high = (-1.5, 2.5) if "float" in dtype else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    scalar = mds_encoding(dtype)
    assert scalar.size == np.dtype(dtype).itemsize
    assert plain(scalar.decode(encode(dtype, high))) == plain(np.dtype(dtype).type(high))
    array = np.array([[low, high, 1]], dtype)
    for text in ("ndarray", f"ndarray:{dtype}", f"ndarray:{dtype}:1,3"):
        decoded = mds_encoding(text).decode(encode(text, (dtype, (1, 3), [low, high, 1])))
        assert plain(decoded) == plain(array)


def test_texts() -> None:
    """Numbers of any size as text, and JSON, are decoded."""
    assert mds_encoding("str_int").decode(b"-12345678901234567890") == -12345678901234567890
    assert mds_encoding("str_float").decode(b"0.1") == 0.1
    assert mds_encoding("str_decimal").decode(b"0.10") == Decimal("0.10")
    assert mds_encoding("json").decode(b'{"a": [1]}') == {"a": [1]}


def test_pickles_are_refused_by_the_index() -> None:
    """A pkl column is an error before any shard is read."""
    with pytest.raises(ShardError, match=r"column 'x': encoding 'pkl' is a pickle") as caught:
        parse_mds_index(write_index(shard_entry({"x": "pkl"}, 1, 100)), url=URL)
    assert caught.value.url == URL


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change that overwrites one place of an index."""

    def change(index: dict[str, Any]) -> None:
        place: Any = index
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


S = ("shards", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("version", value=3), "version"),
        (at("shards", value={}), "no list"),
        (at(*S, "format", value="json"), "format"),
        (at(*S, "samples", value=-1), "'samples'"),
        (at(*S, "samples", value=10**9), "too small"),
        (at(*S, "raw_data", "bytes", value=1e9), "'bytes'"),
        (at(*S, "raw_data", "basename", value="/etc/passwd"), "plain path"),
        (at(*S, "raw_data", "basename", value="a/../../b"), "plain path"),
        (at(*S, "raw_data", "basename", value="http://evil/x"), "plain path"),
        (at(*S, "compression", value="br"), "zstd and gz"),
        (at(*S, "column_names", value=[]), "differ in length"),
        (at(*S, "column_names", 0, value="__key__"), "__key__"),
        (at(*S, "column_names", 0, value="w"), "repeat"),
        (at(*S, "column_encodings", 0, value="ndarray:object"), "dtype"),
        (at(*S, "column_encodings", 0, value="ndarray:int8:" + "1," * 99), "shape"),
        (at(*S, "column_encodings", 0, value="int:8"), "options"),
        (at(*S, "column_encodings", 0, value="eval"), "unknown"),
        (at(*S, "column_sizes", 0, value=12), "size"),
    ],
)
def test_hostile_index(change: Callable[[dict[str, Any]], None], message: str) -> None:
    """Each wrong value is an error that names it and the index."""
    with pytest.raises(ShardError, match=message):
        parse_mds_index(write_index(shard_entry(COLUMNS, 7, len(DATA)), change=change), url=URL)


@given(data=corrupted(write_index(shard_entry(COLUMNS, 7, len(DATA)))))
@example(data=b"[" * 100_000)
@example(data=b"\xff")
@example(data=b"null")
@settings(deadline=None, max_examples=scaled(200))
def test_random_damage_of_the_index(data: bytes) -> None:
    """Damaged bytes, and no JSON, give shards or a `ShardError`, and no other exception."""
    try:
        assert all(isinstance(shard, MdsShard) for shard in parse_mds_index(data, url=URL))
    except ShardError as error:
        place = error.url
    else:
        place = URL
    assert place == URL


def patched(place: int, value: int) -> bytes:
    return DATA[:place] + struct.pack("<I", value) + DATA[place + 4 :]


FIRST = struct.unpack_from("<I", DATA, 4)[0]


@pytest.mark.parametrize(
    ("data", "message", "offset"),
    [
        (patched(0, 8), "its index says 7", 0),
        (patched(4, 8), "offsets", 4),  # into the table
        (patched(4 + 4 * 7, len(DATA) + 1), "offsets", 4),  # behind the end
        (patched(FIRST, 2**32 - 1), "max_sample_bytes", FIRST),
        (patched(FIRST, 2**29), "ends after its shard", FIRST),
        (DATA[:-1], "truncated", len(DATA) - 1),
        (DATA.replace("ééé".encode(), b"\xff" * 6, 1), "column 'name'", None),
    ],
)
def test_hostile_shards(data: bytes, message: str, offset: int | None) -> None:
    """Each wrong number is an error with its offset, and nothing of the claimed size is allocated."""
    text, place = error_of(make, data)
    assert message in text
    assert offset in (None, place)


def test_a_sample_that_swallows_the_next() -> None:
    """A wrong size of a sample is found by the table of offsets, or by the end of the range that is read."""
    columns = {"raw": "bytes"}
    data = bytearray(write_shard(columns, [{"raw": b"abcd"}] * 4))
    shard = index_of(columns, 4, bytes(data))
    offsets = shard.offsets(bytes(data[: shard.header_size])).tolist()
    for number in (1, 2):
        data[offsets[number] : offsets[number] + 4] = struct.pack("<I", 12)
    whole, error = read(lambda start: MdsReader(URL, shard, start=start), bytes(data))
    assert [resume for _, resume in whole] == offsets[1:2]
    assert error is not None
    assert ("table of offsets" in error[0], error[1]) == (True, offsets[1])
    _, error = read(lambda start: MdsReader(URL, shard, start=start, stop=offsets[3]), bytes(data), start=offsets[2])
    assert error is not None
    assert ("or its range" in error[0], error[1]) == (True, offsets[2])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x07",  # an unknown dtype
        bytes([8, 63 << 2 | 3]) + b"\xff" * 100,  # a shape cut off
        bytes([8, 2 << 2 | 3]) + b"\xff" * 16,  # 2**128 elements
        bytes([8, 1 << 2, 3]) + b"abcd",  # a value too many
        bytes([8, 2 << 2 | 3]) + bytes(8) + b"\xff" * 8,  # no elements, but an impossible dimension
    ],
)
def test_hostile_arrays(data: bytes) -> None:
    """The claimed shape is compared with the number of bytes before an array is made."""
    with pytest.raises((ValueError, ArithmeticError)):
        mds_encoding("ndarray").decode(data)


def test_a_bad_value_can_be_stepped_over() -> None:
    """The end of its sample is known, so the other samples are given."""
    data = DATA.replace("ééé".encode(), b"\xff" * 6, 1)
    told: list[ShardError] = []
    reader = MdsReader(URL, SHARD, on_bad=told.append)
    assert [s["label"] for s in samples_of(reader, data)] == [0, -1, -2, -4, -5, -6]
    assert len(told) == 1
    assert told[0].offset == struct.unpack_from("<I", DATA, 4 + 4 * 3)[0]


def test_max_sample_bytes() -> None:
    """The limit bounds a sample with its sizes, and the table of offsets."""
    largest = len(DATA) - struct.unpack_from("<I", DATA, 4 + 4 * 6)[0]
    assert len(samples_of(MdsReader(URL, SHARD, max_sample_bytes=largest), DATA)) == 7
    assert "max_sample_bytes" in error_of(lambda _: MdsReader(URL, SHARD, max_sample_bytes=largest - 1), DATA)[0]
    assert error_of(lambda _: MdsReader(URL, SHARD, max_sample_bytes=31), DATA)[1] == 0


def test_compressed_shards() -> None:
    """The index has the name and size of the stored object; inside the compression the reader is the same."""
    entry = shard_entry(COLUMNS, 7, len(DATA), compression="gz:9")
    (shard,) = parse_mds_index(write_index(entry))
    assert (shard.path, shard.compression, shard.stored_size, shard.size) == (
        "shard.00000.mds.zstd",
        "gzip",
        17,
        len(DATA),
    )
    reader = open_reader(URL.replace(".ext", ".mds"), shard=shard)
    assert len(samples_of(reader, gzip.compress(DATA))) == 7
    entry["compression"] = "zstd:7"
    assert parse_mds_index(write_index(entry))[0].compression == "zstd"
