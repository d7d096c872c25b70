"""Rows of a table as samples, each of which is made when it is asked for.

Data path: parquet: record batch -> columns -> [rows] -> decode, or collate.

A row's sample is a dictionary of all columns. Made just before it is decoded, it lies in the CPU's cache, and its
memory is used again for the next row. Where whole columns are collated, no sample is made at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from asyncloader.formats.base import Sample

Column: TypeAlias = list[Any] | npt.NDArray[Any]
"""A column's values, one per row. Of an array with one dimension, the samples get Python's numbers; of an array with
more, an array of their own for each row."""

MATRIX = 8
"""From this number of columns of one dtype on, their numbers are converted row by row: otherwise column by column."""


class RowTable:
    """Consecutive rows of a file.

    Args:
        columns: by name, each with a value per row. Those named as the keys below are overwritten.
        shard: name of the file, with which the keys begin.
        url: of the file.
        first: number of the first row in the file.
    """

    def __init__(self, columns: Mapping[str, Column], *, shard: str, url: str, first: int) -> None:
        self.names = list(dict.fromkeys([*columns, "__key__", "__url__"]))
        """The keys of each sample, in their order."""
        self.columns = {name: column for name, column in columns.items() if name not in ("__key__", "__url__")}
        """The columns of the file."""
        self._shard = shard
        self._url = url
        self._first = first
        self._template: Sample | None = None

    def sample(self, row: int) -> Sample:
        """Make the sample of a row, counted from 0. Any thread may call it."""
        template = self._template
        if template is None:
            template = self._prepare()
        # The copy has all keys in their order, and room for them: a fifth of the time less than adding them.
        sample = template.copy()
        for names, matrix in self._matrices:
            sample.update(zip(names, matrix[row].tolist(), strict=True))
        if self._names:
            sample.update(zip(self._names, self._lists[row], strict=True))
        for name, array in self._arrays:
            sample[name] = array[row].copy()  # a sample that is kept for long must not hold the whole table
        sample["__key__"] = f"{self._shard}:{self._first + row}"
        return sample

    def values(self, name: str, rows: Sequence[int]) -> list[Any]:
        """Return the values that the samples of these rows have at a key."""
        if name == "__key__":
            return [f"{self._shard}:{self._first + row}" for row in rows]
        if name == "__url__":
            return [self._url] * len(rows)
        column = _as_list(self.columns[name])
        return [column[row] for row in rows]

    def _prepare(self) -> Sample:
        """Arrange the columns for `sample`. Threads that do it at the same time get the same."""
        numbers: dict[np.dtype[Any], list[str]] = {}
        arrays: list[tuple[str, npt.NDArray[Any]]] = []
        lists: dict[str, list[Any]] = {}
        for name, column in self.columns.items():
            if not isinstance(column, np.ndarray):
                lists[name] = column
            elif column.ndim > 1:
                arrays.append((name, column))
            else:
                numbers.setdefault(column.dtype, []).append(name)
        matrices: list[tuple[list[str], npt.NDArray[Any]]] = []
        for names in numbers.values():
            if len(names) < MATRIX:
                lists.update((name, _as_list(self.columns[name])) for name in names)
            else:
                matrices.append((names, np.stack([self.columns[name] for name in names], 1)))
        self._arrays, self._matrices = arrays, matrices
        self._names, self._lists = list(lists), list(zip(*lists.values(), strict=True))
        # Last: a thread that finds the template relies on the rest.
        self._template = {**dict.fromkeys(self.names), "__url__": self._url}
        return self._template


def value_at(column: Column, row: int) -> Any:
    """Return the value that a row's sample has of a column."""
    if not isinstance(column, np.ndarray):
        return column[row]
    return column[row].item() if column.ndim == 1 else column[row].copy()


def _as_list(column: Column) -> list[Any]:
    if not isinstance(column, np.ndarray):
        return column
    values: list[Any] = column.tolist() if column.ndim == 1 else [row.copy() for row in column]
    return values


class Rows(Sequence[Sample]):
    """The samples of consecutive rows of a table; a slice makes none of them.

    Args:
        table: the table.
        within: the rows.
    """

    __slots__ = ("table", "within")

    def __init__(self, table: RowTable, within: range) -> None:
        self.table = table
        self.within = within

    def __len__(self) -> int:
        return len(self.within)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Sample | Rows:
        if isinstance(index, slice):
            return Rows(self.table, self.within[index])
        return self.table.sample(self.within[index])
