"""Writes Parquet shards, by pyarrow. Pure.

Data path: samples -> [parquet_writer] -> parts, as Arrow's streams -> shard.

A row is a sample. Before a shard is assembled its size is not known: it is cut by the bytes of its values, before
Parquet encodes and compresses them. `parquet` reads it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import Buffer

from asyncloader.formats.encoder import (
    RESERVED,
    BadSample,
    EncodedBatch,
    EncodedSamples,
    EncodingFailure,
    Part,
    ShardEncoder,
    check_fields,
    to_floats,
)
from asyncloader.formats.rows import pyarrow

GROUP_BYTES = 16 << 20
"""Approximate bytes of a row group: what a reader holds at a time, and the least part that it can be given."""

PAGE_BYTES = 1 << 20


class ParquetEncoder(ShardEncoder):
    """Encodes samples as rows.

    Args:
        columns: the fields' types: a `pyarrow.Schema`, or a dictionary of pyarrow types; None: `of_first` finds them.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: `columns` is neither, or names a reserved field.
    """

    largest = (1 << 31) - 1  # of the values of a binary column in Arrow

    def __init__(self, columns: Any = None) -> None:
        arrow, _ = pyarrow()
        self.schema: Any = arrow.schema([])  # of no samples
        if columns is None:
            return
        try:
            self.schema = columns if isinstance(columns, arrow.Schema) else arrow.schema(dict(columns))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"columns= is neither a pyarrow.Schema nor a dictionary of pyarrow types: {error}"
            ) from None
        if not self.schema.names or RESERVED & set(self.schema.names) or len(set(self.schema.names)) < len(self.schema):
            raise ValueError("columns= names no column, one twice, or __key__ or __url__, which the reader sets")

    @classmethod
    def of_first(cls, sample: Mapping[str, Any]) -> ParquetEncoder:
        """Return the encoder whose columns hold the values of the first sample.

        Raises:
            BadSample: Arrow has no type for a value.
        """
        columns = {name: type_of(name, value) for name, value in sample.items() if name not in RESERVED}
        if not columns:
            raise BadSample("it has no field; a Parquet file has at least one column")
        return cls(columns)

    def describe(self) -> Any:
        """Return the schema, like `ShardEncoder.describe`."""
        return base64.b64encode(self.schema.serialize()).decode()

    def batch(self) -> EncodedBatch:
        """Begin to encode rows as a stream of Arrow's, like `ShardEncoder.batch`."""
        return _RowBatch(self.schema)

    def assemble(self, parts: Sequence[Part]) -> list[Buffer]:
        """Return the bytes of a file, like `ShardEncoder.assemble`."""
        arrow, parquet = pyarrow()
        tables: list[Any] = [self.schema.empty_table()]
        largest, total, rows = 1, 0, 0
        for encoded, first, stop in parts:
            (data,) = encoded.data
            with arrow.ipc.open_stream(arrow.py_buffer(data)) as stream:
                tables.append(stream.read_all().slice(first, stop - first))
            sizes = encoded.sizes[first:stop]
            largest, total, rows = max(largest, int(sizes.max())), total + int(sizes.sum()), rows + len(sizes)
        # One chunk: pages must not depend on the parts.
        table = arrow.concat_tables(tables).combine_chunks()
        sink = arrow.BufferOutputStream()
        parquet.write_table(
            table,
            sink,
            row_group_size=max(1, min(1 << 20, rows * GROUP_BYTES // max(total, 1))),
            # A page ends only after such a number of rows: pages of large values would have hundreds of megabytes.
            write_batch_size=max(1, min(1024, PAGE_BYTES // largest)),
            data_page_size=PAGE_BYTES,
            write_page_checksum=True,
        )
        return [memoryview(sink.getvalue())]


class _RowBatch(EncodedBatch):
    def __init__(self, schema: Any) -> None:
        super().__init__()
        self._schema = schema
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._sizes: list[int] = []

    def _add(self, sample: Mapping[str, Any]) -> None:
        check_fields(sample, self._columns)
        size = 0
        for name, column in self._columns.items():
            value = sample[name]
            size += size_of(value)
            column.append(value.copy() if isinstance(value, np.ndarray | bytearray) else value)
        self._sizes.append(size)
        self.size += size

    def finish(self) -> EncodedSamples:
        """Return the rows, like `EncodedBatch.finish`."""
        arrow, _ = pyarrow()
        try:
            batch = self._batch(0, self.count)
        except BadSample:
            batch = self._before_bad()
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(batch)
        sizes = np.array(self._sizes[: self.count], np.int64)
        return EncodedSamples([memoryview(sink.getvalue())], sizes, [], self.failure)

    def _before_bad(self) -> Any:
        """Return the rows before the first that does not fit its columns, which becomes the failure."""
        for number in range(self.count):
            try:
                self._batch(number, number + 1)
            except BadSample as error:
                self.failure, self.count = EncodingFailure(number, "", str(error)), number
                break
        return self._batch(0, self.count)

    def _batch(self, first: int, stop: int) -> Any:
        arrow, _ = pyarrow()
        columns = [column_of(field, self._columns[field.name][first:stop]) for field in self._schema]
        return arrow.record_batch(columns, schema=self._schema)


def type_of(name: str, value: Any) -> Any:
    """Return Arrow's type for values like this one. Arrays become lists of fixed size, or tensors of fixed shape.

    Raises:
        BadSample: Arrow has no type, or only a part of one, for the value.
    """
    arrow, _ = pyarrow()
    try:
        if not isinstance(value, np.ndarray):
            found = arrow.array([value]).type
        elif value.ndim == 1 and len(value):
            found = arrow.list_(arrow.from_numpy_dtype(value.dtype), len(value))
        elif value.ndim > 1 and value.size:
            found = arrow.fixed_shape_tensor(arrow.from_numpy_dtype(value.dtype), value.shape)
        else:
            raise BadSample(f"its field {name!r} is an array of shape {value.shape}, which Parquet cannot hold")
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, BadSample):
            raise
        raise BadSample(f"its field {name!r} has no type of Arrow: {str(error)[:300]}") from None
    if "null" in str(found):
        raise BadSample(f"its field {name!r} does not show its type (a None, or an empty list): name it by columns=")
    return found


def column_of(field: Any, values: list[Any]) -> Any:
    """Return a column of Arrow's with these values.

    Raises:
        BadSample: a value does not fit the column's type.
    """
    arrow, _ = pyarrow()
    kind = field.type
    try:
        if isinstance(kind, arrow.BaseExtensionType):
            shape = tuple(kind.shape) if isinstance(kind, arrow.FixedShapeTensorType) else None
            storage = _array([_flat(value, shape) for value in values], kind.storage_type)
            return arrow.ExtensionArray.from_storage(kind, storage)
        return _array([_flat(value, None) for value in values], kind)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise BadSample(f"its field {field.name!r} does not fit the column's type {kind}: {str(error)[:300]}") from None


def _array(values: list[Any], kind: Any) -> Any:
    """Return an array of this type. Arrow alone would cut off fractions, and take bytes for text.

    Raises:
        Exception: a value does not fit.
    """
    arrow, _ = pyarrow()
    if _family(kind) is None:
        return arrow.array(values, kind)
    found = arrow.array(values)
    if not _fits(found.type, kind):
        raise ValueError(f"its type is {found.type}")
    if "float" in str(kind) and found.type != kind:
        _check_floats(values, kind)
    return found.cast(kind)


def _check_floats(values: Sequence[Any], kind: Any) -> None:
    """Refuse numbers that floats of 16 or 32 bits, at any depth of this type, would make infinite or other integers.

    Raises:
        Exception: one is among the values.
    """
    types = pyarrow()[0].types
    if isinstance(values, list):
        values = [value for value in values if value is not None]
    if types.is_floating(kind):
        to_floats(values, f"<f{kind.bit_width // 8}")
    elif types.is_struct(kind):
        for field in kind:
            _check_floats([value.get(field.name) for value in values], field.type)
    elif _family(kind) == "list":
        for value in values:
            _check_floats(value, kind.value_type)


def _family(kind: Any) -> str | None:
    """Return what a type's values are; None for types that are not compared."""
    types = pyarrow()[0].types
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list"
    return "bool" if types.is_boolean(kind) else "struct" if types.is_struct(kind) else None


def _fits(found: Any, kind: Any) -> bool:
    """Return whether values of type `found` are of the kind of `kind`, so that a checked cast changes none."""
    family = _family(kind)
    if family is None or found == kind or str(found) == "null":
        return True
    if _family(found) != family:
        return False
    if family == "list":
        return _fits(found.value_type, kind.value_type)
    if family == "struct":
        names = [field.name for field in kind]
        return all(field.name in names and _fits(field.type, kind.field(field.name).type) for field in found)
    return True


def _flat(value: Any, shape: tuple[int, ...] | None) -> Any:
    if shape is not None and value is not None and np.shape(value) != shape:
        raise ValueError(f"its shape is {np.shape(value)}, not {shape}")
    if shape is None and isinstance(value, np.ndarray) and value.ndim > 1:
        return value.tolist()
    return value.reshape(-1) if isinstance(value, np.ndarray) else value


def size_of(value: Any) -> int:
    """Return the bytes that a value takes in memory, approximately, but always the same for the same value."""
    if isinstance(value, str):
        return 4 + (len(value) if value.isascii() else len(value.encode(errors="surrogatepass")))
    if isinstance(value, bytes | bytearray):
        return 4 + len(value)
    if isinstance(value, np.ndarray | np.generic | memoryview):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        fields: Mapping[Any, Any] = value
        return sum([size_of(each) for each in fields.values()])
    if isinstance(value, list | tuple):
        items: Sequence[Any] = value
        return 4 + sum([size_of(each) for each in items])
    return 8
