"""Damaged MDS shards, and indexes that lie about them: samples or a `ShardError`, in bounded memory."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import struct
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from asyncloader.formats import MdsShard, ShardError, ShardFormat, open_reader, parse_mds_index
from asyncloader.formats.mds import mds_encoding
from tests.unit.formats.mds_writer import shard_entry, write_index, write_shard
from tests.unit.remote.shards import zstd_compress

DRAWS = 150
LARGEST = 1 << 20
COLUMNS: dict[str, str] = {
    "image": "jpeg:90",
    "label": "int",
    "name": "str",
    "box": "ndarray:float32:2,2",
    "mask": "ndarray",
} | {"bytes": "ndarray:uint8", "weight": "float64", "any": "json", "decimal": "str_decimal", "half": "float16"}
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2**31,
    2**32 - 1,
    2**32,
    2**63,
    2**64,
    10**30,
    1.5,
    1e308,
    True,
    None,
    "7",
    "x" * 1000,
    [],
    {},
    [1],
)
TEXTS = (
    "ndarray:float64:9999999999,9999999999",
    "ndarray:uint8:4294967295",
    "pkl",
    "int",
    "zstd",
    "gz",
    "../x",
    "json",
)


def sample(n: int) -> dict[str, Any]:
    values: dict[str, Any] = {"image": bytes(n), "label": -n, "name": "é" * n, "weight": n / 4, "any": {"a": [n]}}
    arrays = {"box": ("float32", (2, 2), [n, 0.5, 1, 2]), "mask": ("uint16", (n + 1, 2), [n] * (2 * n + 2))}
    return values | arrays | {"bytes": ("uint8", (n + 1,), [n] * (n + 1)), "decimal": n, "half": 1.0}


DATA = write_shard(COLUMNS, [sample(n) for n in range(7)])
INDEX = write_index(shard_entry(COLUMNS, 7, len(DATA)))


def places(node: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all members of a JSON value."""
    if not isinstance(node, dict | list):
        return []
    members = node.items() if isinstance(node, dict) else enumerate(node)
    return [each for name, value in members for each in [(*way, name), *places(value, (*way, name))]]


def spoil_index(drawn: random.Random, index: Any) -> None:
    *way, last = drawn.choice(places(index))
    for name in way:
        index = index[name]
    kind = drawn.randrange(5)
    if kind == 0:
        del index[last]
    else:
        index[last] = drawn.choice(TEXTS) if kind == 1 and isinstance(index[last], str) else drawn.choice(NUMBERS)


def spoil(drawn: random.Random, data: bytearray) -> None:
    at = drawn.randrange(len(data))
    match drawn.randrange(4):
        case 0:
            data[at] ^= 1 << drawn.randrange(8)
        case 1:
            data[at : at + 4] = struct.pack("<I", drawn.choice([0, 1, 2**32 - 1, 2**31, 2**24, len(data)]))
        case 2:
            data[at : at + 8] = struct.pack("<Q", drawn.choice([2**63, 2**64 - 1, 2**62]))
        case _:
            del data[max(at, 1) :]


def read(shard: MdsShard, data: bytes) -> int:
    """Read a shard to its end; return the number of samples."""
    shard_format = ShardFormat("mds", shard.compression)
    reader = open_reader("a.mds", shard_format, shard=shard, max_sample_bytes=LARGEST, on_bad=lambda _: None)
    number = 0
    for start in range(0, len(data), 100):
        number += len(reader.feed(data[start : start + 100]))
        while reader.pending:
            number += len(reader.feed(b""))
        if reader.done:
            return number
    return number + len(reader.end())


def play(seed: int) -> None:
    drawn = random.Random(seed)
    data, index = bytearray(DATA), json.loads(INDEX)
    for _ in range(drawn.choice([0, 1, 1, 2, 5])):
        if places(index):
            spoil_index(drawn, index)
    for _ in range(drawn.choice([0, 1, 1, 2, 8])):
        spoil(drawn, data)
    for shard in parse_mds_index(json.dumps(index).encode(), url="index.json"):
        packed = bytes(data)
        if shard.compression is not None:
            packed = zstd_compress(packed) if shard.compression == "zstd" else gzip.compress(packed)
        read(shard, packed)


def peak_of(seeds: range) -> int:
    tracemalloc.start()
    try:
        for seed in seeds:
            with suppress(ShardError):
                play(seed)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_drawn_damage() -> None:
    """Only ShardErrors are raised, and no memory is allocated for sizes that are merely claimed."""
    assert peak_of(range(DRAWS)) < 16 * LARGEST


@pytest.mark.parametrize("claim", [7, 100_000])
@pytest.mark.parametrize("compression", ["zstd", "gz"])
def test_a_bomb(claim: int, compression: str) -> None:
    """64 MiB of zeros in some KiB are refused in bounded memory, whatever number of samples the index claims."""
    index = json.loads(INDEX)
    entry = index["shards"][0]
    packed = {"basename": f"shard.00000.mds.{compression}", "bytes": 1 << 17, "hashes": {}}
    entry |= {"compression": compression, "zip_data": packed, "samples": claim}
    entry["raw_data"]["bytes"] = 64 << 20
    bomb = struct.pack("<II", claim, 2**32 - 1) + bytes(64 << 20)
    bomb = zstd_compress(bomb) if compression == "zstd" else gzip.compress(bomb)
    (shard,) = parse_mds_index(json.dumps(index).encode(), url="index.json")
    tracemalloc.start()
    try:
        with pytest.raises(ShardError):
            read(shard, bomb)
        assert tracemalloc.get_traced_memory()[1] < 16 * LARGEST
    finally:
        tracemalloc.stop()


def test_every_encoding_can_be_pickled() -> None:
    """A dataset pickles its encodings when it is sent to its workers."""
    names = ["int", "str_int", "str_float", "jpeg", "uint16", "ndarray:int8", *COLUMNS.values()]
    for name in names:
        encoding = mds_encoding(name)
        assert pickle.loads(pickle.dumps(encoding)).size == encoding.size
    shards = parse_mds_index(INDEX, url="index.json")
    copies = pickle.loads(pickle.dumps(shards))
    assert [read(shard, DATA) for shard in copies] == [7]
