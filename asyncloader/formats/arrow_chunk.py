"""A row group, decoded once, as a file of which any process reads single rows. Pure.

Data path: parquet: record batches -> [arrow_chunk: Arrow IPC messages of a few rows each] -> samples.

The file has a message for each few rows, then the schema's message, then the table of the messages: the numbers of
their first rows and, last, the number of rows; their offsets and, last, that of the schema, all int64. Its end says
where these begin.
"""

from __future__ import annotations

import importlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np

from asyncloader.errors import ShardError
from asyncloader.formats.base import Sample, base_name
from asyncloader.formats.parquet import Fetch, Footer, RowOptions, read_batches
from asyncloader.formats.rows import Column, RecordBatchRows, converter, pyarrow, value_at

Read: TypeAlias = Callable[[int, int], bytes]
"""Reads bytes of a file. Its arguments are a position and a length."""

_MESSAGE_BYTES = 1 << 13
"""A message has about as many bytes of rows: all of them are read for one row. One row may have more."""

_COLUMN_BYTES = 256
"""More of them for each column, of which each message has a description of some 60 bytes."""

_FEW = 8  # rows for which to make an array of a column takes longer than to make its numbers

_END = struct.Struct("<qqq")  # offsets of the schema and of the table; offset of the row group in the Parquet file


def _ipc() -> Any:
    pyarrow()
    return importlib.import_module("pyarrow.ipc")


def dump_rows(footer: Footer, fetch: Fetch, *, start: int, stop: int, options: RowOptions) -> bytes:
    """Decode rows ``[start, stop)`` of a file, which are those of row groups, for `RowsFile`. Blocks while bytes are
    fetched. Arguments and errors are those of `parquet.read_batches`.
    """
    arrow, _ = pyarrow()
    sink = arrow.BufferOutputStream()
    firsts, offsets = [0], [0]
    place, schema = footer.end, None
    for batch, _, place in read_batches(footer, fetch, start=start, stop=stop, options=options):
        try:
            table = _plain(arrow.Table.from_batches([batch])).replace_schema_metadata(None)
        except MemoryError:
            raise
        except Exception as error:  # such as a number that is not in its dictionary
            message = f"the row group that begins here has a value that cannot be read: {str(error)[:300]}"
            raise ShardError(message, url=footer.url, offset=place) from error
        schema = table.schema
        size = _MESSAGE_BYTES + _COLUMN_BYTES * table.num_columns
        for part in table.to_batches(max_chunksize=max(1, size * table.num_rows // max(1, table.nbytes))):
            sink.write(part.serialize())
            firsts.append(firsts[-1] + part.num_rows)
            offsets.append(sink.tell())
    if schema is None or firsts[-1] != stop - start:
        raise ShardError(f"rows {start:,} to {stop:,} are no row groups of this file", url=footer.url, offset=place)
    sink.write(schema.serialize())
    end = _END.pack(offsets[-1], sink.tell(), place)
    sink.write(np.array([firsts, offsets], "<i8").tobytes())
    sink.write(end)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _plain(table: Any) -> Any:
    """Return the table with columns of a `plain_type`."""
    arrow, _ = pyarrow()
    for number, field in enumerate(table.schema):
        plain = plain_type(field.type)
        if plain != field.type:
            column = table.column(number)
            # Arrow's own conversion of list views loses rows.
            has_views = "list_view<" in str(field.type)
            column = arrow.array(column.to_pylist(), plain) if has_views else column.cast(plain)
            table = table.set_column(number, field.with_type(plain), column)
    return table


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


class RowsFile:
    """The rows of a file that `dump_rows` made.

    Args:
        read: reads the file.
        size: the number of its bytes.
        first: number of the file's first row in the Parquet file.
        url: of the Parquet file.
        max_sample_bytes: refuse a row whose values take more bytes.

    Raises:
        The errors of `read`.
    """

    def __init__(self, read: Read, size: int, *, first: int, url: str, max_sample_bytes: int) -> None:
        arrow, _ = pyarrow()
        schema, table, place = _END.unpack(read(size - _END.size, _END.size))
        data = read(schema, size - _END.size - schema)
        ipc = _ipc()
        self._schema = ipc.read_schema(arrow.py_buffer(data[: table - schema]))
        firsts, offsets = np.frombuffer(data[table - schema :], "<i8").reshape(2, -1)
        # Arrays of 8 bytes an item, whose items are Python's: of a row group of 128 MiB 256 KiB.
        self._firsts, self._offsets = (array("q", each.astype("q").tobytes()) for each in (firsts + first, offsets))
        self._columns, self._columns_of_few = (
            [(field.name, converter(field.type, few=few)) for field in self._schema] for few in (False, True)
        )
        self._template: Sample = dict.fromkeys([*self._schema.names, "__key__", "__url__"])
        self._batch_of = ipc.read_record_batch
        self._buffer = arrow.py_buffer
        self._name = base_name(url)
        self._url = url
        self._max = max_sample_bytes
        self._single = RecordBatchRows(url, max_sample_bytes, None)
        self._single.place = place

    def samples(self, read: Read, rows: Sequence[int]) -> list[Sample]:
        """Return the samples of rows, ascending by their numbers in the Parquet file.

        Args:
            read: reads the file.
            rows: the numbers.

        Raises:
            ShardError: a row is too large, or has a value without a Python form.
            The errors of `read`.
        """
        samples: list[Sample] = []
        at, count = 0, len(rows)
        while at < count:
            number = bisect_right(self._firsts, rows[at]) - 1
            end, stop = at + 1, self._firsts[number + 1]
            while end < count and rows[end] < stop:
                end += 1
            samples += self._of_message(read, number, rows[at:end])
            at = end
        for at in range(1, count):
            if rows[at] == rows[at - 1]:  # who changes a list in one of them must not change the other
                samples[at] = deepcopy(samples[at - 1])
        return samples

    def _of_message(self, read: Read, number: int, rows: Sequence[int]) -> list[Sample]:
        begin, end = self._offsets[number : number + 2]
        data = read(begin, end - begin)
        batch = self._batch_of(self._buffer(data), self._schema)
        start = self._firsts[number]
        if len(data) <= self._max:  # no row can be too large
            with suppress(Exception):
                # From the first to the last: to convert some that are not asked for takes less time than to pick rows.
                first, count = rows[0], rows[-1] + 1 - rows[0]
                part = batch if count == batch.num_rows else batch.slice(first - start, count)
                converters = self._columns if count > _FEW else self._columns_of_few
                columns = [(name, convert(part.column(at))) for at, (name, convert) in enumerate(converters)]
                return [self._sample(columns, row, row - first) for row in rows]
        # A row is too large, or cannot be converted: it is found one by one, and raises its error.
        return [
            located.sample for row in rows for each in self._single.read(batch, start, row, row + 1) for located in each
        ]

    def _sample(self, columns: list[tuple[str, Column]], number: int, row: int) -> Sample:
        sample = self._template.copy()
        for name, column in columns:
            sample[name] = value_at(column, row)
        sample["__key__"] = f"{self._name}:{number}"
        sample["__url__"] = self._url
        return sample
