"""Imports pyarrow, and turns its columns into values of samples. Pure.

Data path: parquet: record batch -> [arrow_values] -> rows.
"""

from __future__ import annotations

import importlib
from typing import Any

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


def values(column: Any) -> Column:
    """Return a column's values, one per row: an array of its numbers; for fixed-size lists of numbers, an array with a
    row of shape ``(size,)`` for each; for fixed-shape tensors, with a row of their shape. Of other types, and with a
    null, which is None: a list of Python objects.

    Raises:
        Exception: a value has no Python form: text that is not UTF-8 (UnicodeDecodeError), a date beyond the year 9999.
    """
    arrow, _ = pyarrow()
    kind = column.type
    if isinstance(kind, arrow.FixedShapeTensorType):
        if column.null_count:
            return list(column.to_pylist())
        tensors = np.asarray(column.to_numpy_ndarray())
        return tensors if tensors.ndim > 1 else [np.array(tensor) for tensor in tensors]
    if isinstance(kind, arrow.BaseExtensionType):
        return values(column.storage)
    if _is_plain_number(arrow, kind) and not column.null_count:
        return np.asarray(column)
    if not (arrow.types.is_fixed_size_list(kind) and _is_number(arrow, kind.value_type)):
        return list(column.to_pylist())
    items = column.flatten()  # without the null rows
    if items.null_count:
        return list(column.to_pylist())
    rows = np.asarray(items.to_numpy(zero_copy_only=False)).reshape(len(column) - column.null_count, kind.list_size)
    if not column.null_count:
        return rows
    # Copies: a row that is kept for long must not hold its whole batch.
    filled = iter(rows)
    return [next(filled).copy() if valid else None for valid in column.is_valid().to_pylist()]


def _is_plain_number(arrow: Any, kind: Any) -> bool:
    """Whether numpy's `tolist` makes the same Python numbers of them as pyarrow."""
    return bool(arrow.types.is_integer(kind) or arrow.types.is_float32(kind) or arrow.types.is_float64(kind))


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))
