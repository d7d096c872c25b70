"""Writes MDS shards and their index, MosaicML's format. Pure.

Data path: samples -> [mds_writer] -> parts -> shard; and the shards' sizes -> [mds_writer: `mds_index`] -> index.json.

`mds` has the format, and reads it. Columns are sorted by name, as MosaicML's writer does. Nothing is pickled. Of the
encodings that are read, those of numbers as text, and of arrays with a fixed type or shape, are not written.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from typing_extensions import Buffer

from asyncloader.formats.encoder import (
    BadSample,
    Part,
    RecordEncoder,
    bytes_of_value,
    check_fields,
    dump_json,
    encode_text,
    to_floats,
)
from asyncloader.formats.mds import DTYPE_OF_CODE, RAW, RESERVED, SCALARS, UINT32, Column, mds_encoding

Encode: TypeAlias = Callable[[str, Any], bytes | memoryview]

CODE_OF_DTYPE = {name: code for code, name in DTYPE_OF_CODE.items()}


class MdsFile(NamedTuple):
    """A shard that was written, for the index.

    Attributes:
        path: of the object, relative to the index's folder.
        samples: number of samples.
        size: bytes of the shard, before compression.
        stored_size: bytes of the object.
    """

    path: str
    samples: int
    size: int
    stored_size: int


class MdsEncoder(RecordEncoder):
    """Encodes samples of typed columns.

    Args:
        columns: the encoding of each field, by MosaicML's names (`mds`); None: `of_first` finds them.

    Raises:
        ValueError: an encoding is unknown, or a name is reserved.
    """

    largest = UINT32 - 1  # offsets have 32 bits
    sample_bytes = 4

    def __init__(self, columns: Mapping[str, str] | None = None) -> None:
        self.columns: tuple[Column, ...] = ()
        if columns is None:
            return
        if not columns:
            raise ValueError("columns= names no column; an MDS shard has at least one")
        for name, encoding in columns.items():
            if name in RESERVED:
                raise ValueError(f"columns= names {name!r}, which is set by the reader: leave it out")
            if encoding.partition(":")[0] not in RAW | SCALARS | {"str", "int", "json"} and encoding != "ndarray":
                raise ValueError(
                    f"columns[{name!r}] is {encoding!r:.80}: MDS is written with bytes (or jpeg, jpegarray, png, pil), "
                    f"str, json, int, ndarray, {', '.join(sorted(SCALARS))}"
                )
            self.columns += (Column(name, encoding, mds_encoding(encoding).size),)
        self.columns = tuple(sorted(self.columns, key=lambda column: column.name))
        self.base_bytes = 8 + len(self._config)

    @classmethod
    def of_first(cls, sample: Mapping[str, Any]) -> MdsEncoder:
        """Return the encoder whose columns hold the values of the first sample.

        Raises:
            BadSample: a value has a type that no encoding is for.
        """
        columns = {name: encoding_of(name, value) for name, value in sample.items() if name not in RESERVED}
        if not columns:
            raise BadSample("it has no field; an MDS shard has at least one column")
        return cls(columns)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_plan", "_sizes")}

    @cached_property
    def _plan(self) -> dict[str, tuple[Encode, bool]]:
        """The columns' encodings, and whether their values vary in size."""
        return {column.name: (encoder_of(column), column.size is None) for column in self.columns}

    @cached_property
    def _sizes(self) -> struct.Struct:
        return struct.Struct(f"<{sum(column.size is None for column in self.columns)}I")

    @property
    def _config(self) -> bytes:
        return json.dumps(describe(self.columns), sort_keys=True).encode()

    def describe(self) -> Any:
        """Return the columns, like `ShardEncoder.describe`."""
        return {column.name: column.encoding for column in self.columns}

    def encode_sample(self, sample: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return a sample's bytes, like `RecordEncoder.encode_sample`."""
        plan = self._plan
        if len(sample) - ("__key__" in sample) - ("__url__" in sample) != len(plan):
            check_fields(sample, plan)
        values: list[bytes | memoryview] = [b""]
        sizes: list[int] = []
        for name, (encode, varies) in plan.items():
            if name not in sample:
                check_fields(sample, plan)
            value = encode(name, sample[name])
            values.append(value)
            if varies:
                sizes.append(len(value))
        try:
            values[0] = self._sizes.pack(*sizes)
        except struct.error:
            raise BadSample(f"a field has {max(sizes):,} bytes; MDS holds up to {UINT32 - 1:,}") from None
        return values

    def assemble(self, parts: Sequence[Part]) -> list[Buffer]:
        """Return the bytes of a shard, like `ShardEncoder.assemble`."""
        config = self._config
        sizes = np.concatenate([np.empty(0, np.int64), *(encoded.sizes[first:stop] for encoded, first, stop in parts)])
        offsets = np.concatenate([[0], np.cumsum(sizes)]) + 4 + 4 * (len(sizes) + 1) + len(config)
        head = len(sizes).to_bytes(4, "little") + offsets.astype("<u4").tobytes() + config
        return [head, *super().assemble(parts)]


def describe(columns: Sequence[Column]) -> dict[str, Any]:
    """Return the description of the columns that shards and index have."""
    return {
        "version": 2,
        "format": "mds",
        "column_names": [column.name for column in columns],
        "column_encodings": [column.encoding for column in columns],
        "column_sizes": [column.size for column in columns],
    }


def mds_index(encoder: MdsEncoder, files: Iterable[MdsFile], compression: str | None, limit: int) -> bytes:
    """Return the ``index.json`` of a dataset.

    Args:
        encoder: of its shards.
        files: the shards.
        compression: their extension without its dot, ``"gz"`` or ``"zst"``; None: they are not compressed.
        limit: most bytes of a shard before compression.
    """
    about = describe(encoder.columns) | {
        "compression": {"gz": "gz", "zst": "zstd"}.get(compression or ""),
        "hashes": [],
        "size_limit": limit,
    }
    shards: list[dict[str, Any]] = []
    for path, samples, size, stored in files:
        name = path.removesuffix(f".{compression}") if compression else path
        zipped = {"basename": path, "bytes": stored, "hashes": {}} if compression else None
        raw = {"basename": name, "bytes": size, "hashes": {}}
        shards.append(about | {"samples": samples, "raw_data": raw, "zip_data": zipped})
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()


def encoding_of(name: str, value: Any) -> str:
    """Return the encoding for values like this one.

    Raises:
        BadSample: no encoding is for its type.
    """
    found: str | None = None
    if isinstance(value, np.generic | np.ndarray) and value.dtype.name in SCALARS:
        found = "ndarray" if isinstance(value, np.ndarray) else value.dtype.name
    elif isinstance(value, bytes | bytearray | memoryview):
        found = "bytes"
    elif type(value) in (bool, type(None), dict, list):
        found = "json"
    elif type(value) is not int or -(1 << 63) <= value < 1 << 63:
        kind_of: type[Any] = type(value)
        found = {str: "str", int: "int", float: "float64"}.get(kind_of)
    if found is None:
        raise BadSample(
            f"its field {name!r} is a {type(value).__name__} for which MDS has no encoding: make it bytes, text, JSON, "
            "an array, or a number of 64 bits"
        )
    return found


def encoder_of(column: Column) -> Encode:
    """Return the function that encodes a column's values; it raises BadSample."""
    name = column.encoding
    if name.partition(":")[0] in RAW:
        return bytes_of_value
    if name == "ndarray":
        return _array
    if name == "str":
        return _text
    if name == "json":
        return dump_json
    kind = np.dtype("int64" if name == "int" else name)
    return lambda field, value: _scalar(field, value, kind)


def _scalar(field: str, value: Any, dtype: np.dtype[Any]) -> bytes:
    little = dtype.newbyteorder("<")
    try:
        if dtype.kind == "f":
            if not isinstance(value, int | float | np.integer | np.floating):
                raise TypeError("not a number")
            return to_floats([value], little).tobytes()
        number, limits = operator.index(value), np.iinfo(dtype)
        if isinstance(value, bool) or not limits.min <= number <= limits.max:
            raise ValueError("out of range")
        return np.array(number, little).tobytes()
    except (TypeError, ValueError, OverflowError):
        raise BadSample(
            f"its field {field!r} is {str(value)[:80]}, which column type {dtype.name} cannot hold"
        ) from None


def _array(field: str, value: Any) -> bytes:
    if not isinstance(value, np.ndarray) or value.dtype.name not in CODE_OF_DTYPE:
        kind = f"array of {value.dtype.name}" if isinstance(value, np.ndarray) else type(value).__name__
        raise BadSample(f"its field {field!r} is no array of numbers, but {kind}")
    array = cast("np.ndarray[Any, np.dtype[Any]]", value)
    if not array.ndim or 0 in array.shape or array.ndim > 63 or max(array.shape) >= UINT32:
        raise BadSample(
            f"its field {field!r} has shape {array.shape}; MDS holds arrays of 1 or more dimensions above 0"
        )
    width = next(each for each in range(3) if max(array.shape) < 1 << (8 << each))
    head = bytes([CODE_OF_DTYPE[array.dtype.name], array.ndim << 2 | width])
    dims = b"".join(each.to_bytes(1 << width, "little") for each in array.shape)
    return head + dims + array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()


def _text(field: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise BadSample(f"its field {field!r} is a {type(value).__name__}; the column is text")
    return encode_text(field, value)
