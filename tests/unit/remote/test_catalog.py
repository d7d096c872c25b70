"""Lists of shards as another rank sends them: whole, and refused where they are broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import CUSTOM, PARQUET, PlainShards, Shard, plain_list, read_list
from tests.unit.remote.shards import mds_entry

TAR = ShardFormat("tar", None)
ENTRY = mds_entry(range(7))
LISTS: dict[str, Sequence[Shard]] = {
    "plain": PlainShards(["a.tar", "s3://b/c.tar"], TAR),
    "queries": [Shard("https://h/a.tar?sig=1", TAR), Shard("https://h/b.tar?sig=2", TAR)],
    "sizes": [Shard("a.tar", TAR, 7), Shard("b\udcff.tar", TAR), Shard("c.tgz", ShardFormat("tar", "gzip"), 1 << 40)],
    "formats": [Shard("a.tar", TAR), Shard("b.pq", PARQUET), Shard("c", CUSTOM)],
    "mds": [Shard("m/x.mds", ShardFormat("mds", None), ENTRY.stored_size, ENTRY.samples, ENTRY), Shard("a.tar", TAR)],
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_come_whole(kind: str) -> None:
    """Through JSON."""
    shards = LISTS[kind]
    found = read_list(json.loads(json.dumps(plain_list(shards))))
    assert [*found] == [*shards]
    assert isinstance(found, PlainShards) == (kind == "plain")


@pytest.mark.parametrize(
    "change",
    [
        {"urls": "ab"},
        {"urls": ["a.tar", "b.tar", 7]},
        {"urls": ["a.tar"]},
        {"urls": []},
        {"formats": [["tar", "lzma"]]},
        {"formats": [["tar", ["gzip"]]]},
        {"formats": [["tar", None], ["tar", "gzip"]], "format_of": None},
        {"formats": []},
        {"format_of": [0, -1, 0]},
        {"format_of": [True, 0, 0]},
        {"sizes": [1, 2]},
        {"sizes": [1, 2, -3]},
        {"sizes": [1, 2, 1 << 63]},
        {"mds": [None, None, 7]},
    ],
)
def test_broken_lists_are_refused(change: dict[str, Any]) -> None:
    """Each by a ValueError."""
    plain = json.loads(json.dumps(plain_list(LISTS["sizes"])))
    read_list(plain)
    with pytest.raises(ValueError, match=r"."):
        read_list(plain | change)
    others: list[Any] = [None, [], 7, {"urls": []}]
    for value in others:
        with pytest.raises(ValueError, match="no list of shards"):
            read_list(value)
