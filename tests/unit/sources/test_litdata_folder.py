"""`LitDataFolder`: what is wrong is said when the dataset is made, or before a sample of it is read."""

from __future__ import annotations

import importlib
import json
import os
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncloader import DataLoader, LitDataFolder, ShardError

# Of the package.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:The given buffer is not writable:UserWarning"
)


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


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "missing": (
        lambda path: path.unlink(),
        "the chunk cannot be read: No such file",
        "cannot be read any more: No such",
    ),
    "cut": (lambda path: os.truncate(path, 30), "the chunk was cut: it has 30 bytes, and", "it had .* and has 30"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders(folder: Path, damage: str) -> None:
    """Refused when the dataset is made, and when it is used later; other chunks are read all the same."""
    change, said, later = DAMAGE[damage]
    data = LitDataFolder(folder)
    change(folder / "chunk-0-1.bin")
    with pytest.raises(ShardError, match=rf"{said}.*chunk-0-1\.bin"):
        LitDataFolder(folder)
    with pytest.raises(ShardError, match=rf"{later}.*chunk-0-1\.bin"):
        data.__getitems__([0, 5])
    assert data[0]["n"] == 0


def test_an_index_that_changes(folder: Path) -> None:
    """It is an error, in a copy, too."""
    copy = pickle.loads(pickle.dumps(LitDataFolder(folder)))
    index = folder / "index.json"
    index.write_bytes(index.read_bytes() + b" ")
    with pytest.raises(ShardError, match=r"the file has changed: it had .* Make the dataset anew"):
        copy[0]


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
    monkeypatch.setattr("asyncloader.sources.litdata_folder.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"'asyncloader\[litdata\]', then pip install --no-deps litdata"):
        LitDataFolder(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index.pop("config"), "no index of LitData: KeyError: 'config'"),
        (lambda index: index["chunks"][0].update(chunk_size="many"), "no index of LitData: ValueError"),
        (lambda index: index["config"].update(item_loader="ParquetLoader"), "its items are of 'ParquetLoader'"),
        (lambda index: index["config"].update(encryption={"algorithm": "fernet"}), "it is encrypted"),
        (lambda index: index["config"].update(compression="zstd"), "compressed as whole files"),
    ],
)
def test_indexes_that_cannot_be_used(folder: Path, change: Callable[[Any], Any], said: str) -> None:
    """Refused, with the reason and the name."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ShardError, match=rf"{said}.*index\.json"):
        LitDataFolder(folder)


def test_tokens(tmp_path: Path) -> None:
    """A sample is a block of tokens of one chunk; the rest of a chunk is left out."""
    litdata = pytest.importorskip("litdata")
    made = importlib.import_module("litdata.streaming").Cache(
        str(tmp_path), chunk_size=21, item_loader=litdata.TokensLoader(block_size=8)
    )
    for n in range(6):
        made[n] = torch.arange(7) + 7 * n
    made.done()
    made.merge()
    with pytest.raises(ValueError, match="of tokens, whose samples are blocks: give block_size="):
        LitDataFolder(tmp_path)
    data = LitDataFolder(tmp_path, block_size=8)
    assert [sample.tolist() for sample in data.__getitems__(range(len(data)))] == [
        [*range(at, at + 8)] for at in (0, 8, 21, 29)
    ]


class Pair(NamedTuple):
    """A container of the user's."""

    raw: Any
    tensor: Any


class Halves:
    """Keeps an array as its bytes, and reads it without a copy."""

    def serialize(self, item: Any) -> tuple[bytes, None]:
        return item.tobytes(), None

    def deserialize(self, data: Any) -> Any:
        return np.frombuffer(data, np.float16)

    def can_serialize(self, item: Any) -> bool:
        return isinstance(item, np.ndarray)

    def setup(self, data_format: Any) -> None:
        """Nothing to set up."""


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, partial(defaultdict, list), list, tuple, partial(deque, maxlen=3), Pair]
)
def test_no_map_of_a_file_lies_under_a_sample(kind: Any, tmp_path: Path) -> None:
    """However deep its values lie, in any container that LitData restores, and with serializers of the user's."""
    cache: Any = pytest.importorskip("litdata.streaming").Cache
    trees = importlib.import_module("litdata.utilities._pytree")
    if Pair not in trees.SUPPORTED_NODES:
        trees._register_namedtuple(Pair, serialized_type_name="tests.Pair")
    leaves: Any = {"raw": b"abc", "tensor": torch.ones(2, 2), "vector": torch.ones(3), "half": np.ones(2, np.float16)}
    value = Pair(b"abc", leaves) if kind is Pair else kind({"raw": b"abc", "leaves": leaves}.items())
    made = cache(str(tmp_path), chunk_size=4, serializers={"half": Halves()})
    made[0] = {"n": 0, "nested": [value]}
    made.done()
    made.merge()
    found = LitDataFolder(tmp_path, serializers={"half": Halves()})[0]["nested"][0]
    assert type(found) is type(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    raw, leaves = found if kind is Pair else [last for _, last in (found.items() if isinstance(found, dict) else found)]
    assert type(raw) is type(leaves["raw"]) is bytes
    os.truncate(tmp_path / "chunk-0-0.bin", 0)  # to read from a map, or to write to it, would end this process
    for name in ("tensor", "vector", "half"):
        leaves[name] += 1
        assert leaves[name].flatten()[0] == 2
