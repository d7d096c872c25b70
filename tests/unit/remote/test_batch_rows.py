"""Rows of tables collated by column are, to the bit, what their samples collated by torch are; errors, too."""

from __future__ import annotations

import datetime as dt
import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from asyncloader import DataLoader, RemoteIterableDataset
from asyncloader.formats import LocatedSamples
from asyncloader.formats.parquet import footer_size, parse_footer
from asyncloader.formats.rows import MATRIX, Rows
from asyncloader.remote.batch_rows import BatchRows
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.collate import Collator
from asyncloader.workers.ipc.inline_collate import inline_collate
from tests.helpers.comparing import assert_same
from tests.unit.formats.test_parquet import read_rows
from tests.unit.workers.ipc.through_memory import copied

SIZE = 12
COLLATIONS: dict[str, Callable[[Any], Any]] = {
    "in a worker": lambda samples: copied(Collator(Encoder()).collate(samples)),
    "in this process": inline_collate(),
}


def tensors(numbers: Sequence[int], shape: tuple[int, ...], **options: Any) -> Any:
    kind = pa.fixed_shape_tensor(pa.int16(), shape, **options)
    items = [[number + each for each in range(math.prod(shape))] for number in numbers]
    return pa.ExtensionArray.from_storage(kind, pa.array(items, pa.list_(pa.int16(), math.prod(shape))))


def small(kind: str) -> Callable[[Sequence[int]], Any]:
    """A column of numbers that fit into 7 bits."""
    return lambda numbers: pa.array([(number * 37) % 120 for number in numbers], getattr(pa, kind)())


NUMERIC = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
COLUMNS: dict[str, Callable[[Sequence[int]], Any]] = {
    **{kind: small(kind) for kind in NUMERIC},
    "float16": lambda numbers: pa.array(np.array(numbers, np.float16)),
    "not numbers": lambda numbers: pa.array(
        [(math.nan, math.inf, -0.0, 1e-45)[number % 4] for number in numbers], pa.float32()
    ),
    "bool": lambda numbers: pa.array([number % 3 == 0 for number in numbers]),
    "text": lambda numbers: pa.array([f"é{number}" for number in numbers]),
    "bytes": lambda numbers: pa.array([bytes([number % 256]) for number in numbers]),
    "category": lambda numbers: pa.array([number % 3 for number in numbers]).dictionary_encode(),
    "list": lambda numbers: pa.array([[number, 1] for number in numbers]),
    "struct": lambda numbers: pa.array([{"a": number, "b": [0.5]} for number in numbers]),
    "fixed": lambda numbers: pa.array([[number / 2, 1.0] for number in numbers], pa.list_(pa.float32(), 2)),
    "fixed flags": lambda numbers: pa.array([[number % 2 == 0] * 3 for number in numbers], pa.list_(pa.bool_(), 3)),
    "tensor": lambda numbers: tensors(numbers, (2, 3)),
    "permuted tensor": lambda numbers: tensors(numbers, (2, 3), permutation=[1, 0]),
    "scalar tensor": lambda numbers: tensors(numbers, ()),
    "__url__": pa.array,
}


def table_of(numbers: Sequence[int]) -> Any:
    """A table with a column of each type, and more of two types."""
    columns = {name: make(numbers) for name, make in COLUMNS.items()}
    columns |= {f"x{each}": pa.array([number + each for number in numbers], pa.float32()) for each in range(MATRIX)}
    columns |= {f"n{each}": pa.array([number * each for number in numbers], pa.int64()) for each in range(MATRIX)}
    return pa.table(columns)


def rows_of(table: Any, url: str = "mem://x/a.parquet") -> Rows:
    """The rows of a table that was written to a file, with a row group's batch of them."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    data = sink.getvalue()

    def fetch(ranges: Sequence[tuple[int, int]]) -> Future[Sequence[bytes]]:
        answer: Future[Sequence[bytes]] = Future()
        answer.set_result([data[start : start + length] for start, length in ranges])
        return answer

    footer = parse_footer(data[-footer_size(data, len(data), url) :], len(data), url)
    (found,) = read_rows(footer, fetch)
    assert isinstance(found, LocatedSamples)
    assert isinstance(found.samples, Rows)
    return found.samples


def batch_of(tables: Sequence[Rows], order: Sequence[tuple[int, int]]) -> BatchRows:
    return BatchRows([(tables[table].table, row) for table, row in order])


ORDERS: dict[str, list[tuple[int, int]]] = {
    "one row": [(0, 3)],
    "a table": [(0, row) for row in range(SIZE)],
    "a part": [(0, row) for row in range(4, 9)],
    "shuffled": [(0, row * 5 % SIZE) for row in range(SIZE)],
    "two tables": [*((0, row) for row in range(7, SIZE)), *((1, row) for row in range(3))],
    "mixed": [(row % 2, row * 7 % SIZE) for row in range(SIZE)],
}


@pytest.fixture(scope="module")
def tables() -> list[Rows]:
    return [rows_of(table_of(range(SIZE))), rows_of(table_of(range(100, 100 + SIZE)), "mem://x/b.parquet")]


@pytest.mark.parametrize("collation", COLLATIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_by_column_as_by_row(tables: list[Rows], order: str, collation: str) -> None:
    """Keys, dtypes, shapes and bits are torch's for the samples, whichever tables the rows come from."""
    batch = batch_of(tables, ORDERS[order])
    assert batch.columns() is not None
    assert_same(COLLATIONS[collation](batch), default_collate(list(batch)))


