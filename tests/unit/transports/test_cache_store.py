from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncloader.transports.cache_layout import MARKER, MARKER_NAME, ROOT_NAME, CacheFooter, charge, fill_name, hash_key
from asyncloader.transports.cache_store import BeingWritten, CacheStore, EntryLost
from asyncloader.transports.cache_usage import CacheCounts
from asyncloader.transports.file_lock import try_lock
from tests.unit.transports.cache_subject import DATA, begun, content, everything, file_of, held, opened, put


def charge_of(size: int) -> int:
    """The bytes that count for an object of this size with the ETag "1"."""
    return charge(size + len(CacheFooter(hash_key("u"), "1", size, 0, 0).pack()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


# -------------------------------------------------------------------------------------------- writing and reading


def test_put_and_open(folder: Path) -> None:
    """An object is read under its own URL and ETag and no other, whole or in part."""
    store = opened(folder)
    put(store, "u", "1")
    put(store, "u", "2", b"other")
    assert held(store, "u", "1") == DATA
    assert held(store, "u", "2") == b"other"
    assert held(store, "u", "3") is held(store, "v", "1") is None
    assert (store.has(hash_key("u")), store.has(hash_key("v"))) == (True, False)
    entry = store.open(hash_key("u"), "1")
    assert entry is not None
    assert (entry.read(250, 10), entry.read(0, 0), entry.size, entry.etag) == (DATA[250:260], b"", len(DATA), "1")
    entry.close()
    entry.close()
    with pytest.raises(EntryLost, match="reading"):
        entry.read(0, 1)
    assert held(store, "u", "1") == DATA


def test_the_newest_version(folder: Path) -> None:
    """Of several versions the version that was written last is given, in whatever order the disk lists them."""
    store = opened(folder)
    assert store.open_newest(hash_key("u")) is None
    for number in range(8):
        put(store, "u", str(number), str(number).encode())
        assert content(store.open_newest(hash_key("u"))) == str(number).encode()


def test_only_this_user_may_look(folder: Path) -> None:
    """Directories and files are accessible to the user alone."""
    put(opened(folder), "u")
    root = folder / ROOT_NAME
    for directory in [folder, root, *(each for each in root.rglob("*") if each.is_dir())]:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    for file in everything(folder):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_urls_are_not_stored(folder: Path) -> None:
    """URLs, which may contain signatures, occur in no file name and in no file."""
    put(opened(folder), "https://host/a?sig=SECRET")
    for file in folder.rglob("*"):
        assert "SECRET" not in file.name
        assert file.is_dir() or b"SECRET" not in file.read_bytes()


def test_the_directory_is_tagged(folder: Path) -> None:
    """Backup programs find the standard mark of a cache; the rest of the user's directory is untouched."""
    folder.mkdir(parents=True)
    (folder / "mine").write_text("x")
    put(opened(folder), "u")
    assert (folder / ROOT_NAME / MARKER_NAME).read_bytes() == MARKER
    assert {each.name for each in folder.iterdir()} == {"mine", ROOT_NAME}


# -------------------------------------------------------------------------------------------------- files half done


def test_a_fill_is_seen_when_it_is_whole(folder: Path) -> None:
    """An object that is being written is not visible before the commit."""
    store, other = opened(folder), opened(folder)
    fill = begun(store, "u")
    assert held(other, "u") is None
    fill.commit(DATA)
    assert held(other, "u") == DATA
    fill.abort()
    fill.commit(b"late")
    assert held(store, "u") == DATA


def test_an_aborted_fill_leaves_nothing(folder: Path) -> None:
    """Neither a file nor reserved space is left."""
    store = opened(folder, 8192)
    for _ in range(5):
        fill = begun(store, "u", size=7000)
        fill.abort()
        assert everything(folder) == set()
        assert store.usage.total() == 0
    put(store, "v", data=b"x" * 7000)
    assert held(store, "v") == b"x" * 7000


def test_one_writer_at_a_time(folder: Path) -> None:
    """An object that is being written, or is cached, is not written again."""
    store, other = opened(folder), opened(folder)
    fill = begun(store, "u")
    for each in (other, store):
        with pytest.raises(BeingWritten):
            each.claim(hash_key("u"), "1", len(DATA))
        put(each, "u")
    fill.commit(DATA)
    assert other.claim(hash_key("u"), "1", len(DATA)) is None
    begun(other, "u", "2").abort()
    assert len(everything(folder)) == 1


def test_a_dead_writer_is_followed(folder: Path) -> None:
    """A file whose writer was killed is taken over by the next writer, whatever it contains."""
    store = opened(folder)
    fill = begun(store, "u")
    left = next(iter(everything(folder)))
    fill.abort()
    left.write_bytes(b"left behind" * 1000)
    put(store, "u")
    assert held(store, "u") == DATA
    assert len(everything(folder)) == 1


def test_who_looks_for_dead_writers_is_no_writer(folder: Path) -> None:
    """A look locks each file for a moment: whoever begins to write one meanwhile waits for its end."""
    store = opened(folder)
    put(store, "a")  # makes the directories
    abandoned = begun(store, "b")
    [file] = (folder / ROOT_NAME / "fills").iterdir()
    abandoned.abort()
    file.touch()
    with ThreadPoolExecutor(1) as thread:
        with store.usage.cleaning(), file.open() as looking:
            assert try_lock(looking.fileno())
            beginning = thread.submit(begun, store, "b")
            with pytest.raises(TimeoutError):
                beginning.result(0.05)
        beginning.result(30).abort()


def test_what_dead_writers_left_is_cleaned(folder: Path) -> None:
    """A process that starts to write deletes files of dead writers, and no others."""
    store = opened(folder)
    alive, dead = begun(store, "alive"), begun(store, "dead")
    left = next(file for file in everything(folder) if file.name.startswith(hash_key("dead")))
    dead.abort()
    left.write_bytes(b"torn")
    foreign = left.with_name("notes.txt")
    foreign.write_text("mine")
    put(opened(folder), "u")
    assert not left.exists()
    assert foreign.exists()
    alive.commit(DATA)
    assert held(store, "alive") == DATA


# ------------------------------------------------------------------------------------------------- files torn later


@pytest.mark.parametrize(
    "tear",
    [
        lambda data: data[:-1],
        lambda data: data[: len(DATA) // 2],
        lambda data: b"",
        lambda data: data[:-60] + bytes(60),
        lambda data: data + b"x",
    ],
    ids=["last byte", "half", "empty", "no footer", "longer"],
)
def test_a_torn_file_is_removed(folder: Path, tear: Callable[[bytes], bytes]) -> None:
    """A file of the wrong length, or without a footer, is deleted, and can be written again."""
    store = opened(folder)
    put(store, "u")
    file = file_of(folder, "u")
    file.write_bytes(tear(file.read_bytes()))
    assert held(store, "u") is None
    assert not file.exists()
    put(store, "u")
    assert held(store, "u") == DATA


@pytest.mark.parametrize("place", [0, len(DATA) // 2, len(DATA) - 1])
def test_a_flipped_bit_is_found_at_the_first_use(folder: Path, place: int, caplog: pytest.LogCaptureFixture) -> None:
    """The first use in each process verifies the file: it is deleted, counted and logged. Later uses trust it."""
    put(opened(folder), "u")
    file = file_of(folder, "u")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    counts = CacheCounts()
    store = CacheStore(str(folder), None, counts)
    assert held(store, "u") is None
    assert not file.exists()
    assert counts.damaged == 1
    assert f"{file} in the cache is damaged" in caplog.text
    put(store, "u")
    assert held(store, "u") == held(opened(folder), "u") == DATA
    file.write_bytes(file.read_bytes().replace(DATA[:10], b"0123456789", 1))
    assert held(store, "u") != DATA
    assert held(opened(folder), "u") is None  # as in another process


def put_fifo(place: Path) -> None:
    os.mkfifo(place)


def put_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(place.parent)
        server.bind(place.name)


def put_link(place: Path) -> None:
    place.symlink_to("/dev/zero")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "FIFO": put_fifo,
    "socket": put_socket,
    "link": put_link,
    "directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_file_is_never_opened(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of an object, a file being written, or the cache's own files, such an entry is never waited for."""
    monkeypatch.chdir(folder.parent.parent)
    store = opened(folder, 1 << 20)
    put(store, "u")
    root = folder / ROOT_NAME
    file_of(folder, "u").unlink()
    HOSTILE[kind](file_of(folder, "u"))
    assert held(store, "u") is None
    assert store.open_newest(hash_key("u")) is None
    put(store, "u")
    assert held(store, "u") is None
    begun(store, "v").abort()
    HOSTILE[kind](root / "fills" / fill_name(hash_key("v"), "1", charge_of(len(DATA))))
    with pytest.raises(OSError):
        begun(store, "v")
    opened(folder).usage.start()
    for name in ["used", "lock"]:
        (root / name).unlink()
        HOSTILE[kind](root / name)
        with pytest.raises(OSError):
            put(opened(folder, 1 << 20), "w")
        shutil.rmtree(root / name) if kind == "directory" else (root / name).unlink()
    put(opened(folder, 1 << 20), "w")
    assert held(opened(folder), "w") == DATA


@pytest.mark.parametrize("place", ["objects", "fills", "shelf"])
def test_links_to_directories_are_not_followed(folder: Path, place: str) -> None:
    """Nothing outside is read or written."""
    put(opened(folder), "u")
    elsewhere = folder.parent / "elsewhere"
    target = file_of(folder, "u").parent if place == "shelf" else folder / ROOT_NAME / place
    target.rename(elsewhere)
    target.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    store = opened(folder)
    if place != "fills":
        assert held(store, "u") is None
        assert store.open_newest(hash_key("u")) is None
        assert not store.has(hash_key("u"))
    with contextlib.suppress(PermissionError):
        put(store, "u", "2")
    assert sorted(elsewhere.rglob("*")) == before


def test_a_file_that_is_cut_under_a_reader(folder: Path) -> None:
    """The read fails; fewer bytes than requested are never returned. The next open deletes the file."""
    store = opened(folder)
    put(store, "u")
    entry = store.open(hash_key("u"), "1")
    assert entry is not None
    os.truncate(file_of(folder, "u"), 100)
    assert entry.read(0, 100) == DATA[:100]
    with pytest.raises(EntryLost, match="was cut"):
        entry.read(50, 100)
    assert held(store, "u") is None
    assert not file_of(folder, "u").exists()
    entry.close()


def test_a_renamed_file_is_not_used(folder: Path) -> None:
    """A file under another object's name is not used for that object."""
    store = opened(folder)
    put(store, "u", "1")
    for url, etag in [("u", "2"), ("v", "1")]:
        target = file_of(folder, url, etag)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file_of(folder, "u", "1").read_bytes())
        assert held(store, url, etag) is None


# -------------------------------------------------------------------------------------- foreign and deleted caches


def test_a_link_in_place_of_the_directory(folder: Path) -> None:
    """A link with the cache's name is refused."""
    folder.mkdir(parents=True)
    elsewhere = folder.parent / "elsewhere"
    put(opened(elsewhere), "u")
    (folder / ROOT_NAME).symlink_to(elsewhere / ROOT_NAME)
    with pytest.raises(PermissionError, match="not a directory of this user"):
        opened(folder).has(hash_key("u"))


def test_a_cache_that_is_deleted_is_made_again(folder: Path) -> None:
    """If the directory is deleted while in use, only the cached objects are lost."""
    store = opened(folder)
    put(store, "u")
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()
    assert held(store, "u") is None
    put(store, "u")
    assert held(store, "u") == DATA


def test_a_cache_that_is_deleted_under_a_fill(folder: Path) -> None:
    """The object is not cached, and no directory is left."""
    store = opened(folder)
    fill = begun(store, "u")
    shutil.rmtree(folder / ROOT_NAME)
    fill.commit(DATA)
    assert not (folder / ROOT_NAME).exists()
    for again in (store, opened(folder)):
        put(again, "u")
        assert held(again, "u") == DATA


@pytest.mark.thorough
def test_a_cache_that_is_deleted_while_others_fill_it(folder: Path) -> None:
    """Writers during the deletion cache nothing, without an error, and the cache works again in the end."""
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            shutil.rmtree(folder / ROOT_NAME, ignore_errors=True)

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        for number in range(300):
            store = opened(folder)
            put(store, str(number))
            assert held(store, str(number)) in {None, DATA}
            assert store.has(hash_key("u")) is False
    finally:
        done.set()
        deleting.join()
    put(opened(folder), "u")
    assert held(opened(folder), "u") == DATA
    assert {each.name for each in folder.iterdir()} == {ROOT_NAME}
