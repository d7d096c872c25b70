"""What is read of a local file, and that a file that has changed is an error, not the end of the process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncloader.errors import ShardError
from asyncloader.sources.local_file import LocalFile


def test_values(tmp_path: Path) -> None:
    """From any byte, copied or as views of a map, also in an unpickled copy; an empty file has none."""
    path = tmp_path / "values"
    path.write_bytes(b"x" + np.arange(5, dtype="<i4").tobytes())
    for file in (LocalFile(path), pickle.loads(pickle.dumps(LocalFile(path)))):
        assert file.array(np.dtype("<i4"), 1).tolist() == [0, 1, 2, 3, 4]
        assert file.array(np.dtype("<i4"), 5, 2).tolist() == [1, 2]
        assert not file.array(np.dtype("<i4"), 5, 2).flags.writeable
        values = np.zeros(2, "<i4")
        file.read_into(values, 9)
        assert values.tolist() == [2, 3]
        with pytest.raises(ShardError, match="the file ends here"):
            file.read_into(values, 17)
    path.write_bytes(b"")
    assert LocalFile(path).array(np.dtype("u1")).tolist() == []


def test_reads_that_bring_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give fewer bytes than were asked for, in the middle of a value."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda number, buffers, at: read(number, [buffers[0].cast("B")[:3]], at))
    (tmp_path / "values").write_bytes(np.arange(5, dtype="<u2").tobytes())
    values = np.zeros(4, "<u2")
    LocalFile(tmp_path / "values").read_into(values, 2)
    assert values.tolist() == [1, 2, 3, 4]


def test_a_relative_path_is_of_the_folder_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may have another current folder."""
    (tmp_path / "values").write_bytes(b"ab")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(LocalFile("values"))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).array(np.dtype("u1")).tobytes() == b"ab"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 3), "it had 4 bytes .* and has 3"),
        (lambda path: path.write_bytes(b"12345"), "and has 5"),
        (lambda path: os.utime(path, ns=(0, 1)), "and has 4, written since"),
    ],
)
def test_changes(tmp_path: Path, change: Callable[[Path], object], said: str) -> None:
    """Noticed by the object that has opened it, and by copies that open it later."""
    path = tmp_path / "values"
    path.write_bytes(b"1234")
    file = LocalFile(path)
    pickled = pickle.dumps(file)
    file.check()
    change(path)
    with pytest.raises(ShardError, match=said):
        file.check()
    with pytest.raises(ShardError, match=said):
        file.array(np.dtype("u1"))
    with pytest.raises(ShardError, match=said):
        pickle.loads(pickled).array(np.dtype("u1"))


def test_no_file(tmp_path: Path) -> None:
    """A missing file, a folder and a FIFO are errors; nothing waits."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        LocalFile(tmp_path / "none")
    for name in ("fifo", "."):
        with pytest.raises(OSError, match="no regular file"):
            LocalFile(tmp_path / name)


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """With the object, however often it is copied."""
    (tmp_path / "values").write_bytes(b"1234")
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        pickle.loads(pickle.dumps(LocalFile(tmp_path / "values"))).array(np.dtype("u1"))
    assert len([*Path("/proc/self/fd").iterdir()]) == before
