"""A row group, decoded once, as a file that any process can map: its rows become samples when they are asked for. Pure.

Data path: parquet: record batches -> [arrow_chunk: Arrow IPC, not compressed] -> samples.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asyncloader.formats.arrow_values import pyarrow, values
from asyncloader.formats.base import Sample, ShardError, base_name
from asyncloader.formats.parquet import Footer, RecordBatchRows, read_batches
from asyncloader.formats.parquet_file import Fetch
from asyncloader.formats.rows import RowTable

_PLACE = b"asyncloader.place"


def _ipc() -> Any:
    pyarrow()
    return importlib.import_module("pyarrow.ipc")


def dump_rows(
    footer: Footer,
    fetch: Fetch,
    *,
    start: int,
    stop: int,
    columns: Sequence[str] | None,
    max_sample_bytes: int,
    window_bytes: int,
) -> bytes:
    """Decode rows ``[start, stop)`` of a file, which are those of row groups, to an Arrow IPC file. Blocks while bytes
    are fetched. Arguments and errors are those of `parquet.read_rows`.
    """
    arrow, _ = pyarrow()
    options: dict[str, Any] = {"max_sample_bytes": max_sample_bytes, "window_bytes": window_bytes}
    found = list(read_batches(footer, fetch, start=start, stop=stop, columns=columns, **options))
    place = found[0][2] if found else footer.end
    table = arrow.Table.from_batches(batch for batch, _, _ in found)
    if table.num_rows != stop - start:
        raise ShardError(f"rows {start:,} to {stop:,} are no row groups of this file", url=footer.url, offset=place)
    # One batch, unless a column has more than 2 GiB of text: a row is found without a search.
    table = table.unify_dictionaries().combine_chunks().replace_schema_metadata({_PLACE: str(place)})
    sink = arrow.BufferOutputStream()
    with _ipc().new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def parse_rows(view: memoryview, rows: Sequence[int], *, first: int, url: str, max_sample_bytes: int) -> list[Sample]:
    """Return the samples of rows, ascending by number. They do not refer to `view`.

    Args:
        view: the file that `dump_rows` made.
        rows: numbers in the Parquet file.
        first: number of the file's first row in the Parquet file.
        url: of the Parquet file.
        max_sample_bytes: refuse a row whose values take more bytes.

    Raises:
        ShardError: a row is too large, or has a value without a Python form.
    """
    arrow, _ = pyarrow()
    reader = _ipc().open_file(arrow.py_buffer(view))
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    starts = [first]
    for batch in batches:
        starts.append(starts[-1] + batch.num_rows)
    single = RecordBatchRows(url, max_sample_bytes, None)
    single.place = int((reader.schema.metadata or {}).get(_PLACE, b"0"))
    name = base_name(url)
    samples: list[Sample] = []
    at = 0
    while at < len(rows):
        number = bisect_right(starts, rows[at]) - 1
        start, batch = starts[number], batches[number]
        end = at
        while end < len(rows) and rows[end] < starts[number + 1]:
            end += 1
        found: list[Sample] = []
        with suppress(Exception):
            # A copy of these rows, of which whole columns are converted at a time.
            taken = batch.take(arrow.array([row - start for row in rows[at:end]]))
            if taken.nbytes <= max_sample_bytes:
                columns = {key: values(column) for key, column in zip(taken.schema.names, taken.columns, strict=True)}
                table = RowTable(columns, shard=name, url=url, first=0)
                found = [table.sample(row) | {"__key__": f"{name}:{rows[at + row]}"} for row in range(end - at)]
        if not found:  # a row is too large, or cannot be converted: it is found one by one, and raises its error
            for row in rows[at:end]:
                found += [located.sample for each in single.read(batch, start, row, row + 1) for located in each]
        samples += found
        at = end
    return samples
