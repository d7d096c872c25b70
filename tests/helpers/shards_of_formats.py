"""Shards of every format, whose samples count from 0 on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.unit.formats.mds_writer import shard_entry, write_index, write_shard
from tests.unit.remote.shards import MAKERS, mds, mds_index, zstd_compress

SIZES = (12, 9, 15, 11)
COLUMNS = {
    "n": "int",
    "text": "str",
    "whole": "str_int",
    "real": "str_float",
    "exact": "str_decimal",
    "object": "json",
    "raw": "bytes",
    "small": "uint8",
    "half": "float16",
    "any_array": "ndarray",
    "typed_array": "ndarray:int16",
    "fixed_array": "ndarray:float32:2,3",
}


def of_every_column(numbers: Sequence[int]) -> bytes:
    """An MDS shard with a column of each encoding."""
    samples = [
        {
            "n": n,
            "text": "x" * (n % 3),
            "whole": n,
            "real": n / 2,
            "exact": n,
            "object": {"n": [n, None]},
            "raw": bytes([n]),
            "small": n,
            "half": n,
            "any_array": ("int32", (2, 1), [n, n + 1]),
            "typed_array": ("int16", (1, 3), [n, -n, 0]),
            "fixed_array": ("float32", (2, 3), [n / 4] * 6),
        }
        for n in numbers
    ]
    return write_shard(COLUMNS, samples)


def with_every_column(shards: Sequence[bytes]) -> bytes:
    names = [f"shard.{number:05d}.mds" for number in range(len(shards))]
    entries = zip(SIZES, shards, names, strict=True)
    return write_index(*(shard_entry(COLUMNS, size, len(data), name) for size, data, name in entries))


def packed(shards: Sequence[bytes]) -> bytes:
    """The index of MDS shards that are compressed."""
    index = json.loads(mds_index(*shards, counts=SIZES))
    for entry, data in zip(index["shards"], shards, strict=True):
        name = entry["raw_data"]["basename"] + ".zstd"
        entry |= {"compression": "zstd:3", "zip_data": {"basename": name, "bytes": len(zstd_compress(data))}}
    return json.dumps(index).encode()


MDS: dict[str, tuple[Callable[[Sequence[int]], bytes], Callable[[Sequence[bytes]], bytes]]] = {
    "mds": (mds, lambda shards: mds_index(*shards, counts=SIZES)),
    "mds.zstd": (mds, packed),
    "mds, every column": (of_every_column, with_every_column),
}
FORMATS = [*(name.removeprefix("a.") for name in MAKERS if name != "a.mds"), *MDS]


def write(folder: Path, format: str) -> None:
    """Write the shards, and an index if the format has one."""
    first, made = 0, []
    make = MDS[format][0] if format in MDS else MAKERS[f"a.{format}"]
    for number, size in enumerate(SIZES):
        made.append(make(range(first, first + size)))
        name = f"shard.{number:05d}.mds" if format in MDS else f"s{number}.{format}"
        if format == "mds.zstd":
            (folder / f"{name}.zstd").write_bytes(zstd_compress(made[-1]))
        else:
            (folder / name).write_bytes(made[-1])
        first += size
    if format in MDS:
        (folder / "index.json").write_bytes(MDS[format][1](made))
