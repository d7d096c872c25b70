"""What LitData's index says, and that nothing of it is believed that cannot be."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.errors import ShardError
from asyncloader.sources.litdata_index import parse_index


def index(*chunks: dict[str, Any], **config: Any) -> bytes:
    """An index of a folder."""
    made = [
        {"filename": f"chunk-0-{n}.bin", "chunk_bytes": 9, "chunk_size": 2, "dim": None} for n, _ in enumerate(chunks)
    ]
    whole = {"item_loader": "PyTreeLoader", "compression": None, "encryption": None, **config}
    return json.dumps({"chunks": [a | b for a, b in zip(made, chunks, strict=True)], "config": whole}).encode()


def test_items() -> None:
    """A sample is an item; also in an index that does not say what its items are."""
    for config in ({}, {"item_loader": "PyTreeLoader"}, {"compression": "zstd", "compression_level": "batch"}):
        data = json.loads(index({}, {"chunk_size": 0}, {"chunk_size": 5, "chunk_bytes": 70}, **config))
        if not config:
            del data["config"]["item_loader"]
        table = parse_index(json.dumps(data).encode(), None, "there")
        assert table.names == ["chunk-0-0.bin", "chunk-0-1.bin", "chunk-0-2.bin"]
        assert table.starts.tolist() == [0, 2, 2, 7]
        assert table.least_bytes.tolist() == [9, 9, 70]


def test_more_samples_than_bytes() -> None:
    """A chunk that is not compressed has bytes for each of the samples that the index says, of items and of tokens."""
    many = 1 << 39
    assert parse_index(index({"chunk_size": many}), None, "there").least_bytes.tolist() == [4 * many]
    table = parse_index(index({"dim": many}, item_loader="TokensLoader"), 8, "there")
    assert table.least_bytes.tolist() == [many]


def test_tokens() -> None:
    """A sample is a block of tokens of one chunk."""
    table = parse_index(index({"dim": 21}, {"dim": 7}, {"dim": 16}, item_loader="TokensLoader"), 8, "there")
    assert table.starts.tolist() == [0, 2, 2, 4]
    with pytest.raises(ValueError, match="there is of tokens, whose samples are blocks: give block_size="):
        parse_index(index({"dim": 21}, item_loader="TokensLoader"), None, "there")
    with pytest.raises(ValueError, match="block_size=8 is for a folder of tokens, and there is of PyTreeLoader"):
        parse_index(index({}), 8, "there")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "'config' is missing, or no dict"),
        (index(), "no chunk"),
        (index({"filename": "../a"}), "no name of a file in its folder"),
        (index({"filename": ".."}), "no name of a file"),
        (index({"filename": ""}), "no name of a file"),
        (index({"filename": 3}), "'filename' is missing, or no str"),
        (index({"chunk_size": -1}), "'chunk_size' is -1"),
        (index({"chunk_size": True}), "'chunk_size' is missing, or no int"),
        (index({"chunk_size": 1 << 60}), "'chunk_size' is"),
        (index({"chunk_bytes": 2.5}), "'chunk_bytes' is missing, or no int"),
        (index({}, item_loader="TokensLoader"), "'dim' is missing"),
        (index({}, item_loader="ParquetLoader"), "its items are of 'ParquetLoader'"),
        (index({}, item_loader=["x"]), "its items are of"),
        (index({}, encryption={"algorithm": "fernet"}), "it is encrypted"),
        (index({}, compression="zstd"), "compressed as whole files"),
        (index({"filename": "a"}, {"filename": "a"}), "a chunk twice"),
    ],
)
def test_bad_indexes(data: bytes, said: str) -> None:
    """Refused, with the reason and the name."""
    with pytest.raises(ShardError, match=rf"{said}.*\(there\)$"):
        parse_index(data, None, "there")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(["chunks", "config", "filename", "chunk_bytes", "chunk_size", "item_loader"]),
            each,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_index(value: Any) -> None:
    """A table, or a `ShardError`."""
    with suppress(ShardError):
        parse_index(json.dumps(value).encode(), None, "there")
