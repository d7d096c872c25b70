"""Decoded row groups: any rows are those of the whole file, and their messages are all that is read for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncloader.formats import ShardError
from asyncloader.formats.arrow_chunk import RowsFile, dump_rows
from asyncloader.formats.parquet import RowOptions
from tests.unit.formats.test_parquet import Ranges, rows_of
from tests.unit.formats.test_parquet_footer import URL, footer_of, written


class Counted:
    """Reads a decoded file, and counts."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = 0

    def __call__(self, start: int, length: int) -> bytes:
        assert 0 <= start <= start + length <= len(self.data)
        self.nbytes += length
        return self.data[start : start + length]


def opened(
    data: bytes, start: int, stop: int, most: int = 1 << 30, columns: list[str] | None = None
) -> tuple[RowsFile, Counted]:
    """Rows ``[start, stop)`` of a Parquet file, which are row groups, decoded and opened."""
    options = RowOptions(columns, most, 1 << 20)
    footer = footer_of(data)
    read = Counted(dump_rows(footer, Ranges(data), start=start, stop=stop, options=options))
    return RowsFile(read, len(read.data), first=start, url=URL, max_sample_bytes=most), read


ROWS = 300


def with_holes(make: Callable[[int], Any]) -> list[Any]:
    """A column of which every seventh value is missing."""
    return [None if row % 7 == 3 else make(row) for row in range(ROWS)]


def lists(make: Callable[[int], Any]) -> list[Any]:
    return with_holes(lambda row: [make(row + each) for each in range(row % 4)])


KINDS: dict[str, Any] = {
    "float": np.linspace(0, 1, ROWS, dtype=np.float32),
    "int with nulls": with_holes(int),
    "text": [f"text {row}" * (row % 5) for row in range(ROWS)],
    "category with nulls": pa.array(with_holes(lambda row: f"c{row % 5}")).dictionary_encode(),
    "categories": pa.array(lists(lambda row: f"c{row % 5}"), pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "struct of category": pa.array(
        [{"c": f"c{row % 5}", "n": row} for row in range(ROWS)],
        pa.struct([("c", pa.dictionary(pa.int8(), pa.string())), ("n", pa.int64())]),
    ),
    "list": lists(int),
    "struct": with_holes(lambda row: {"bytes": bytes([row % 256]), "path": None if row % 2 else str(row)}),
    "vector with nulls": pa.array(with_holes(lambda row: [row, 0.5]), pa.list_(pa.float32(), 2)),
    "vector with holes": pa.array([[row, None if row % 7 == 3 else 2] for row in range(ROWS)], pa.list_(pa.int16(), 2)),
    "tensor with nulls": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2, 1]),
        pa.array(with_holes(lambda row: [row, None if row % 5 == 1 else 2]), pa.list_(pa.int32(), 2)),
    ),
    "views": pa.array(lists(lambda row: f"text {row}"), pa.list_(pa.string_view())),
}


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal, with the types of their values."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: kind or "all")
def test_rows_are_those_of_the_file(kind: str | None) -> None:
    """Of each type: single rows and runs, in one message and in several, at the ends and in the middle; none refers to
    what was read.
    """
    table = pa.table({name: column for name, column in KINDS.items() if kind in (name, None)})
    data = written(table, row_group_size=100)
    whole = [sample for sample, _ in rows_of(data)]
    file, read = opened(data, 100, 300)
    draw = random.Random(1)
    for count in (1, 1, 2, 7, 60, 200):
        rows = sorted(draw.sample(range(100, 300), count))
        found = file.samples(read, rows)
        assert all(map(same, found, [whole[row] for row in rows]))
        assert len(found) == count
        for sample in found:
            for value in sample.values():
                if isinstance(value, np.ndarray):
                    assert value.base is None or value.base.nbytes == value.nbytes
    assert all(map(same, file.samples(read, [100, 299]), [whole[100], whole[299]]))


