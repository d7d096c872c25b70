"""Rows of tables as samples, each of which is made when it is asked for. Imports pyarrow, and turns its columns into
values.

Data path: parquet: record batch -> [rows: columns -> rows] -> decode, or collate.

A row's sample is a dictionary of all columns. Made just before it is decoded, it lies in the CPU's cache, and its
memory is used again for the next row. Where whole columns are collated, no sample is made at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from asyncloader.errors import ShardError
from asyncloader.formats.base import LocatedSamples, OnBad, Sample, base_name

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


class RecordBatchRows:
    """Turns record batches into samples. `place` is the offset of their row group, for errors."""

    place = 0

    def __init__(self, url: str, max_sample_bytes: int, on_bad: OnBad | None) -> None:
        self._url = url
        self._name = base_name(url)
        self._max = max_sample_bytes
        self._on_bad = on_bad

    def read(self, batch: Any, at: int, start: int, stop: int) -> Iterator[LocatedSamples]:
        """Yield the rows in ``[start, stop)`` of a batch whose first row is number `at`; then raise the first error."""
        first, after = max(start, at), min(stop, at + batch.num_rows)
        if first >= after:
            return
        batch = batch.slice(first - at, after - first)
        found: LocatedSamples | None = None
        # Otherwise a row is bad: read again, row by row, to find it and keep the others.
        with suppress(Exception):
            # Row by row only if a row may be too large: the size of a slice takes long to compute.
            if batch.nbytes > self._max:
                self._check_sizes(batch, first)
            found = self._rows(batch, first)
        if found is not None:
            yield found
        else:
            yield from self._read_single_rows(batch, first)

    def _rows(self, batch: Any, first: int) -> LocatedSamples:
        columns = {name: values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        table = RowTable(columns, shard=self._name, url=self._url, first=first)
        return LocatedSamples(Rows(table, range(batch.num_rows)), range(first + 1, first + batch.num_rows + 1))

    def _read_single_rows(self, batch: Any, first: int) -> Iterator[LocatedSamples]:
        """Yield the good rows, each by itself.

        Raises:
            ShardError: a row is bad and cannot be skipped.
        """
        for row in range(batch.num_rows):
            single, number = batch.slice(row, 1), first + row
            try:
                self._check_sizes(single, number)
                found = self._rows(single, number)
            except ShardError:
                raise
            except Exception as error:
                reason = str(error)[:300] or type(error).__name__
                bad = self._error(f"row {number:,} has a value with no Python form: {reason}")
                bad.resume = number + 1
                if self._on_bad is None:
                    raise bad from error
                bad.__cause__ = error
                self._on_bad(bad)
            else:
                yield found

    def _check_sizes(self, batch: Any, first: int) -> None:
        arrow, _ = pyarrow()
        for row in range(batch.num_rows):
            # A dictionary is the batch's: of it, a row takes one value.
            size = sum(
                (column.dictionary_decode() if isinstance(column, arrow.DictionaryArray) else column).nbytes
                for column in batch.slice(row, 1).columns
            )
            if size > self._max:
                raise self._error(f"row {first + row:,} takes {size:,} bytes, more than max_sample_bytes={self._max:,}")

    def _error(self, message: str) -> ShardError:
        return ShardError(f"{message}, in the row group that begins here", url=self._url, offset=self.place)


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


def _is_plain_number(arrow: Any, kind: Any) -> bool:
    """Whether numpy's `tolist` makes the same Python numbers of them as pyarrow."""
    return bool(arrow.types.is_integer(kind) or arrow.types.is_float32(kind) or arrow.types.is_float64(kind))


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))
