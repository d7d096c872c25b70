"""Parquet footers: what they claim is checked against the file and against itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncloader.formats import ShardError
from asyncloader.formats.parquet_meta import MAX_FOOTER_BYTES, Footer, footer_size, parse_footer
from asyncloader.formats.thrift import BINARY, I32, I64, ListOf, Struct, decode, encode
from tests.unit.remote.shards import parquet

URL = "s3://bucket/a.parquet"

# The footer with fields that the reader drops, for tests that put them there.
COLUMN = Struct(
    {
        1: I32,
        2: ListOf(I32),
        3: ListOf(BINARY),
        4: I32,
        5: I64,
        6: I64,
        7: I64,
        9: I64,
        11: I64,
        16: Struct({1: I64}),
    }
)
CHUNK = Struct({1: BINARY, 2: I64, 3: COLUMN, 8: Struct({})})
FILE = Struct(
    {
        1: I32,
        2: ListOf(Struct({1: I32, 2: I32, 3: I32, 4: BINARY, 5: I32, 6: I32})),
        3: I64,
        4: ListOf(Struct({1: ListOf(CHUNK), 2: I64, 3: I64})),
        5: ListOf(Struct({1: BINARY, 2: BINARY})),
        8: Struct({}),
    }
)


def footer_of(data: bytes) -> Footer:
    return parse_footer(data[len(data) - footer_size(data, len(data), URL) :], len(data), URL)


def changed(data: bytes, change: Callable[[dict[int, Any]], None]) -> bytes:
    """The file with another footer."""
    size = footer_size(data, len(data), URL)
    values = decode(data[-size:-8], FILE)
    change(values)
    footer = encode(values, FILE)
    return data[:-size] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


GOOD = parquet(range(20))


def column(values: dict[int, Any], group: int = 0, number: int = 0) -> dict[int, Any]:
    """The metadata of a column chunk."""
    meta: dict[int, Any] = values[4][group][1][number][3]
    return meta


def test_a_footer_says_where_row_groups_are() -> None:
    """Row numbers, byte ranges of column chunks, names; all as pyarrow has them."""
    footer = footer_of(GOOD)
    assert (footer.rows, footer.edges, footer.names) == (20, (0, 7, 14, 20), ("n", "text"))
    expected = pq.read_metadata(io.BytesIO(GOOD)).row_group(1)
    group = footer.group(1)
    assert (group.first, group.rows) == (7, 7)
    assert [length for _, length in group.chunks] == [expected.column(each).total_compressed_size for each in (0, 1)]
    assert group.uncompressed == sum(expected.column(each).total_uncompressed_size for each in (0, 1))
    assert footer.group(1, frozenset(["text"])).chunks == group.chunks[1:]
    assert footer.metadata.row_group(1).column(0).statistics is None


def test_nested_columns_go_by_their_outermost_name() -> None:
    """A name may hold dots itself."""
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [{"b": 1, "c": [2]}], "a.b": [3]}), file)
    footer = footer_of(file.getvalue())
    assert [leaf.path for leaf in footer.leaves] == [("a", "b"), ("a", "c", "list", "element"), ("a.b",)]
    assert len(footer.group(0, frozenset(["a"])).chunks) == 2
    assert len(footer.group(0, frozenset(["a.b"])).chunks) == 1


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no Parquet file: it has 0 bytes"),
        (b"PAR1PAR1", "no Parquet file"),
        (GOOD[:-1], "does not end with PAR1"),
        (GOOD[:-4] + b"PARE", "encrypted"),
        (GOOD[:-8] + b"\xff\xff\xff\xffPAR1", "claims 4,294,967,295 bytes"),
        (b"PAR1" + bytes(20) + (20).to_bytes(4, "little") + b"PAR1", "damaged"),
    ],
    ids=range(6),
)
def test_files_that_are_none(data: bytes, match: str) -> None:
    """Too short, cut off, encrypted, or with a footer of an impossible size."""
    with pytest.raises(ShardError, match=match) as caught:
        footer_of(data)
    assert caught.value.url == URL
    assert caught.value.offset is not None


def test_a_footer_that_is_too_large() -> None:
    """One byte more than is allowed, in a file that has it."""
    size = MAX_FOOTER_BYTES + 100
    tail = (MAX_FOOTER_BYTES + 1).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(ShardError, match="are allowed") as caught:
        footer_size(tail, size, URL)
    assert (caught.value.url, caught.value.offset) == (URL, size - 8)
    assert footer_size(MAX_FOOTER_BYTES.to_bytes(4, "little") + b"PAR1", size, URL) == MAX_FOOTER_BYTES + 8


def rename(values: dict[int, Any]) -> None:
    values[2][1][4] = values[2][2][4]
    for group in values[4]:
        group[1][0][3][3] = group[1][1][3][3]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda v: v.update({3: 21}), "the file claims 21 rows, its row groups 20"),
        (lambda v: v[4][1].update({3: -7}), "row group 1 claims -7 rows"),
        (lambda v: v[4][0][1].pop(), "row group 0 has 1 columns, the schema 2"),
        (lambda v: v[4][0][1][0].update({1: b"/etc/passwd"}), "lies in another file"),
        (lambda v: v[4][0][1][0].update({8: {}}), "is encrypted"),
        (lambda v: v.update({8: {}}), "the file is encrypted"),
        (lambda v: v[4][0][1][0].pop(3), "damaged: 3"),
        (lambda v: column(v).update({1: 6}), "another type than the schema"),
        (lambda v: column(v).update({3: [b"m"]}), "another path"),
        (lambda v: column(v).update({4: 77}), "unknown compression 77"),
        (lambda v: column(v).update({6: -1}), "negative size"),
        (lambda v: column(v).pop(9), "lacks its place"),
        (lambda v: v[2][0].update({5: 3}), "fewer elements than its groups claim"),
        (lambda v: v[2][0].update({5: 1}), "belong to no group"),
        (lambda v: v[2][1].update({1: 9}), "has no type"),
        (lambda v: v[2][1].update({1: 7, 2: 1 << 30}), "values of 1,073,741,824 bytes"),
        (lambda v: v[2][1].update({3: 5}), "lacks its repetition"),
        (lambda v: v[2][1].update({4: b"\xff"}), "utf-8"),
        (lambda v: v[2].clear(), "there is no schema"),
        (rename, "two columns have the same name"),
    ],
)
def test_contradictions_in_the_metadata(change: Callable[[dict[int, Any]], None], match: str) -> None:
    """Each is an error that says which, before pyarrow sees anything."""
    with pytest.raises(ShardError, match=match):
        footer_of(changed(GOOD, change))


@pytest.mark.parametrize("field", [7, 9])
@pytest.mark.parametrize("value", [-5, 0, 10_000, 1 << 62])
def test_ranges_must_lie_in_the_file(field: int, value: int) -> None:
    """Negative ones, and those that end behind the file, are met before a byte of them is read."""
    footer = footer_of(changed(GOOD, lambda values: column(values, 1).update({field: value, 11: 0})))
    if (field, value) == (7, 0):
        assert footer.group(1).chunks
    else:
        with pytest.raises(ShardError, match="do not lie in the file"):
            footer.group(1)
    assert footer.group(0).rows == 7


def test_statistics_that_pyarrow_dies_of_do_not_reach_it() -> None:
    """pyarrow 26 aborts the process over a size of byte arrays in a column that has none."""
    footer = footer_of(changed(GOOD, lambda values: column(values).update({16: {1: 5}})))
    assert footer.group(0).rows == 7
    assert footer.metadata.row_group(0).column(0).path_in_schema == "n"


def test_other_metadata_is_dropped() -> None:
    """Of the pairs of names and texts only Arrow's schema matters."""
    assert footer_of(changed(GOOD, lambda values: values[5].append({1: b"x", 2: b"y"}))).metadata.metadata.keys() == {
        b"ARROW:schema"
    }
