"""`LanceTable`: one version for all, clear errors, and no read where Lance could hang.

This process never uses Lance, because processes that are forked from it later could not be trusted then.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, LanceTable
from asyncloader.sources.lance_table import _LanceVersion
from asyncloader.transports import ReadFailed
from tests.helpers.running import run_script

WRITE = """
    import warnings
    warnings.simplefilter("default")
    import sys
    import lance, pyarrow
    lance.write_dataset(pyarrow.table({{"n": list(range({first}, {stop}))}}), {path!r}, mode="append")
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A dataset of ten rows, of version 1."""
    if find_spec("lance") is None:
        pytest.skip("lance is not installed")
    append(tmp_path, 0, 10)
    return str(tmp_path / "rows")


def append(folder: Path, first: int, stop: int) -> None:
    ended = run_script(folder, WRITE.format(first=first, stop=stop, path=str(folder / "rows")))
    assert not ended.returncode, ended.stderr


def test_all_read_one_version(path: str, tmp_path: Path) -> None:
    """Workers read the version of the length, whatever is written meanwhile; and the trainer does not use Lance."""
    table, named = LanceTable(path), LanceTable(path, version=1)
    assert len(table) == 10
    append(tmp_path, 10, 20)
    for each, count in ((table, 10), (named, 10), (LanceTable(path), 20)):
        with DataLoader[Any](each, batch_size=5, num_workers=1, multiprocessing_context="fork") as loader:
            assert [int(n) for batch in loader for n in batch["n"]] == [*range(count)]
    assert "version 1: 10 rows" in repr(table)
    assert "lance" not in sys.modules


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": 7}, "cannot be read by lance: .*"),
        ({"columns": ["n", "m"]}, "has no column 'm'; it has n"),
        ({"uri": "/nowhere/rows"}, "nowhere/rows cannot be read by lance: .*not found"),
        ({"uri": "elsewhere://bucket/rows"}, "elsewhere://bucket/rows cannot be read by lance"),
    ],
)
def test_what_does_not_exist(path: str, options: dict[str, Any], said: str) -> None:
    """Said when the length is asked for."""
    arguments: dict[str, Any] = {"uri": path, **options}
    table = LanceTable(**arguments)
    with pytest.raises(ReadFailed, match=said):
        len(table)


def test_made_anew(path: str, tmp_path: Path) -> None:
    """A version of the same number and length, of a dataset that was deleted and written again, is not read."""
    table = LanceTable(path)
    assert len(table) == 10
    shutil.rmtree(path)
    append(tmp_path, 50, 60)
    with (
        DataLoader[Any](table, num_workers=1, multiprocessing_context="fork") as loader,
        pytest.raises(ReadFailed, match=r"rows has been made anew: its version 1 was written at .* Make the Lance"),
    ):
        list(loader)


def test_blobs(path: str, tmp_path: Path) -> None:
    """Columns of blobs are bytes, as Parquet's would be, in each of Lance's two ways to write them; deeper they are
    refused, where they are asked for.
    """
    ended = run_script(
        tmp_path,
        f"""
        import lance, pyarrow as pa
        from asyncloader import LanceTable
        from asyncloader.transports import ReadFailed

        blob = pa.field("blob", pa.large_binary(), metadata={{"lance-encoding:blob": "true"}})
        schema = pa.schema([pa.field("n", pa.int64()), blob, pa.field("deep", pa.struct([blob]))])
        values = [bytes([n]) * n for n in range(8)] + [None]
        rows = [{{"n": n, "blob": value, "deep": {{"blob": value}}}} for n, value in enumerate(values)]
        for version in ("2.1", "2.2"):
            path = {path!r} + version
            data = pa.Table.from_pylist(rows, schema)
            lance.write_dataset(data, path, data_storage_version=version).delete("n = 3")
            table = LanceTable(path, columns=["blob", "n"])
            expected = [{{"blob": row["blob"], "n": row["n"]}} for row in rows if row["n"] != 3]
            assert table.__getitems__([-1, 3, 0, 3]) == [expected[place] for place in (-1, 3, 0, 3)]
            try:
                LanceTable(path)[0]
            except ReadFailed as error:
                assert "has blobs inside 'deep'" in str(error), error
            else:
                raise AssertionError("read")
        """,
    )
    assert not ended.returncode, ended.stderr


def test_rows_asked_for_twice_are_apart(path: str, tmp_path: Path) -> None:
    """What is done to a row in place, however deep, changes no other: as with a sampler with replacement."""
    ended = run_script(
        tmp_path,
        f"""
        import lance, pyarrow as pa
        from asyncloader import LanceTable

        vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.0, 0, 1, 1, 2, 2], pa.float32()), 2)
        deep = [{{"boxes": [[n] * 4], "n": n}} for n in range(3)]
        lance.write_dataset(pa.table({{"vector": vectors, "deep": deep}}), {path!r} + "2")
        rows = LanceTable({path!r} + "2").__getitems__([2, 0, 2, 2])
        for row in rows:
            row["deep"]["boxes"][0][0] += 100
            row["vector"] += 100
        assert [row["deep"]["boxes"][0][0] for row in rows] == [102, 100, 102, 102], rows
        assert [row["vector"].tolist() for row in rows] == [[n] * 2 for n in (102, 100, 102, 102)], rows
        """,
    )
    assert not ended.returncode, ended.stderr


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no list of columns is refused, and so is a table without the package."""
    monkeypatch.setattr("asyncloader.sources.lance_table.find_spec", lambda _: object())
    wrong: list[Any] = ["n", []]
    for columns in wrong:
        with pytest.raises(ValueError, match="names no column: give a list of names, or None"):
            LanceTable("rows", columns=columns)
    monkeypatch.setattr("asyncloader.sources.lance_table.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'asyncloader\[lance\]'"):
        LanceTable("rows")


