"""pyarrow, imported when the first Parquet file is read; and its columns as Python values. Sans I/O.

Data path: column chunks -> record batch -> [values] -> samples.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

__all__ = ["pyarrow", "values"]


def pyarrow() -> tuple[Any, Any]:
    """Import ``pyarrow`` and ``pyarrow.parquet``, without their types: what stubs there are differ by version.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            f"Parquet shards need pyarrow, which cannot be imported ({error}): pip install 'asyncloader[parquet]'"
        ) from error


def values(column: Any) -> list[Any]:
    """A column's values, one a row: Python's own; fixed-size lists of numbers as arrays of shape ``(size,)``, each
    with memory of its own; fixed-shape tensors as arrays of their shape. A null is None.

    Raises:
        Exception: a value has no Python form: text that is not UTF-8 (UnicodeDecodeError), a date beyond the year 9999.
    """
    arrow, _ = pyarrow()
    kind = column.type
    if isinstance(kind, arrow.FixedShapeTensorType):
        if column.null_count:
            return list(column.to_pylist())
        return [np.array(row, order="C") for row in column.to_numpy_ndarray()]
    if isinstance(kind, arrow.BaseExtensionType):
        return values(column.storage)
    if not (arrow.types.is_fixed_size_list(kind) and _is_number(arrow, kind.value_type)):
        return list(column.to_pylist())
    items = column.flatten()  # without the rows that are null
    if items.null_count:
        return list(column.to_pylist())
    rows = np.asarray(items.to_numpy(zero_copy_only=False)).reshape(len(column) - column.null_count, kind.list_size)
    # Copies: a row that is kept for long must not hold its whole batch.
    if not column.null_count:
        return [row.copy() for row in rows]
    filled = iter(rows)
    return [next(filled).copy() if valid else None for valid in column.is_valid().to_pylist()]


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))
