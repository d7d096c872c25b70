"""A small writer of MDS datasets, for tests: independent of the reader, and of MosaicML's code.

The layout is that of mosaicml/streaming's public source, `streaming/base/format/mds/writer.py` (`encode_joint_shard`,
`encode_sample`, `get_config`) and `encodings.py`, read at commits 0205a30 and 002e7df: count, offsets (absolute, behind
the embedded config), config as JSON, samples; in a sample the sizes of the columns that vary, then the values; columns
sorted by name. Values are packed with `struct` here, where the reader uses numpy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

CODES = {
    "uint8": ("B", 8),
    "int8": ("b", 9),
    "uint16": ("H", 16),
    "int16": ("h", 17),
    "float16": ("e", 18),
    "uint32": ("I", 32),
    "int32": ("i", 33),
    "float32": ("f", 34),
    "uint64": ("Q", 64),
    "int64": ("q", 65),
    "float64": ("d", 66),
}


def numbers(dtype: str, values: list[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{CODES[dtype][0]}", *values)


def encode(encoding: str, value: Any) -> bytes:
    """The bytes of one value. An ndarray is given as ``(dtype, shape, flat list of values)``."""
    name, _, options = encoding.partition(":")
    if name == "ndarray":
        dtype, shape, flat = value
        dtype_given, _, shape_given = options.partition(":")
        out = b"" if dtype_given else bytes([CODES[dtype][1]])
        if not shape_given:
            width = next(at for at in range(4) if max(shape) < 1 << (8 << at))
            out += bytes([len(shape) << 2 | width])
            out += struct.pack(f"<{len(shape)}{'BHIQ'[width]}", *shape)
        return out + numbers(dtype, flat)
    if name in CODES:
        return numbers(name, [value])
    if name == "int":
        return struct.pack("<q", value)
    if name in ("bytes", "jpeg", "png"):
        return bytes(value)
    return (json.dumps(value) if name == "json" else str(value)).encode()


def fixed_size(encoding: str) -> int | None:
    name, _, options = encoding.partition(":")
    if name == "int":
        return 8
    if name in CODES:
        return struct.calcsize(CODES[name][0])
    dtype, _, shape = options.partition(":")
    if name == "ndarray" and shape:
        return struct.calcsize(CODES[dtype][0]) * math.prod(map(int, shape.split(",")))
    return None


def write_shard(columns: dict[str, str], samples: list[dict[str, Any]]) -> bytes:
    """The bytes of one shard."""
    names = sorted(columns)
    sizes = {name: fixed_size(columns[name]) for name in names}
    config = json.dumps({"version": 2, "format": "mds", "column_names": names}).encode()
    packed: list[bytes] = []
    for sample in samples:
        values = {name: encode(columns[name], sample[name]) for name in names}
        head = b"".join(struct.pack("<I", len(values[name])) for name in names if sizes[name] is None)
        packed.append(head + b"".join(values.values()))
    at = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = [at]
    for each in packed:
        offsets.append(offsets[-1] + len(each))
    return struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + config + b"".join(packed)


def shard_entry(
    columns: dict[str, str], samples: int, size: int, basename: str = "shard.00000.mds", compression: str | None = None
) -> dict[str, Any]:
    """The shard's entry in the index."""
    names = sorted(columns)
    packed = {"basename": f"{basename}.zstd", "bytes": 17, "hashes": {}} if compression else None
    return {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": [fixed_size(columns[name]) for name in names],
        "compression": compression,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": basename, "bytes": size, "hashes": {}},
        "samples": samples,
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": packed,
    }


def write_index(*entries: dict[str, Any], change: Callable[[dict[str, Any]], Any] | None = None) -> bytes:
    """An ``index.json``; `change` may damage it first."""
    index = {"version": 2, "shards": list(entries)}
    if change is not None:
        change(index)
    return json.dumps(index, sort_keys=True).encode()
