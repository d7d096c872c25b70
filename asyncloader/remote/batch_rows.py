"""The samples of a batch that are rows of tables: made one by one for `decode`, or collated column by column.

Data path: formats.rows -> worker_stream -> [batch_rows] -> decode or collate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from asyncloader.formats import Sample
from asyncloader.formats.rows import Column, RowTable
from asyncloader.workers.ipc.collate import SampleColumns


class BatchRows(SampleColumns):
    """Samples in the order of a batch; each is made when it is asked for.

    Args:
        rows: the table of each sample, and its row there.
    """

    def __init__(self, rows: Sequence[tuple[RowTable, int]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> BatchRows: ...
    def __getitem__(self, index: int | slice) -> Sample | BatchRows:
        if isinstance(index, slice):
            return BatchRows(self._rows[index])
        table, row = self._rows[index]
        return table.sample(row)

    def columns(self) -> dict[str, Column] | None:
        """Return the values of the samples at each key, in the order of the keys; None if the tables differ in them.

        A column of numbers is an array: of one dimension, if the samples have Python's numbers; of more, if arrays.
        """
        parts: dict[int, _Part] = {}
        places, rows = list[int](), list[int]()
        last: RowTable | None = None
        for place, (table, row) in enumerate(self._rows):
            if table is not last:
                last = table
                if (part := parts.get(id(table))) is None:
                    part = parts[id(table)] = _Part(table, [], [])
                _, places, rows = part
            places.append(place)
            rows.append(row)
        return _joined([*parts.values()])


class _Part(NamedTuple):
    """The samples that are rows of one table: their places in the batch, and their rows."""

    table: RowTable
    places: list[int]
    rows: list[int]


def _joined(parts: Sequence[_Part]) -> dict[str, Column] | None:
    names = parts[0].table.names
    if any(part.table.names != names for part in parts):
        return None
    order: list[int] = [place for part in parts for place in part.places]
    # For each place in the batch, that in the parts one after the other; None: they are in the batch's order.
    picks = None if order == list(range(len(order))) else np.argsort(np.array(order, np.intp))
    chosen = [_index(part.rows) for part in parts]
    return {name: _column(name, parts, chosen, picks) for name in names}


def _column(
    name: str,
    parts: Sequence[_Part],
    chosen: Sequence[slice | npt.NDArray[np.intp]],
    picks: npt.NDArray[np.intp] | None,
) -> Column:
    columns = [part.table.columns.get(name) for part in parts]
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    if len(arrays) < len(parts) or (dtype := _common_dtype(arrays)) is None:
        values = [value for part in parts for value in part.table.values(name, part.rows)]
        return values if picks is None else [values[pick] for pick in picks.tolist()]
    if len(parts) == 1:
        return arrays[0][chosen[0]]
    joined = np.concatenate([array[rows] for array, rows in zip(arrays, chosen, strict=True)], dtype=dtype)
    return joined if picks is None else joined[picks]


def _index(numbers: list[int]) -> slice | npt.NDArray[np.intp]:
    """Return a slice, which copies nothing, if the numbers follow each other."""
    first, after = numbers[0], numbers[0] + len(numbers)
    return slice(first, after) if numbers == list(range(first, after)) else np.array(numbers, np.intp)


def _common_dtype(arrays: list[npt.NDArray[Any]]) -> np.dtype[Any] | None:
    """Return a dtype that holds the numbers of all arrays as they are; None if there is none, or if samples of one
    array have other types or shapes than samples of another.
    """
    dtypes = {array.dtype for array in arrays}
    if len({array.shape[1:] for array in arrays}) > 1:
        return None
    if len(dtypes) == 1:
        return arrays[0].dtype
    # Python's numbers have the same type whatever the size; 64 bits without a sign have no common type with others.
    one_type = (
        arrays[0].ndim == 1 and len({dtype.kind == "f" for dtype in dtypes}) == 1 and np.dtype(np.uint64) not in dtypes
    )
    return np.result_type(*dtypes) if one_type else None
