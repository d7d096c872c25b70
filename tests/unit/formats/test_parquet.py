"""Parquet rows: values, windows of bytes instead of whole row groups, and files that lie."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import io
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncloader.formats import Located, LocatedSamples, OnBad, ShardError
from asyncloader.formats.parquet import Fetch, Footer, RowOptions, read_batches
from asyncloader.formats.rows import RecordBatchRows
from tests.unit.formats.test_parquet_footer import URL, encrypted, footer_of, lying, written
from tests.unit.remote.shards import parquet


class Ranges:
    """Returns ranges of `data` at once, and records the ranges that were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[list[tuple[int, int]]] = []

    def __call__(self, ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
        self.asked.append(list(ranges))
        answer: Future[Sequence[bytes]] = Future()
        answer.set_result([self.data[start : start + length] for start, length in ranges])
        return answer


def read_rows(
    footer: Footer,
    fetch: Fetch,
    *,
    start: int = 0,
    stop: int | None = None,
    on_bad: OnBad | None = None,
    **options: Any,
) -> Iterator[LocatedSamples]:
    """The samples of rows."""
    chosen = RowOptions(**options)
    found = RecordBatchRows(footer.url, chosen.max_sample_bytes, on_bad)
    for batch, at, found.place in read_batches(footer, fetch, start=start, stop=stop, options=chosen):
        yield from found.read(batch, at, start, footer.rows if stop is None else stop)


def rows_of(data: bytes, ranges: Ranges | None = None, **options: Any) -> list[Located]:
    return [found for batch in read_rows(footer_of(data), ranges or Ranges(data), **options) for found in batch]


def test_a_column_whose_name_has_a_dot() -> None:
    """The name means that column, and not also a field of another column."""
    data = written(pa.table({"a.b": [1, 2], "a": [{"b": 3}, {"b": 4}]}))
    assert [found.sample.keys() for found in rows_of(data, columns=["a.b"])] == [{"a.b", "__key__", "__url__"}] * 2


def test_rows_are_samples() -> None:
    """Samples have key, URL and Python's own values; the resume offset is the next row."""
    found = rows_of(parquet(range(20)), start=5, stop=16)
    assert [(sample["n"], resume) for sample, resume in found] == [(number, number + 1) for number in range(5, 16)]
    assert found[0].sample == {"n": 5, "text": "5" * 10, "__key__": "a.parquet:5", "__url__": URL}


def test_no_rows() -> None:
    """A read from the end of a file, as after its last sample, and a file without rows have no samples."""
    assert rows_of(parquet(range(20)), start=20) == []
    assert rows_of(written(pa.table({"n": pa.array([], pa.int64())}))) == []


def test_values_of_every_kind() -> None:
    """Bytes stay bytes; nulls are None; lists and structs are Python's; fixed-size lists of numbers are arrays."""
    day = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)
    table = pa.table(
        {
            "bytes": [b"\x00\xff", None],
            "list": [[1, 2], []],
            "struct": [{"a": None}, {"a": "x"}],
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "time": [day, None],
            "decimal": [decimal.Decimal("1.50"), decimal.Decimal("-2.00")],
            "letters": pa.array(["a", "b"]).dictionary_encode(),
            "fixed": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int16(), 3)),
            "holes": pa.array([None, [0.5, 1.5]], pa.list_(pa.float32(), 2)),
            "inner": pa.array([[1, None], [2, 3]], pa.list_(pa.int8(), 2)),
            "words": pa.array([["a"], ["b"]], pa.list_(pa.string(), 1)),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3)),
        }
    )
    first, second = (sample for sample, _ in rows_of(written(table)))
    assert (first["bytes"], second["bytes"]) == (b"\x00\xff", None)
    assert (first["list"], first["struct"], first["map"]) == ([1, 2], {"a": None}, [("k", 1)])
    assert (first["time"], first["decimal"], second["letters"]) == (day, decimal.Decimal("1.50"), "b")
    assert first["fixed"].dtype == np.int16
    np.testing.assert_array_equal(second["fixed"], [4, 5, 6])
    assert first["holes"] is None
    np.testing.assert_array_equal(second["holes"], np.array([0.5, 1.5], np.float32))
    assert (first["inner"], first["words"]) == ([1, None], ["a"])
    np.testing.assert_array_equal(second["tensor"], np.arange(6, 12).reshape(2, 3))
    for array in (first["fixed"], second["holes"], first["tensor"]):
        assert array.flags.writeable
        assert array.base is None or array.base.nbytes == array.nbytes  # a row does not keep its batch's memory


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "lz4", "data_page_size": 64, "use_dictionary": False},
        {"compression": "brotli", "store_schema": False},
    ],
    ids=lambda options: options["compression"],
)
def test_every_way_of_writing(options: dict[str, Any]) -> None:
    """For each compression, page version and encoding the rows are those of pyarrow's own reader."""
    data = parquet(range(100), group=33, **options)
    expected = pq.read_table(io.BytesIO(data)).to_pylist()
    found = rows_of(data)
    assert [{"n": sample["n"], "text": sample["text"]} for sample, _ in found] == expected


def test_columns_are_chosen() -> None:
    """Only the chosen columns' bytes are read; an unknown name is an error that lists the existing columns."""
    data = parquet(range(20), size=1000)
    ranges = Ranges(data)
    assert rows_of(data, ranges, columns=["n"])[3].sample.keys() == {"n", "__key__", "__url__"}
    assert sum(length for asked in ranges.asked for _, length in asked) < len(data) / 5
    with pytest.raises(ValueError, match=r"no column 'm'; it has 'n', 'text'"):
        rows_of(data, columns=["n", "m"])
    with pytest.raises(ValueError, match="names no column"):
        rows_of(data, columns=[])