def result_of(collate: Callable[[Any], Any], samples: Any) -> Any:
    """The batch, or the error's type and text."""
    try:
        return collate(samples)
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("collation", COLLATIONS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"n": [1, 2]}, {"n": [0.5, 1.5]}),
        ({"n": pa.array([1, 2], pa.int8())}, {"n": pa.array([300, 2**40])}),
        ({"n": pa.array([1, 2], pa.uint64())}, {"n": pa.array([-3, 4])}),
        ({"n": pa.array([0.1], pa.float32())}, {"n": [0.1]}),
        ({"n": [1, 2]}, {"n": ["a", "b"]}),
        ({"n": [1, 2]}, {"n": [None, 3]}),
        ({"n": [2**62]}, {"n": pa.array([2**64 - 1], pa.uint64())}),
        ({"n": [1, None]}, {"n": [1, 2]}),
        ({"n": [dt.date(2020, 1, 1)]}, {"n": [dt.date(2021, 1, 1)]}),
        ({"n": [1], "m": [2]}, {"m": [3], "n": [4]}),
        ({"n": [1]}, {"n": [4], "m": [3]}),
        ({"n": [1], "m": [2]}, {"n": [4]}),
        ({"n": pa.array([[1, 2]], pa.list_(pa.int8(), 2))}, {"n": pa.array([[1, 2, 3]], pa.list_(pa.int8(), 3))}),
        ({"n": pa.array([[1, 2]], pa.list_(pa.int8(), 2))}, {"n": pa.array([[1, 2]], pa.list_(pa.int32(), 2))}),
    ],
)
def test_tables_that_differ(first: dict[str, Any], second: dict[str, Any], collation: str) -> None:
    """Also where columns have other types or keys in another table, the batch, or the error, is that of the samples."""
    tables = [rows_of(pa.table(first)), rows_of(pa.table(second))]
    batch = batch_of(tables, [(table, row) for table, rows in enumerate(tables) for row in range(len(rows))])
    collate = COLLATIONS[collation]
    assert_same(result_of(collate, batch), result_of(collate, list(batch)))


@pytest.mark.parametrize("collation", COLLATIONS)
@pytest.mark.parametrize("kind", [int, float, np.ndarray, str, dict])
def test_a_users_function_gets_the_samples_values(
    tables: list[Rows], kind: type, collation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that is registered for a type is called as torch calls it."""
    seen: list[list[type]] = []

    def own(batch: Any, *, collate_fn_map: Any = None) -> Any:
        del collate_fn_map
        seen.append([type(batch), *map(type, batch)])
        return torch.tensor([len(seen)])

    monkeypatch.setitem(torch_collate.default_collate_fn_map, kind, own)
    batch = batch_of(tables, ORDERS["mixed"])
    expected = default_collate(list(batch))
    wanted, seen = seen, []
    assert_same(COLLATIONS[collation](batch), expected)
    assert seen[-len(wanted) :] == wanted != []


def test_threads_make_the_samples_of_a_table() -> None:
    """Threads that ask for the first samples of a table at the same time get the same samples."""
    expected = [str(sample) for sample in rows_of(table_of(range(SIZE)))]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert [*map(str, pool.map(rows_of(table_of(range(SIZE))).__getitem__, range(SIZE)))] == expected


def as_rows(samples: list[Any]) -> Any:
    """Collates a list of samples, as a user's function gets them."""
    assert type(samples) is list
    assert {*map(type, samples)} == {dict}
    return default_collate(samples)


@pytest.mark.parametrize(("workers", "shuffle_buffer"), [(0, 0), (0, 30), (2, 30)])
def test_loaders_batches(tmp_path: Path, workers: int, shuffle_buffer: int) -> None:
    """A loader's batches are those of a `collate_fn` of the user's, which gets a list of dictionaries."""
    for number in range(3):
        pq.write_table(
            table_of(range(50 * number, 50 * number + 41)), tmp_path / f"{number}.parquet", row_group_size=17
        )
    options: dict[str, Any] = {"batch_size": 16, "num_workers": workers, "seed": 5}
    if workers:
        options["multiprocessing_context"] = "fork"
    dataset = RemoteIterableDataset(str(tmp_path / "*.parquet"), shuffle_buffer=shuffle_buffer)
    with DataLoader(dataset, **options) as loader, DataLoader(dataset, collate_fn=as_rows, **options) as other:
        assert_same(list(loader), list(other))
