from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.formats import ShardFormat
from asyncloader.remote.shard_index import ShardIndex, ShardNames, ShardRecord, dump_index, parse_index

NAMES = ShardNames.of("s3://bucket/a/train-{shard:03d}.tar", None)


def test_names() -> None:
    """A number has one name, and a name one number, also where it has more digits."""
    assert NAMES.folder == "s3://bucket/a/"
    assert NAMES.index_name == "_train-index.tar.json"
    for number, name in {0: "train-000.tar", 42: "train-042.tar", 12345: "train-12345.tar"}.items():
        assert NAMES.name(number) == name
        assert NAMES.number(name) == number
    for name in (
        "train-42.tar",
        "train-0042.tar",
        "train-.tar",
        "train-١٢٣.tar",
        "x.tar",
        "train-000.tar.gz",
        "train-",
    ):
        assert NAMES.number(name) is None
    assert ShardNames.of("{shard}.jsonl.zst", "jsonl").format == ShardFormat("jsonl", "zstd")
    assert ShardNames.of("{shard}.tgz", None).format == ShardFormat("tar", "gzip")


@pytest.mark.parametrize(
    ("url", "format", "text"),
    [
        ("s3://bucket/train.tar", None, "does not say where"),
        ("s3://{shard}/train.tar", None, "does not say where"),
        ("{shard}-{shard}.tar", None, "does not say where"),
        ("{shard}-*.tar", None, "does not say where"),
        ("{shard}.bin", None, "says no format"),
        ("{shard}.bin", "tar", "does not end with the extension"),
        ("{shard}.tar", "jsonl", "does not end with the extension"),
        ("{shard}.tar", "tar.gz", "does not end with the extension"),
    ],
)
def test_names_are_refused(url: str, format: str | None, text: str) -> None:
    """A pattern without one number in its last part, or of another format."""
    with pytest.raises(ValueError, match=text):
        ShardNames.of(url, format)


RECORD = ShardRecord("train-003.tar", 5, 10240, 10240, "ab", None)


def test_an_index_is_parsed_again() -> None:
    """All of its members."""
    index = ShardIndex(False, {"max_bytes": 1}, {3: RECORD, 10: RECORD._replace(name="train-010.tar", etag='"x"')})
    assert parse_index(dump_index(index), NAMES) == index


HOSTILE: list[Any] = [None, 1, "a", [], {}, -1, True]


@given(
    st.sampled_from(["asyncloader", "version", "complete", "shards", *ShardRecord._fields, "number", "more"]),
    st.sampled_from(HOSTILE),
)
def test_a_hostile_index_is_refused_or_harmless(member: str, value: Any) -> None:
    """Whatever a member is: what is returned has the types that it says."""
    data = json.loads(dump_index(ShardIndex(True, None, {3: RECORD})))
    if member in data:
        data[member] = value
    elif member == "number":
        data["shards"] = {str(value): RECORD._asdict()}
    else:
        data["shards"]["3"][member] = value
    try:
        found = parse_index(json.dumps(data).encode(), NAMES)
    except ValueError:
        return
    assert isinstance(found.complete, bool)
    for number, record in found.shards.items():
        assert record.name == NAMES.name(number)
        assert all(type(each) is int and each >= 0 for each in record[1:4])
        assert isinstance(record.sha256, str)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b"[]", b'{"version": 1}'])
def test_no_index(data: bytes) -> None:
    """Whatever the bytes are."""
    with pytest.raises(ValueError, match="it is no"):
        parse_index(data, NAMES)