@pytest.mark.parametrize("name", ["PanicException", "KeyboardInterrupt"])
def test_panics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of Rust at a damaged file, which is no `Exception`, is a read that failed; what ends a program is not."""
    panic = type(name, (BaseException,), {})

    class Damaged:
        def dataset(self, *_: Any, **__: Any) -> Any:
            return self

        def take(self, *_: Any, **__: Any) -> Any:
            raise panic("range start must not be greater than end")

    monkeypatch.setattr("asyncloader.sources.lance_table.find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "lance", Damaged())
    table = LanceTable("rows")
    table._description = _LanceVersion(1, 10, "now", ())
    monkeypatch.setattr(table, "_open", lambda _: Damaged())
    with pytest.raises(ReadFailed if name == "PanicException" else panic, match="range start must"):
        table[0]


def test_forked_after_use(path: str, tmp_path: Path) -> None:
    """A worker that is forked from a trainer that has used Lance says so, and does not hang; another start works. Where
    files are missing, or an index is wrong, that is said, too.
    """
    ended = run_script(
        tmp_path,
        f"""
        import shutil, warnings
        from asyncloader import DataLoader, LanceTable
        from asyncloader.transports import ReadFailed

        def main():
            warnings.simplefilter("ignore")  # Lance's, at each fork
            table = LanceTable({path!r})
            assert table[-1] == {{"n": 9}}
            for index in (10, -11):
                try:
                    table[index]
                except IndexError as error:
                    assert f"sample {{index}} of a dataset of 10" in str(error)
            for method in ("fork", "forkserver"):
                with DataLoader(table, batch_size=5, num_workers=1, multiprocessing_context=method) as loader:
                    try:
                        print([batch["n"].tolist() for batch in loader])
                    except ReadFailed as error:
                        print(error)
            shutil.rmtree({path!r} + "/data")
            try:
                LanceTable({path!r})[0]
            except ReadFailed as error:
                print(error)

        if __name__ == "__main__":
            main()
        """,
    )
    assert not ended.returncode, ended.stderr
    assert "forked from one that had used lance" in ended.stdout
    assert 'multiprocessing_context="forkserver" or "spawn"' in ended.stdout
    assert "[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]" in ended.stdout
    assert f"rows of {path} cannot be read: " in ended.stdout
