"""The writers: what they write is read again by this package's readers and by other packages, value for value."""

from __future__ import annotations

import io
import json
import math
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asyncloader.formats import (
    JsonlReader,
    MdsReader,
    Sample,
    ShardReader,
    TarReader,
    TFRecordReader,
    parse_mds_index,
)
from asyncloader.formats.compressed import compressor
from asyncloader.formats.encoder import BadSample, Part, ShardEncoder
from asyncloader.formats.jsonl import JsonlEncoder
from asyncloader.formats.mds_writer import MdsEncoder, MdsFile, mds_index
from asyncloader.formats.parquet import parse_footer
from asyncloader.formats.parquet_writer import ParquetEncoder
from asyncloader.formats.tar import TarEncoder
from asyncloader.formats.tfrecord import TFRecordEncoder
from tests.unit.formats.mds_writer import encode as mds_peer
from tests.unit.formats.test_parquet import read_rows

TEXT = st.text(st.characters(codec="utf-8"))
RAW = st.binary(max_size=1200)


def shard(encoder: ShardEncoder, samples: Sequence[Mapping[str, Any]], groups: int = 1) -> bytes:
    """The shard of these samples, which are encoded in `groups` groups by a pickled copy."""
    encoder = pickle.loads(pickle.dumps(encoder))
    parts: list[Part] = []
    for group in range(groups):
        some = samples[len(samples) * group // groups : len(samples) * (group + 1) // groups]
        encoded = encoder.encode(iter(some))
        assert encoded.failure is None, encoded.failure
        assert len(encoded.sizes) == len(some)
        # Cut at each sample: a part may be any of them.
        parts += [Part(encoded, at, at + 1) for at in range(len(some))]
    return b"".join(bytes(piece) for piece in encoder.assemble(parts))


def read(reader: ShardReader, data: bytes) -> list[Sample]:
    found = [*reader.feed(data), *reader.end()] if not reader.pending else []
    return [sample for sample, _ in found]


def fields(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in {"__key__", "__url__"}}


def same(found: Any, expected: Any) -> bool:
    """Equal, and of the same type; NaN is NaN."""
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected, equal_nan=expected.dtype.kind == "f")
    if isinstance(expected, float | np.floating) and math.isnan(expected):
        return math.isnan(found)
    return bool(found == expected)


def all_same(found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert fields(one).keys() == fields(other).keys()
        for name, value in fields(other).items():
            assert same(one[name], value), (name, one[name], value)


# ------------------------------------------------------------------------------------------------------------- tar

KEYS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="./\0"), min_size=1, max_size=130), min_size=1, max_size=3
).map("/".join)
FIELD = st.from_regex(r"[a-z0-9äß]{1,9}(\.[a-z0-9]{1,3})?", fullmatch=True)


def tar_samples() -> st.SearchStrategy[list[dict[str, Any]]]:
    one = st.builds(
        lambda key, fields: {"__key__": key, **fields},
        KEYS.filter(lambda key: not key.startswith("__")),
        st.dictionaries(FIELD, RAW, min_size=1, max_size=4),
    )
    return st.lists(one, max_size=6, unique_by=lambda sample: sample["__key__"])


