"""An open file of the cache: a disk that fails, or a file that another program cuts, is an error and ends nothing."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from asyncloader.transports.cache_entry import EntryLost, fetch
from asyncloader.transports.cache_layout import hash_key
from tests.unit.transports.cache_subject import DATA, file_of, opened, put


def test_all_bytes_at_once(tmp_path: Path) -> None:
    """They are mapped for reading; those of a file that was cut are lost."""
    put(opened(tmp_path), "a")
    entry = opened(tmp_path).open(hash_key("a"), "1")
    assert entry is not None
    with entry.mapped() as view:
        assert bytes(view) == DATA
        assert view.readonly
    os.truncate(file_of(tmp_path, "a"), 1)
    with pytest.raises(EntryLost, match="was cut"), entry.mapped():
        pass
    entry.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says in advance that a page cannot be read")
def test_a_page_that_cannot_be_read(tmp_path: Path) -> None:
    """Touching it would kill the process: a page behind the end of its file, as a bad sector would be."""
    path = tmp_path / "a"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        fetch(mapping)
        os.truncate(path, mmap.PAGESIZE)
        with pytest.raises(OSError, match="Bad address"):
            fetch(mapping)
