"""Parts of a local file that stays open: the bytes that the pinned reader returns, and none of another version."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from asyncloader.transports import LocalTransport, ReadFailed, TransportError, open_files
from asyncloader.transports.local import PinnedFile
from asyncloader.transports.open_files import OpenFile, OpenFiles

DATA = os.urandom(1 << 19)
RANGES = [(5, 100), (50, 10), (300, 0), (400, 9), (70_000, 80_000), (len(DATA) - 7, 7), (3, 4)]


def cut(source: bytes | OpenFile, at: int, end: int, _: int) -> bytes:
    return source[at:end]


@pytest.fixture
async def pinned(tmp_path: Path) -> AsyncGenerator[PinnedFile]:
    """A reader of a file that has been read from."""
    (tmp_path / "a").write_bytes(DATA)
    os.utime(tmp_path / "a", (1e9, 1e9))
    async with LocalTransport(tmp_path) as transport:
        reader = transport.pinned("a")
        assert isinstance(reader, PinnedFile)
        assert not reader.local
        await reader.read_ranges([(0, 1)])
        assert reader.local
        yield reader


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_ranges(pinned: PinnedFile) -> None:
    """The file is opened once, and closed when it is dropped. A range beyond its end is left to the reader."""
    kept, before = OpenFiles(), open_descriptors()
    expected = [DATA[start : start + length] for start, length in RANGES]
    for _ in range(2):
        assert pinned.use_local(RANGES, cut, kept) == expected
        assert open_descriptors() == before + 1
    others = [(len(DATA) - 7, 8), (1 << 40, 1), (9, 1)]
    assert pinned.use_local(others, cut, kept) == [None, None, DATA[9:10]]
    assert list(await pinned.read_ranges(RANGES)) == expected
    kept.drop_unused(0.0)
    assert open_descriptors() == before


def replace(folder: Path) -> None:
    (folder / "new").write_bytes(DATA[::-1])
    os.utime(folder / "new", (1e9, 1e9))
    (folder / "new").replace(folder / "a")


def modify(folder: Path) -> None:
    with (folder / "a").open("r+b") as file:
        file.write(b"other")


def exchange_folder(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}-before"))
    folder.mkdir()
    (folder / "a").write_bytes(DATA[::-1])


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": replace,
    "modified": modify,
    "cut": lambda folder: os.truncate(folder / "a", 1000),
    "deleted": lambda folder: (folder / "a").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("during", [False, True])
async def test_a_file_that_changes(pinned: PinnedFile, tmp_path: Path, change: str, during: bool) -> None:
    """Before a call or during it: nothing is returned, and no error of its bytes raised. The reader has the error."""
    kept = OpenFiles()
    assert pinned.use_local(RANGES[:1], cut, kept) == [DATA[5:105]]
    pinned.check_here(kept)
    due = during

    def use(*_: object) -> bytes:
        if due:
            CHANGES[change](tmp_path)
        raise ValueError("these bytes are no sample")

    if not during:
        with pytest.raises(ValueError, match="no sample"):
            pinned.use_local(RANGES[:1], use, kept)
        CHANGES[change](tmp_path)
        with pytest.raises(ReadFailed, match="changed"):
            pinned.check_here(kept)
    for _ in range(2):
        assert pinned.use_local(RANGES[:1], use, kept) == [None]
        due = False
    with pytest.raises(TransportError if change == "deleted" else ReadFailed):
        await pinned.read_ranges(RANGES[:1])


async def test_a_folder_that_changes(pinned: PinnedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has its name and its bytes, but the folder is another: the file is read for a second at most."""
    kept = OpenFiles()
    assert pinned.use_local(RANGES[:1], cut, kept) == [DATA[5:105]]
    exchange_folder(tmp_path)
    assert pinned.use_local(RANGES[:1], cut, kept) == [DATA[5:105]]
    monkeypatch.setattr(open_files, "_LOOKED_FOR_S", 0.0)
    assert pinned.use_local(RANGES[:1], cut, kept) == [None]
    with pytest.raises(ReadFailed, match="changed"):
        await pinned.read_ranges(RANGES[:1])