@given(tar_samples(), st.integers(1, 3))
@example([{"__key__": "a/" + "ü" * 60, "jpg": b"", "x" * 99: b"1" * 512}], 1)
def test_tar_is_read_by_webdataset_tarfile_and_us(samples: list[dict[str, Any]], groups: int) -> None:
    """Names of any length and alphabet, empty and large values."""
    data = shard(TarEncoder(), samples, groups)
    ours = read(TarReader("a.tar"), data)
    assert [sample["__key__"] for sample in ours] == [sample["__key__"] for sample in samples]
    all_same(ours, samples)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        assert {(each.mtime, each.uid, each.gid, each.uname, each.mode) for each in members} <= {(0, 0, 0, "", 0o644)}
        found = {each.name: tar.extractfile(each).read() for each in members}  # type: ignore[union-attr]
    assert found == {f"{s['__key__']}.{name}": value for s in samples for name, value in fields(s).items()}
    files = webdataset.tariterators.tar_file_expander([{"url": "a", "stream": io.BytesIO(data)}])
    theirs = list(webdataset.tariterators.group_by_keys(files))
    assert [sample["__key__"] for sample in theirs] == [sample["__key__"] for sample in samples]
    all_same([{n: v for n, v in s.items() if n != "__local_path__"} for s in theirs], samples)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"a": b""}, "names begin, is None: give each sample a text"),
        ({"__key__": 3, "a": b""}, "names begin, is 3: give each sample a text"),
        ({"__key__": "a.b", "a": b""}, "has a dot"),
        ({"__key__": "__x__/a", "a": b""}, "which readers skip"),
        ({"__key__": "a\0", "a": b""}, "a NUL"),
        ({"__key__": "\ud800", "a": b""}, "UTF-8 cannot hold"),
        ({"__key__": "a"}, "it has no field"),
        ({"__key__": "a", "JPG": b""}, "under another name"),
        ({"__key__": "a", "x/y": b""}, "under another name"),
        ({"__key__": "a", "x": 3}, "its field 'x' is a int; encode it to bytes"),
        ({"__key__": "a", "x": "\ud800"}, "'x' is a text that UTF-8 cannot hold"),
        ({"__key__": "a", "json": {1, 2}}, "'json' cannot be JSON"),
        ({"__key__": "a", "json": [{1: 2, "1": 3}]}, "'json' cannot be JSON: its keys 1 and '1' are the same in JSON"),
        ([1], "it is a list"),
    ],
)
def test_tar_refuses(sample: Any, text: str) -> None:
    """A sample that would be read as another, or not at all."""
    encoded = TarEncoder().encode([{"__key__": "fine", "a": b"1"}, sample, {"__key__": "after", "a": b"1"}])
    assert len(encoded.sizes) == 1
    assert encoded.failure is not None
    assert encoded.failure.number == 1
    assert text in encoded.failure.text


def test_a_large_value_needs_a_pax_size() -> None:
    """8 GiB do not fit the header's digits; the reader takes the size from the pax header."""
    from asyncloader.formats.tar import header

    info = tarfile.TarInfo.frombuf(header("a.b", 8**11)[1024:], "utf-8", "strict")
    assert info.name == "a.b"
    assert b" size=8589934592\n" in header("a.b", 8**11)


# ------------------------------------------------------------------------------------------------------ JSON lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text().filter(lambda name: not name.startswith("__")), JSON, max_size=4), max_size=5),
    st.integers(1, 3),
)
def test_json_lines_are_read_by_json_and_us(samples: list[dict[str, Any]], groups: int) -> None:
    """Each kind of value that JSON has, half characters among them, one line each."""
    data = shard(JsonlEncoder(), [{**sample, "__key__": "dropped"} for sample in samples], groups)
    all_same(read(JsonlReader("a.jsonl"), data), samples)
    all_same([json.loads(line) for line in data.split(b"\n")[:-1]], samples)


@pytest.mark.parametrize("value", [math.nan, math.inf, b"raw", {1: {2}}, np.float32(1), [({"null": 1, None: 2},)]])
def test_json_lines_refuse(value: Any) -> None:
    """What JSON has no form for, or one form for two; the error names the field."""
    failure = JsonlEncoder().encode([{"fine": 1, "bad": value, "__key__": "k"}]).failure
    assert failure is not None
    assert failure[:2] == (0, "k")
    assert failure.text.startswith("its field 'bad' cannot be JSON")


# --------------------------------------------------------------------------------------------------------- TFRecord


@given(st.lists(RAW, max_size=4), st.integers(1, 3))
def test_records_are_read_again(records: list[bytes], groups: int) -> None:
    """Both checksums are right: the reader verifies them."""
    data = shard(TFRecordEncoder(), [{"record": record, "__key__": "x"} for record in records], groups)
    reader = TFRecordReader("a.tfrecord")
    assert [sample["record"] for sample in read(reader, data)] == records
    for other in ({}, {"record": b"", "more": b""}, {"text": "a"}):
        failure = TFRecordEncoder().encode([other]).failure
        assert failure is not None
        assert failure.text.startswith("a TFRecord holds one field, 'record'")


# -------------------------------------------------------------------------------------------------------------- MDS