def test_small_row_groups_are_read_one_ahead() -> None:
    """Each row group is one request, made before the first row of the group before it is given."""
    data = parquet(range(40), group=10)
    ranges = Ranges(data)
    batches = read_rows(footer_of(data), ranges)
    next(batches)
    assert len(ranges.asked) == 2
    assert sum(len(batch) for batch in batches) == 30
    assert len(ranges.asked) == 4


def test_a_large_row_group_is_read_in_windows() -> None:
    """No more of it is held than windows of each column, and windows on their way."""
    rng = np.random.default_rng(0)
    count = 4000
    table = pa.table({"n": np.arange(count), "a": [rng.bytes(500) for _ in range(count)], "b": rng.random(count)})
    data = written(table, row_group_size=count, use_dictionary=False, data_page_size=1 << 14)
    ranges = Ranges(data)
    found = rows_of(data, ranges, window_bytes=1 << 18)
    assert [sample["n"] for sample, _ in found] == list(range(count))
    assert len(data) > 6 << 18
    assert max(length for asked in ranges.asked for _, length in asked) <= 1 << 18
    asked = sorted(each for asked in ranges.asked for each in asked)
    ends = [start + length for start, length in asked]
    assert all(start >= end for (start, _), end in zip(asked[1:], ends, strict=False))  # no byte is read twice


def test_values_without_a_python_form_can_be_stepped_over() -> None:
    """The rows around them are given; without `on_bad` the first is raised, after the rows before it."""
    texts = pa.array([b"a", b"\xff", b"c", b"\xfe\xfe", b"e"])
    table = pa.table({"s": pa.Array.from_buffers(pa.string(), 5, texts.buffers())})
    data = written(table)
    told: list[ShardError] = []
    found = rows_of(data, on_bad=told.append)
    assert [(sample["s"], resume) for sample, resume in found] == [("a", 1), ("c", 3), ("e", 5)]
    assert ["row 1 " in str(error) or "row 3 " in str(error) for error in told] == [True, True]
    batches = read_rows(footer_of(data), Ranges(data))
    assert [sample["s"] for sample, _ in next(batches)] == ["a"]
    with pytest.raises(ShardError, match="row 1 has a value with no Python form: 'utf-8'"):
        next(batches)


def test_rows_are_bounded() -> None:
    """A row of more than `max_sample_bytes` is refused, after the rows before it."""
    data = written(pa.table({"b": [bytes(10), bytes(10), bytes(5000), bytes(10)]}))
    batches = read_rows(footer_of(data), Ranges(data), max_sample_bytes=1000)
    assert [len(next(batches)), len(next(batches))] == [1, 1]
    with pytest.raises(ShardError, match=r"row 2 takes 5,.* more than max_sample_bytes=1,000"):
        next(batches)


def test_rows_with_a_large_dictionary_are_small() -> None:
    """A row of a column of categories takes its own value, and not all of its column's."""
    names = [f"{n}" * 100 for n in range(50)]
    data = written(pa.table({"name": pa.array(names).dictionary_encode()}))
    assert [sample["name"] for sample, _ in rows_of(data, max_sample_bytes=1000)] == names
    with pytest.raises(ShardError, match=r"row 10 takes 2.. bytes, more than max_sample_bytes=200"):
        rows_of(data, max_sample_bytes=200)


def test_lying_counts_of_rows() -> None:
    """Row groups that claim more rows than they hold raise an error, after the rows that they hold."""
    data = lying(lying(parquet(range(500), group=300), 300, 305), 500, 505)
    got: list[Any] = []

    def read() -> None:
        for batch in read_rows(footer_of(data), Ranges(data)):
            got.extend(sample["n"] for sample, _ in batch)

    with pytest.raises(ShardError, match="row group 0"):
        read()
    assert got == list(range(len(got)))


def test_a_lying_offset_comes_after_the_rows_before_it() -> None:
    """The second row group claims to lie behind the file: the first is read nevertheless."""
    good = parquet(range(500), group=300, use_dictionary=False)
    data = lying(good, footer_of(good).group(1).chunks[0][0], 1 << 40)
    batches = read_rows(footer_of(data), Ranges(data))
    assert len(next(batches)) == 300
    with pytest.raises(ShardError, match="row group 1"):
        next(batches)


def test_errors_of_the_ranges_come_through() -> None:
    """pyarrow wraps the errors of its file; the original error is raised."""
    data = parquet(range(20))
    broken: Future[Sequence[bytes]] = Future()
    error = ConnectionError("gone")
    broken.set_exception(error)
    with pytest.raises(ConnectionError) as caught:
        next(read_rows(footer_of(data), lambda ranges: broken))
    assert caught.value is error


def test_a_read_that_failed_is_freed() -> None:
    """Although pyarrow refers to the file where the garbage collector does not look, and the error to the reader."""

    class Failing(Ranges):
        def __call__(self, ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
            answer: Future[Sequence[bytes]] = Future()
            answer.set_exception(OSError("gone"))
            return answer

    data = parquet(range(20))
    fetch = Failing(data)
    freed = weakref.ref(fetch)
    batches = read_batches(footer_of(data), fetch, start=0, stop=None, options=RowOptions())
    with suppress(OSError):
        next(batches)
    del batches, fetch
    gc.collect()
    assert freed() is None


def test_an_encrypted_column() -> None:
    """The metadata is encrypted, too: pyarrow's Python would end the process over it, so its C++ is asked first."""
    data = encrypted(plaintext_footer=True)
    with pytest.raises(ShardError, match="pyarrow cannot open row group 0: Cannot decrypt"):
        rows_of(data)
    assert [found.sample["a"] for found in rows_of(data, columns=["a"])] == [1, 2]
