"""Lists of shards as another rank sends them: whole, and refused where they are broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncloader.formats import ShardFormat
from asyncloader.remote.catalog import CUSTOM, PARQUET, Shard, plain_list, read_list
from tests.unit.remote.shards import mds_entry

TAR = ShardFormat("tar", None)
ENTRY = mds_entry(range(7))
LISTS: dict[str, Sequence[Shard]] = {
    "queries": [Shard("https://h/a.tar?sig=1", TAR), Shard("https://h/b.tar?sig=2", TAR)],
    "sizes": [Shard("a.tar", TAR, 7), Shard("b\udcff.tar", TAR), Shard("c.tgz", ShardFormat("tar", "gzip"), 1 << 40)],
    "formats": [Shard("a.tar", TAR), Shard("b.pq", PARQUET), Shard("c", CUSTOM)],
    "mds": [Shard("m/x.mds", ShardFormat("mds", None), ENTRY.stored_size, ENTRY.samples, ENTRY), Shard("a.tar", TAR)],
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_come_whole(kind: str) -> None:
    """Through JSON."""
    shards = LISTS[kind]
    assert read_list(json.loads(json.dumps(plain_list(shards)))) == [*shards]


@pytest.mark.parametrize(
    "changed",
    [
        [7, ["tar", None], 7, 7, None],
        ["", ["tar", None], 7, 7, None],
        ["a.tar", ["tar", "lzma"], 7, 7, None],
        ["a.tar", ["tar", ["gzip"]], 7, 7, None],
        ["a.tar", "tar", 7, 7, None],
        ["a.tar", ["tar", None], -3, 7, None],
        ["a.tar", ["tar", None], 7, 1 << 63, None],
        ["a.tar", ["tar", None], True, 7, None],
        ["a.tar", ["tar", None], 7, 7, 7],
        ["a.tar", ["tar", None], 7, 7],
        {"url": "a.tar"},
        7,
    ],
)
def test_broken_lists_are_refused(changed: Any) -> None:
    """Each by a ValueError."""
    plain = json.loads(json.dumps(plain_list(LISTS["sizes"])))
    with pytest.raises(ValueError, match=r"."):
        read_list([*plain, changed])
    others: list[Any] = [None, [], 7, {"urls": []}]
    for value in others:
        with pytest.raises(ValueError, match="no list of shards"):
            read_list(value)