INTEGERS = {
    name: st.integers(int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
NUMBERS = {name: values.map(np.dtype(name).type) for name, values in INTEGERS.items()} | {
    f"float{width}": st.floats(width=width).map(np.dtype(f"float{width}").type) for width in (16, 32, 64)
}
DTYPES = st.sampled_from(sorted(NUMBERS))
ARRAYS = DTYPES.flatmap(lambda name: arrays.arrays(name, arrays.array_shapes(max_dims=4, max_side=4)))
MDS = {
    **NUMBERS,
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "bytes": RAW,
    "jpeg:90": RAW,
    "str": TEXT,
    "json": JSON,
    "ndarray": ARRAYS,
}


def mds_cases() -> st.SearchStrategy[tuple[dict[str, str], list[dict[str, Any]]]]:
    columns = st.dictionaries(
        st.text(min_size=1, max_size=3).filter(lambda name: name.isprintable()),
        st.sampled_from(sorted(MDS)),
        min_size=1,
        max_size=4,
    )
    return columns.flatmap(
        lambda columns: st.tuples(
            st.just(columns),
            st.lists(
                st.fixed_dictionaries({name: MDS[each] for name, each in columns.items()}), min_size=1, max_size=4
            ),
        )
    )


@given(mds_cases(), st.integers(1, 3))
def test_mds_is_read_again_by_its_index(case: tuple[dict[str, str], list[dict[str, Any]]], groups: int) -> None:
    """Each encoding; the shard agrees with the index, and the values' bytes with a second implementation."""
    columns, samples = case
    encoder = MdsEncoder(columns)
    data = shard(encoder, samples, groups)
    index = mds_index(encoder, [MdsFile("shard.mds", len(samples), len(data), len(data))], None, 1 << 26)
    (described,) = parse_mds_index(index)
    all_same(read(MdsReader("shard.mds", described), data), samples)
    offsets = described.offsets(data[: described.header_size])
    for at, sample in zip(offsets.tolist(), samples, strict=False):
        for name in sorted(columns):
            value = sample[name]
            if isinstance(value, np.ndarray):
                value = (value.dtype.name, value.shape, value.reshape(-1).tolist())
            assert mds_peer(columns[name], value) in data[at:]


@given(mds_cases().map(lambda case: case[1][0]))
def test_the_first_sample_decides_the_columns(sample: dict[str, Any]) -> None:
    """What a reader returns is written again to columns that return it."""
    encoder = MdsEncoder.of_first(sample)
    data = shard(encoder, [sample])
    (described,) = parse_mds_index(mds_index(encoder, [MdsFile("a.mds", 1, len(data), len(data))], None, 1 << 26))
    (found,) = read(MdsReader("a.mds", described), data)
    all_same([found], [sample])


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("int", 1 << 63),
        ("int", 1.5),
        ("int", True),
        ("uint8", 256),
        ("float32", "1"),
        ("float32", 1e39),
        ("float64", (1 << 53) + 1),
        ("float64", np.complex128(1 + 2j)),
        ("bytes", "text"),
        ("str", b"raw"),
        ("str", "\ud800"),
        ("json", b"raw"),
        ("json", {True: 1, "true": 2}),
        ("ndarray", [1, 2]),
        ("ndarray", np.zeros(0)),
        ("ndarray", np.array(1)),
        ("ndarray", np.array(["a"])),
    ],
)
def test_mds_refuses_values(encoding: str, value: Any) -> None:
    """A value of another type, or beyond the limits of its column."""
    failure = MdsEncoder({"a": encoding}).encode([{"a": value}]).failure
    assert failure is not None
    assert failure.text.startswith("its field 'a' ")


def test_mds_refuses_other_fields() -> None:
    """A sample without a column, or with a field that is none; columns that no reader has."""
    encoder = MdsEncoder({"a": "int", "b": "str"})
    missing, extra = encoder.encode([{"a": 1}]).failure, encoder.encode([{"a": 1, "b": "", "c": 2}]).failure
    assert missing is not None
    assert extra is not None
    assert missing.text.startswith("it has no field 'b'")
    assert extra.text.startswith("its field 'c' is no column")
    for columns in ({}, {"__key__": "str"}, {"a": "pkl"}, {"a": "str_decimal"}, {"a": "ndarray:int8"}):
        with pytest.raises(ValueError, match="columns"):
            MdsEncoder(columns)
    with pytest.raises(BadSample, match="MDS has no encoding"):
        MdsEncoder.of_first({"a": Decimal(1)})
    with pytest.raises(BadSample, match="no field"):
        MdsEncoder.of_first({"__key__": "a"})


# ---------------------------------------------------------------------------------------------------------- Parquet

