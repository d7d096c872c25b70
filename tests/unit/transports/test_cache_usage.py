"""The cache directory: its limit, evictions, and files that do not belong to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncloader.transports.cache_layout import ROOT_NAME, Stored, hash_key
from asyncloader.transports.file_lock import wait_for_lock
from tests.unit.transports.cache_subject import DATA, begun, disk_use, file_of, held, opened, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


# ------------------------------------------------------------------------------------------------------ the limit


def test_the_least_recently_used_goes(folder: Path) -> None:
    """The least recently used object is evicted first, and a read is a use; the limit always holds."""
    store = opened(folder, 5 * 4096)
    for age, url in enumerate(["a", "b", "c", "d"]):
        put(store, url)
        os.utime(file_of(folder, url), (1000 + age, 1000 + age))
    assert held(store, "a") == DATA
    put(store, "e")
    put(store, "f")
    assert disk_use(folder) <= 5 * 4096
    assert held(store, "b") is None
    assert held(store, "a") == held(store, "e") == held(store, "f") == DATA


def test_the_time_of_use_is_known_to_the_minute(folder: Path) -> None:
    """A hit renews a time that is older than a minute, or in the future; a recent time stays."""
    store = opened(folder)
    put(store, "u")
    file = file_of(folder, "u")
    now = file.stat().st_mtime
    for age, renewed in [(30, False), (3600, True), (-3600, True)]:
        os.utime(file, (now - age, now - age))
        held(store, "u")
        assert (file.stat().st_mtime >= now) is (renewed or age < 0), age
        assert file.stat().st_mtime < now + 3000


def test_what_is_being_written_counts(folder: Path) -> None:
    """Space is reserved before the first byte is written, so that concurrent fills cannot exceed the limit."""
    store = opened(folder, 8 * 4096)
    first = begun(store, "1", size=4 * 4096)
    assert store.claim(hash_key("2"), "1", 4 * 4096) is None
    first.abort()
    begun(store, "2", size=4 * 4096).abort()


def test_foreign_files_stay(folder: Path) -> None:
    """Eviction deletes only files with the name of an object, and follows no link."""
    store = opened(folder, 4 * 4096)
    put(store, "a")
    shelf = file_of(folder, "a").parent
    outside = folder.parent / "outside"
    outside.mkdir()
    precious = outside / file_of(folder, "b").name
    precious.write_bytes(bytes(100_000))
    foreign = [shelf / "notes.txt", shelf / f"{file_of(folder, 'a').name}.bak", folder / ROOT_NAME / "mine"]
    for file in foreign:
        file.write_bytes(bytes(100_000))
    link = shelf / file_of(folder, "c").name
    link.symlink_to(precious)
    os.utime(link, (1000, 1000), follow_symlinks=False)  # the least recently used, if it belonged to the cache
    (folder / ROOT_NAME / "objects" / "linked").symlink_to(outside)
    for number in range(20):
        put(store, str(number))
    assert precious.exists()
    assert link.is_symlink()
    assert all(file.exists() for file in foreign)
    assert not file_of(folder, "a").exists()


def test_a_damaged_usage_file_is_rewritten(folder: Path) -> None:
    """A usage file that is missing, damaged or wrong is rewritten from the actual files."""
    store = opened(folder, 6 * 4096)
    account = folder / ROOT_NAME / "used"
    put(store, "a")
    for wrong in [None, b"", b"torn", account.read_bytes() + b"\0", bytes(15) + b"\1", b"\x7f" + bytes(15)]:
        account.unlink() if wrong is None else account.write_bytes(wrong)
        put(store, f"after {wrong!r}")
        assert held(store, f"after {wrong!r}") == DATA
        assert disk_use(folder) <= 6 * 4096


def test_what_is_added_during_a_count_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may begin a file that the count does not see; what it gives back meanwhile is not subtracted."""
    store, other = opened(folder), opened(folder)
    put(store, "a")
    files = store.usage._files

    def count() -> Iterator[Stored]:
        other.usage._add(3 * 4096)
        other.usage.release(2 * 4096)
        return files()

    monkeypatch.setattr(store.usage, "_files", count)
    assert store.usage._tidy()
    assert other.usage.total() == 4 * 4096


def test_an_eviction_in_another_process_is_not_waited_for(folder: Path) -> None:
    """While one process evicts, another does not wait: its object is not cached."""
    store, other = opened(folder, 2 * 4096), opened(folder, 2 * 4096)
    put(store, "a")
    put(store, "b")
    with store.usage._locked("lock", wait=False) as lock:
        assert lock >= 0
        put(other, "c")
        assert held(other, "c") is None
    put(other, "c")
    assert held(other, "c") == DATA


def test_a_child_forked_during_an_eviction_does_not_hold_the_lock(folder: Path) -> None:
    """The lock ends with the eviction, also if a worker was forked meanwhile and lives on."""
    store = opened(folder)
    put(store, "a")
    reading, writing = os.pipe()
    with store.usage._locked("lock"):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            os._exit(0)
    os.close(reading)
    try:
        with store.usage._locked("lock", wait=False) as lock:
            assert lock >= 0
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_the_usage_file_of_another_process_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start together on a new directory all cache: none is refused before the file exists."""
    store, other = opened(folder), opened(folder)
    put(store, "a")
    (folder / ROOT_NAME / "used").unlink()
    waiting = threading.Event()

    def wait(descriptor: int) -> None:
        waiting.set()
        wait_for_lock(descriptor)

    monkeypatch.setattr("asyncloader.transports.cache_usage.wait_for_lock", wait)
    thread = threading.Thread(target=put, args=(other, "b"))
    with store.usage._locked("lock"):
        thread.start()
        assert waiting.wait(60)
        (folder / ROOT_NAME / "used").write_bytes(bytes(16))
    thread.join()
    assert held(other, "b") == DATA