@pytest.mark.parametrize(("nbytes", "columns"), [(2000, 1), (20, 1), (20, 200), (100_000, 2)])
def test_little_is_read_for_a_row(nbytes: int, columns: int) -> None:
    """About 8 KiB, and 256 bytes more for a column; or the row, if it has more."""
    texts = [bytes([row]) * nbytes for row in range(100)]
    data = written(pa.table({f"c{number}": texts for number in range(columns)}))
    file, read = opened(data, 0, 100)
    read.nbytes = 0
    (sample,) = file.samples(read, [57])
    assert sample["c0"] == texts[57]
    assert read.nbytes <= max(8192 + 256 * columns, nbytes * columns) + 500 + 200 * columns
    read.nbytes = 0
    file.samples(read, [57, 57, 57])
    assert read.nbytes <= max(8192 + 256 * columns, nbytes * columns) + 500 + 200 * columns


def test_rows_that_cannot_be_samples() -> None:
    """A row's error is raised for this row alone, also if its message has others."""
    times = pa.array([0, 400_000_000_000_000_000, 2, 3], pa.timestamp("us"))  # the second is in the year 14645
    data = written(pa.table({"n": range(4), "at": times, "text": ["a", "b", "c" * 5000, "d"]}))
    file, read = opened(data, 0, 4, most=4000)
    for good in ([0], [3], [0, 3]):
        assert [sample["n"] for sample in file.samples(read, good)] == good
    for rows, match in (([1], "row 1 has a value with no Python form"), ([0, 2], "row 2 takes 5,0.. bytes")):
        with pytest.raises(ShardError, match=match) as caught:
            file.samples(read, rows)
        assert caught.value.offset == 4  # of the row group


def test_a_row_that_is_asked_for_twice_is_two_samples() -> None:
    """Who changes one of them does not change the other."""
    data = written(pa.table({"list": [[row] for row in range(4)]}))
    file, read = opened(data, 0, 4)
    one, other, third = file.samples(read, [2, 2, 2])
    one["list"].append(5)
    assert other["list"] == third["list"] == [2]


def test_a_number_that_is_not_in_its_dictionary() -> None:
    """An error of the shard."""
    column = pa.array(list("abcabcab")).dictionary_encode()
    data = written(pa.table({"c": column}), compression="none")
    numbers = b"\x02\x03\x24\x49"  # two bits each, eight of them: 0, 1, 2, 0, 1, 2, 0, 1
    assert data.count(numbers) == 1
    with pytest.raises(ShardError, match="has a value that cannot be read: Index 3 out of bounds"):
        opened(data.replace(numbers, b"\x02\x03\xff\xff"), 0, 8)


class Named(pa.ExtensionType):  # type: ignore[misc]
    """An extension type that this process knows."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage, "asyncloader.test.named")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Named:
        return cls(storage)


def test_a_category_in_an_extension_type() -> None:
    """Its values are those of the type that it is stored as."""
    category = pa.array([f"c{row % 5}" for row in range(4)]).dictionary_encode()
    stored = pa.StructArray.from_arrays([category], ["category"])
    kind = Named(stored.type)
    pa.register_extension_type(kind)
    try:
        data = written(pa.table({"named": pa.ExtensionArray.from_storage(kind, stored)}))
        file, read = opened(data, 0, 4)
        assert file.samples(read, [3])[0]["named"] == {"category": "c3"}
    finally:
        pa.unregister_extension_type("asyncloader.test.named")


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.list_view(pa.string()), pa.list_(pa.large_list_view(pa.int64()), 1)]
)
def test_a_message_has_no_values_of_other_rows(kind: Any) -> None:
    """Of views, which Arrow writes whole."""
    texts: list[Any] = [f"some text of row {row}" * 3 for row in range(3000)]
    if not pa.types.is_string_view(kind):
        texts = [[text] for text in texts] if pa.types.is_list_view(kind) else [[[row, 1]] for row in range(3000)]
    column = pa.array(texts, kind)
    file, read = opened(written(pa.table({"c": column})), 0, 3000)
    assert len(read.data) < 2 * column.nbytes
    assert [sample["c"] for sample in file.samples(read, [0, 2999])] == [texts[0], texts[2999]]