PARQUET = {
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "float": st.floats(),
    "bool": st.booleans(),
    "text": TEXT,
    "bytes": RAW,
    "list": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "dict": st.fixed_dictionaries({"x": TEXT, "y": st.integers(0, 9)}),
    "vector": arrays.arrays(np.float32, 3),
    "image": arrays.arrays(np.uint8, (2, 3, 1)),
}


def rows_of(data: bytes) -> list[Sample]:
    """The samples of a Parquet file, by this package's reader."""
    from asyncloader.formats.parquet import footer_size

    footer = parse_footer(data[-footer_size(data[-8:], len(data), "a") :], len(data), "a")

    def fetch(ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
        found: Future[Sequence[bytes]] = Future()
        found.set_result([data[start : start + length] for start, length in ranges])
        return found

    return [each.sample for some in read_rows(footer, fetch) for each in some]


@given(st.lists(st.fixed_dictionaries(PARQUET), min_size=1, max_size=5), st.integers(1, 3))
def test_parquet_is_read_by_pyarrow_and_us(samples: list[dict[str, Any]], groups: int) -> None:
    """Numbers, text, bytes, nested values and arrays; the same bytes for each grouping."""
    import pyarrow.parquet

    encoder = ParquetEncoder.of_first(samples[0])
    data = shard(encoder, samples, groups)
    assert data == shard(encoder, samples)
    all_same(rows_of(data), samples)
    table = pyarrow.parquet.read_table(io.BytesIO(data))
    theirs = table.drop_columns(["image", "vector"]).to_pylist()
    plain = [{name: value for name, value in sample.items() if name not in {"image", "vector"}} for sample in samples]
    all_same(theirs, plain)
    assert np.array_equal(table["image"].combine_chunks().to_numpy_ndarray(), np.stack([s["image"] for s in samples]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("int", 1.5), ("int", "a"), ("text", 3), ("bytes", 3), ("vector", np.zeros(4)), ("image", np.zeros((2, 3)))),
        *(("narrow", 1e39), ("narrow", (1 << 24) + 1), ("narrows", [{"a": 1e39}]), ("pixels", np.full((2, 2), 0.5))),
        ("vector", np.full(3, 1e39)),
    ],
)
def test_parquet_refuses_values(field: str, value: Any) -> None:
    """The row is found among the others, which are kept."""
    fine = {"int": 1, "text": "a", "bytes": b"", "vector": np.zeros(3, np.float32), "image": np.zeros((2, 3, 1))}
    fine |= {"narrow": np.float32(1), "narrows": [{"a": np.float32(1)}], "pixels": np.zeros((2, 2), np.int32)}
    encoded = ParquetEncoder.of_first(fine).encode([fine, {**fine, field: value}, fine])
    assert len(encoded.sizes) == 1
    assert encoded.failure is not None
    assert encoded.failure.number == 1
    assert encoded.failure.text.startswith(f"its field {field!r} does not fit the column's type")


def test_parquet_refuses_columns() -> None:
    """A first value without a type; columns that are none."""
    for value in (None, [], object(), np.zeros(0), np.array(1.0)):
        with pytest.raises(BadSample, match="its field 'a'"):
            ParquetEncoder.of_first({"a": value})
    with pytest.raises(BadSample, match="no field"):
        ParquetEncoder.of_first({"__key__": "a"})
    for columns in (3, {}, {"__key__": "x"}):
        with pytest.raises(ValueError, match="columns="):
            ParquetEncoder(columns)


def test_parquet_pages_of_large_values_stay_small() -> None:
    """A reader refuses pages of hundreds of megabytes: large values get pages of their own."""
    import pyarrow.parquet

    samples = [{"a": bytes([number]) * (1 << 20)} for number in range(40)]
    data = shard(ParquetEncoder.of_first(samples[0]), samples)
    all_same(rows_of(data), samples)
    assert pyarrow.parquet.ParquetFile(io.BytesIO(data)).num_row_groups == 3


# ------------------------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_shards_are_compressed_in_several_threads_at_once(kind: Any) -> None:
    """Each has the bytes that it has alone: the threads share no state of the library."""
    compress = compressor(kind)
    shards = [[bytes(range(number, 256)) * 400] for number in range(8)]
    alone = [compress(each) for each in shards]
    with ThreadPoolExecutor(8) as pool:
        assert all(list(pool.map(compress, shards)) == alone for _ in range(30))
