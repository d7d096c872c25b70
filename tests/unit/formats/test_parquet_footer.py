"""Parquet footers: their claims are checked against the file before anything is read by them."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncloader.formats import ShardError
from asyncloader.formats.parquet import MAX_FOOTER_BYTES, Footer, footer_size, parse_footer
from tests.unit.remote.shards import parquet

URL = "s3://bucket/a.parquet"


def footer_of(data: bytes) -> Footer:
    return parse_footer(data[len(data) - footer_size(data, len(data), URL) :], len(data), URL)


def written(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def changed(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The file with its footer changed."""
    size = footer_size(data, len(data), URL)
    footer = change(data[-size:-8])
    return data[:-size] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def lying(data: bytes, number: int, claim: int) -> bytes:
    """The file with `claim` wherever its footer has `number`, which must be too large to stand for anything else."""
    assert number > 127
    assert varint(number) in data[-footer_size(data, len(data), URL) :]
    return changed(data, lambda footer: footer.replace(varint(number), varint(claim)))


def varint(number: int) -> bytes:
    """An integer as a footer has it: zigzag, seven bits per byte."""
    value = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def with_metadata_of(data: bytes, other: bytes) -> bytes:
    """The file with the footer of another file."""
    return changed(data, lambda footer: other[-footer_size(other, len(other), URL) : -8])


def encrypted(plaintext_footer: bool) -> bytes:
    """A file whose column `b` is encrypted, and its footer unless it is to be plain."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    keys = type("Keys", (encryption.KmsClient,), {"wrap_key": lambda self, key, name: base64.b64encode(key)})
    factory = encryption.CryptoFactory(lambda config: keys())
    options = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["b"]}, plaintext_footer=plaintext_footer
    )
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), options)
    return written(pa.table({"a": [1, 2], "b": [3, 4]}), encryption_properties=properties)


GOOD = parquet(range(20))
LONG = parquet(range(500), group=300)


def test_a_footer_says_where_row_groups_are() -> None:
    """Row numbers, byte ranges of column chunks and names are those that pyarrow reports."""
    footer = footer_of(GOOD)
    assert (footer.rows, footer.edges, footer.names) == (20, (0, 7, 14, 20), ("n", "text"))
    expected = pq.read_metadata(io.BytesIO(GOOD)).row_group(1)
    group = footer.group(1)
    assert [start for start, _ in group.chunks] == [expected.column(each).dictionary_page_offset for each in (0, 1)]
    assert [length for _, length in group.chunks] == [expected.column(each).total_compressed_size for each in (0, 1)]
    assert group.uncompressed == sum(expected.column(each).total_uncompressed_size for each in (0, 1))
    assert footer.group(1, ["text"]).chunks == group.chunks[1:]


def test_nested_columns_go_by_their_outermost_name() -> None:
    """A name may contain dots itself: pyarrow reads both columns, so both are fetched."""
    footer = footer_of(written(pa.table({"a": [{"b": 1, "c": [2]}], "a.b": [3], "ab": [4]})))
    assert footer.names == ("a", "a.b", "ab")
    assert len(footer.group(0).chunks) == 4
    assert len(footer.group(0, ["a"]).chunks) == 3
    assert len(footer.group(0, ["a.b"]).chunks) == 2


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "no Parquet file: it has 0 bytes"),
        (b"PAR1PAR1", "no Parquet file"),
        (GOOD[:-1], "does not end with PAR1"),
        (GOOD[:-4] + b"PARE", "encrypted"),
        (GOOD[:-8] + b"\xff\xff\xff\xffPAR1", "claims 4,294,967,295 bytes"),
        (GOOD[:-8] + bytes(4) + b"PAR1", "damaged"),
        (changed(GOOD, lambda footer: footer[:-50]), "damaged"),
    ],
    ids=range(7),
)
def test_files_that_are_none(data: bytes, match: str) -> None:
    """The file is too short, of another format, cut off or encrypted, or its footer is damaged or too large."""
    with pytest.raises(ShardError, match=match) as caught:
        footer_of(data)
    assert caught.value.url == URL
    assert caught.value.offset is not None


def test_a_footer_that_is_too_large() -> None:
    """The footer has one byte more than is allowed, in a file that is large enough."""
    size = MAX_FOOTER_BYTES + 100
    tail = (MAX_FOOTER_BYTES + 1).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(ShardError, match="are allowed") as caught:
        footer_size(tail, size, URL)
    assert (caught.value.url, caught.value.offset) == (URL, size - 8)
    assert footer_size(MAX_FOOTER_BYTES.to_bytes(4, "little") + b"PAR1", size, URL) == MAX_FOOTER_BYTES + 8


def test_an_encrypted_footer() -> None:
    """The footer is encrypted by pyarrow."""
    with pytest.raises(ShardError, match="an encrypted Parquet file: write it without encryption"):
        footer_of(encrypted(plaintext_footer=False))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (lying(LONG, 500, 501), "the file claims 501 rows, its row groups 500"),
        (lying(LONG, 300, -3), "row group 0 claims -3 rows"),
        (written(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"])), "two columns have the same name"),
    ],
    ids=["total", "negative", "names"],
)
def test_contradictions_in_the_metadata(data: bytes, match: str) -> None:
    """Each contradiction is an error that names it."""
    with pytest.raises(ShardError, match=match):
        footer_of(data)


@pytest.mark.parametrize("claim", [-5, 0, 10_000, 1 << 61])
def test_offsets_must_lie_in_the_file(claim: int) -> None:
    """Negative offsets, and offsets beyond the end of the file, are refused before a byte is read."""
    data = parquet(range(500), group=300, use_dictionary=False)
    start = footer_of(data).group(1).chunks[0][0]
    footer = footer_of(lying(data, start, claim))
    with pytest.raises(ShardError, match=r"'n' of row group 1 claims .* which do not lie in the file"):
        footer.group(1)
    assert footer.group(0).number == 0


def test_columns_in_another_file() -> None:
    """This reader would not read the other file, so it raises an error."""
    metadata = pq.read_metadata(io.BytesIO(GOOD))
    metadata.set_file_path("/etc/passwd")
    file = io.BytesIO()
    metadata.write_metadata_file(file)
    with pytest.raises(ShardError, match="'n' of row group 0 lies in another file"):
        footer_of(with_metadata_of(GOOD, file.getvalue())).group(0)


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'asyncloader\[parquet\]'"):
        footer_of(GOOD)
