"""What is read of a map of a local file, and that a file that has changed is an error."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncloader.errors import ShardError
from asyncloader.sources.tokens import MappedFile


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any byte, also in a copy that is unpickled in another current folder; an empty file has none."""
    path = tmp_path / "values"
    path.write_bytes(b"x" + np.arange(5, dtype="<i4").tobytes())
    monkeypatch.chdir(tmp_path)
    file = MappedFile("values")
    pickled = pickle.dumps(file)
    monkeypatch.chdir("/")
    for each in (file, pickle.loads(pickled)):
        assert each.array("<i4", 1).tolist() == [0, 1, 2, 3, 4]
        assert each.array("<i4", 5, 2).tolist() == [1, 2]
        assert not each.array("<i4", 5, 2).flags.writeable
    path.write_bytes(b"")
    assert MappedFile(path).array("u1").tolist() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 3), "it had 4 bytes .* and has 3"),
        (lambda path: os.truncate(path, 0), "and has 0"),
        (lambda path: path.write_bytes(b"12345"), "and has 5"),
        (lambda path: os.utime(path, ns=(0, 1)), "and has 4, written since"),
        (lambda path: path.unlink(), "cannot be read any more: No such file"),
    ],
)
def test_changes(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    """Noticed by the object that has mapped it, and by copies that map it later."""
    path = tmp_path / "values"
    path.write_bytes(b"1234")
    file = MappedFile(path)
    assert file.array("u1").tobytes() == b"1234"
    change(path)
    for each in (file, pickle.loads(pickle.dumps(file))):
        with pytest.raises(ShardError, match=said):
            each.array("u1")


def test_no_file(tmp_path: Path) -> None:
    """A missing file, a folder and a FIFO are errors; nothing waits."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "none")
    for name in ("fifo", "."):
        with pytest.raises(OSError, match="no regular file"):
            MappedFile(tmp_path / name)
