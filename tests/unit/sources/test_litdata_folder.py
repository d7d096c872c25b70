"""`LitDataFolder`: what is wrong is said when the dataset is made, or before a sample of it is read."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import DataLoader, LitDataFolder, ShardError
from asyncloader.sources.litdata_folder import own

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # of the package


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve samples in three chunks."""
    cache: Any = pytest.importorskip("litdata.streaming").Cache
    made = cache(str(tmp_path / "made"), chunk_size=4)
    for n in range(12):
        made[n] = {"n": n, "array": np.arange(3) + n, "raw": bytes([n])}
    made.done()
    made.merge()
    return tmp_path / "made"


def test_samples_are_their_own(folder: Path) -> None:
    """What is done to a sample changes no other, and none that is read later."""
    data = LitDataFolder(folder)
    first, again = data.__getitems__([2, 2])
    first["array"][:] = 9
    assert again["array"].tolist() == data[2]["array"].tolist() == [2, 3, 4]
    assert type(again["raw"]) is bytes
    assert data.__getitems__([]) == []
    assert "12 samples in 3 chunks" in repr(pickle.loads(pickle.dumps(data)))


@pytest.mark.parametrize("index", [12, -13])
def test_indices_out_of_range(folder: Path, index: int) -> None:
    """An error that says which; what is no integer is refused."""
    data = LitDataFolder(folder)
    with pytest.raises(IndexError, match=f"sample {index} of a dataset of 12"):
        data[index]
    with pytest.raises(TypeError):
        data[0.5]  # type: ignore[index]


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: path.unlink(), "the chunk cannot be read: No such file"),
    "cut": (lambda path: os.truncate(path, 30), "was cut, or is no file: it has 30 bytes, and"),
    "a folder": (to_folder, "was cut, or is no file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders(folder: Path, damage: str) -> None:
    """Refused when the dataset is made, and when it is used later; other chunks are read all the same."""
    change, said = DAMAGE[damage]
    data = LitDataFolder(folder)
    change(folder / "chunk-0-1.bin")
    with pytest.raises(ShardError, match=rf"{said}.*chunk-0-1\.bin"):
        LitDataFolder(folder)
    with pytest.raises(ShardError, match=rf"{said}.*chunk-0-1\.bin"):
        data.__getitems__([0, 5])
    assert data[0]["n"] == 0


def test_files_that_change(folder: Path) -> None:
    """Bytes that are others than when the dataset was made are not read, in a copy neither."""
    data = LitDataFolder(folder)
    copy = pickle.loads(pickle.dumps(data))
    os.utime(folder / "chunk-0-1.bin", ns=(0, 1))
    for each in (data, copy):
        with pytest.raises(ShardError, match=r"the file has changed: it had .* Make the dataset anew"):
            each[5]
        assert each[0]["n"] == 0
    index = folder / "index.json"
    index.write_bytes(index.read_bytes() + b" ")
    with pytest.raises(ShardError, match="the file has changed"):
        data[0]


def test_damaged_chunks(folder: Path) -> None:
    """A chunk of the right size, and of other bytes, is an error that names it, and a loader leaves its samples out."""
    path = folder / "chunk-0-1.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    data = LitDataFolder(folder)
    with pytest.raises(ShardError, match=r"sample 5 cannot be read: .*chunk-0-1\.bin"):
        data[5]
    with DataLoader[Any](data, batch_size=4, on_error="skip") as loader:
        assert torch.cat([batch["n"] for batch in loader]).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_what_cannot_be_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without an index, arguments that do not fit, a missing package."""
    with pytest.raises(FileNotFoundError):
        LitDataFolder(tmp_path / "none")
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        LitDataFolder(folder, block_size=0)
    with pytest.raises(ValueError, match="block_size=8 is for a folder of tokens"):
        LitDataFolder(folder, block_size=8)
    index = json.loads((folder / "index.json").read_text())
    index["config"]["compression"] = "zstd"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ShardError, match="compressed as whole files"):
        LitDataFolder(folder)
    monkeypatch.setattr("asyncloader.sources.litdata_folder.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'asyncloader\[litdata\]'"):
        LitDataFolder(folder)


def test_own() -> None:
    """Views of a map are copied, however deep they lie."""
    memory = bytearray(b"\1\0\2\0")
    value = {"a": [memoryview(memory), (torch.frombuffer(memory, dtype=torch.int16), "x")]}
    found = own(value)
    memory[:] = bytes(4)
    assert found["a"][0] == b"\1\0\2\0"
    assert found["a"][1][0].tolist() == [1, 2]
    assert found["a"][1][1] == "x"
