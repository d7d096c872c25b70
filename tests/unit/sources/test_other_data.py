"""A state saved within an epoch is refused over other files, or another version, of as many samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncloader import DataLoader, LanceTable, LitDataFolder, MegatronTokens, StateError, TokenFile
from tests.unit.sources import test_lance_table as lance
from tests.unit.sources.test_megatron import write_pair

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:The given buffer is not writable:UserWarning"
)

# Not in this process, which would have used lance before other tests fork.
OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "seed": 1,
    "shuffle": True,
    "num_workers": 1,
    "multiprocessing_context": "fork",
}


def token_file(folder: Path, kind: int) -> TokenFile:
    np.arange(40 + kind, dtype="u2").tofile(folder / "tokens")
    return TokenFile(folder / "tokens", "u2", 4)


def megatron(folder: Path, kind: int) -> MegatronTokens:
    write_pair(folder / "pair", [[1] * (3 + kind)] * 10, "int32")
    return MegatronTokens(folder / "pair")


def litdata(folder: Path, kind: int) -> LitDataFolder:
    shutil.rmtree(folder / "made", ignore_errors=True)
    made = pytest.importorskip("litdata.streaming").Cache(str(folder / "made"), chunk_size=4)
    for n in range(10):
        made[n] = bytes([n]) * (1 + kind)
    made.done()
    made.merge()
    return LitDataFolder(folder / "made")


def lance_table(folder: Path, kind: int) -> LanceTable:
    if find_spec("lance") is None:
        pytest.skip("lance is not installed")
    if kind:
        shutil.rmtree(folder / "rows")
    if kind or not (folder / "rows").exists():
        lance.append(folder, kind, kind + 10)
    return LanceTable(folder / "rows")


@pytest.mark.parametrize("make", [token_file, megatron, litdata, lance_table])
def test_a_state_of_other_data(make: Callable[[Path, int], Any], tmp_path: Path) -> None:
    """It goes on over the same data."""
    with DataLoader[Any](make(tmp_path, 0), **OPTIONS) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with DataLoader[Any](make(tmp_path, 0), **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == 9
    other = make(tmp_path, 1)
    with DataLoader[Any](other, **OPTIONS) as loader:
        assert len(loader) == 10
        with pytest.raises(StateError, match=r"within an epoch of other data: the dataset's files, their sizes"):
            loader.load_state_dict(state)
