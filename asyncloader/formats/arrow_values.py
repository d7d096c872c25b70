"""Imports pyarrow, and turns its columns into values of samples. Pure.

Data path: parquet: record batch -> [arrow_values] -> rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from asyncloader.formats.rows import Column


def pyarrow() -> tuple[Any, Any]:
    """Import ``pyarrow`` and ``pyarrow.parquet``, without their types: their stubs differ by version.

    Raises:
        ImportError: pyarrow is not installed.
    """
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            f"Parquet shards need pyarrow, which cannot be imported ({error}): pip install 'asyncloader[parquet]'"
        ) from error


Convert: TypeAlias = Callable[[Any], Column]
"""Turns a column of one type into values, one per row."""


def values(column: Any) -> Column:
    """Return a column's values, one per row, like `converter`."""
    return converter(column.type)(column)


def converter(kind: Any, *, few: bool = False) -> Convert:
    """Return what turns a column of this type into values, one per row: an array of its numbers; for fixed-size lists
    of numbers, an array with a row of shape ``(size,)`` for each; for fixed-shape tensors, with a row of their shape.
    Of other types, and with a null, which is None: a list of Python objects. A list or a tensor with a null in it is a
    Python list; the others of its column stay arrays.

    It raises an error where a value has no Python form: text that is not UTF-8 (UnicodeDecodeError), a date beyond the
    year 9999.

    Args:
        kind: the type.
        few: of a few rows. A list of numbers takes less time then than an array, whose items become the same numbers.
    """
    arrow, _ = pyarrow()
    if isinstance(kind, arrow.FixedShapeTensorType):
        return _tensors
    if isinstance(kind, arrow.BaseExtensionType):
        stored = converter(kind.storage_type)
        return lambda column: stored(column.storage)
    if _is_plain_number(arrow, kind):
        return _objects if few else _numbers
    if arrow.types.is_fixed_size_list(kind) and _is_number(arrow, kind.value_type):
        return _lists
    return _objects


def _objects(column: Any) -> Column:
    found: list[Any] = column.to_pylist()
    return found


def _numbers(column: Any) -> Column:
    return _objects(column) if column.null_count else np.asarray(column)


def _tensors(column: Any) -> Column:
    if column.null_count or column.storage.flatten().null_count:
        return _objects(column) if len(column) == 1 else _one_by_one(_tensors, column)
    tensors = np.asarray(column.to_numpy_ndarray())
    return tensors if tensors.ndim > 1 else [np.array(tensor) for tensor in tensors]


def _lists(column: Any) -> Column:
    items = column.flatten()  # without the null rows
    if items.null_count:
        return _objects(column) if len(column) == 1 else _one_by_one(_lists, column)
    rows = np.asarray(items.to_numpy(zero_copy_only=False))
    rows = rows.reshape(len(column) - column.null_count, column.type.list_size)
    if not column.null_count:
        return rows
    # Copies: a row that is kept for long must not hold its whole batch.
    filled = iter(rows)
    return [next(filled).copy() if valid else None for valid in column.is_valid().to_pylist()]


def _one_by_one(convert: Convert, column: Any) -> Column:
    """Convert each row by itself: what becomes of a row must not depend on the rows that are read with it."""
    return [
        value.copy() if isinstance(value, np.ndarray) else value
        for row in range(len(column))
        for value in convert(column.slice(row, 1))
    ]


def plain_type(kind: Any) -> Any:
    """Return the type of the same values without dictionaries and views: a message of a few rows has no dictionary, and
    of a view all that the view is of.
    """
    arrow, _ = pyarrow()
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        stored = plain_type(kind.storage_type)
        return kind if stored == kind.storage_type else stored
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return arrow.large_string() if types.is_string_view(kind) else arrow.large_binary()
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return arrow.struct([field.with_type(plain_type(field.type)) for field in fields])
    if types.is_map(kind):
        return arrow.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if types.is_large_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return arrow.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return arrow.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    return kind


def _is_plain_number(arrow: Any, kind: Any) -> bool:
    """Whether numpy's `tolist` makes the same Python numbers of them as pyarrow."""
    return bool(arrow.types.is_integer(kind) or arrow.types.is_float32(kind) or arrow.types.is_float64(kind))


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))
