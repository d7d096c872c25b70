from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncloader.transports.cache_layout import BOOT_SIZE, MARKER, MARKER_NAME, ROOT_NAME, entry_name, hash_key
from asyncloader.transports.cache_store import CacheEntry, CacheFill, CacheStore, EntryLost
from asyncloader.transports.cache_usage import CacheCounts

DATA = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def opened(folder: Path, limit: int | None = None) -> CacheStore:
    return CacheStore(str(folder), limit, CacheCounts())


def put(store: CacheStore, url: str, etag: str = "1", data: bytes = DATA) -> None:
    store.put(hash_key(url), etag, data)


def held(store: CacheStore, url: str, etag: str = "1") -> bytes | None:
    """What the cache gives for an object, None if it is not cached."""
    return content(store.open(hash_key(url), etag))


def content(entry: CacheEntry | None) -> bytes | None:
    if entry is None:
        return None
    try:
        return entry.read(0, entry.size)
    finally:
        entry.close()


def file_of(folder: Path, url: str, etag: str = "1") -> Path:
    key = hash_key(url)
    return folder / ROOT_NAME / "objects" / key[:3] / entry_name(key, etag)


def everything(folder: Path) -> set[Path]:
    """All objects' files, and all that are being written."""
    root = folder / ROOT_NAME
    return {file for part in ["objects", "fills"] for file in (root / part).rglob("*") if file.is_file()}


def disk_use(folder: Path) -> int:
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in everything(folder))


def begun(store: CacheStore, url: str, etag: str = "1", size: int = len(DATA)) -> CacheFill:
    fill = store.begin(hash_key(url), etag, size)
    assert fill is not None
    return fill


# -------------------------------------------------------------------------------------------- what goes in comes out


def test_what_is_put_is_held(folder: Path) -> None:
    """An object comes back under its URL and ETag and no other, in whole and in parts."""
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
    with pytest.raises(EntryLost, match="closed"):
        entry.read(0, 1)
    assert held(store, "u", "1") == DATA


def test_the_newest_version(folder: Path) -> None:
    """Of several versions the one that was written last is given, in whatever order the disk lists them."""
    store = opened(folder)
    assert store.open_newest(hash_key("u")) is None
    for number in range(8):
        put(store, "u", str(number), str(number).encode())
        assert content(store.open_newest(hash_key("u"))) == str(number).encode()


def test_looking_makes_nothing(folder: Path) -> None:
    """A cache that was never written to does not exist; asking it is no error and makes no directory."""
    store = opened(folder)
    assert held(store, "u") is None
    assert not store.has(hash_key("u"))
    assert not folder.exists()


def test_only_this_user_may_look(folder: Path) -> None:
    """The directories that are made are for the user alone, and so are the files."""
    put(opened(folder), "u")
    root = folder / ROOT_NAME
    for directory in [folder, root, *(each for each in root.rglob("*") if each.is_dir())]:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    for file in everything(folder):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_urls_are_not_told(folder: Path) -> None:
    """A URL may hold a signature; it is nowhere in the directory, in no name and in no file."""
    put(opened(folder), "https://host/a?sig=SECRET")
    for file in folder.rglob("*"):
        assert "SECRET" not in file.name
        assert file.is_dir() or b"SECRET" not in file.read_bytes()


def test_the_directory_is_tagged(folder: Path) -> None:
    """Backup programs find the standard mark of a cache, and nothing else of the user's directory is touched."""
    folder.mkdir(parents=True)
    (folder / "mine").write_text("x")
    put(opened(folder), "u")
    assert (folder / ROOT_NAME / MARKER_NAME).read_bytes() == MARKER
    assert {each.name for each in folder.iterdir()} == {"mine", ROOT_NAME}


# -------------------------------------------------------------------------------------------------- files half done


def test_a_fill_is_seen_when_it_is_whole(folder: Path) -> None:
    """Nobody meets an object that is being written; after the commit everybody does."""
    store, other = opened(folder), opened(folder)
    fill = begun(store, "u")
    fill.write(DATA[:100])
    assert held(other, "u") is None
    fill.write(DATA[100:])
    assert held(other, "u") is None
    assert fill.commit()
    assert held(other, "u") == DATA
    fill.abort()
    fill.write(b"late")
    assert held(store, "u") == DATA


@pytest.mark.parametrize("written", [b"", DATA[:-1], DATA + b"x"])
def test_a_fill_of_another_length_is_dropped(folder: Path, written: bytes) -> None:
    """Bytes that are not as many as the object has do not become the object."""
    store = opened(folder)
    fill = begun(store, "u")
    fill.write(written)
    assert not fill.commit()
    assert everything(folder) == set()


def test_an_aborted_fill_leaves_nothing(folder: Path) -> None:
    """Neither a file nor a share of the limit stays."""
    store = opened(folder, 8192)
    for _ in range(5):
        fill = begun(store, "u", size=7000)
        fill.write(DATA)
        fill.abort()
        assert everything(folder) == set()
    put(store, "v", data=b"x" * 7000)
    assert held(store, "v") == b"x" * 7000


def test_one_writer_at_a_time(folder: Path) -> None:
    """Who wants to write an object that is being written does not; nor one that is there."""
    store, other = opened(folder), opened(folder)
    fill = begun(store, "u")
    assert other.begin(hash_key("u"), "1", len(DATA)) is None
    assert store.begin(hash_key("u"), "1", len(DATA)) is None
    fill.write(DATA)
    fill.commit()
    assert other.begin(hash_key("u"), "1", len(DATA)) is None
    begun(other, "u", "2").abort()
    assert len(everything(folder)) == 1


def test_a_dead_writer_is_followed(folder: Path) -> None:
    """A file whose writer was killed is taken over by the next writer of that object, from its beginning."""
    store = opened(folder)
    fill = begun(store, "u")
    fill.write(b"left behind" * 10)
    left = next(iter(everything(folder)))
    copy = left.read_bytes()
    fill.abort()
    left.write_bytes(copy)
    put(store, "u")
    assert held(store, "u") == DATA
    assert len(everything(folder)) == 1


def test_what_dead_writers_left_is_cleaned(folder: Path) -> None:
    """A process that begins to write deletes what dead ones left; what living ones write stays."""
    store = opened(folder)
    alive, dead = begun(store, "alive"), begun(store, "dead")
    alive.write(DATA)
    left = next(file for file in everything(folder) if file.name.startswith(hash_key("dead")))
    dead.abort()
    left.write_bytes(b"torn")
    foreign = left.with_name("notes.txt")
    foreign.write_text("mine")
    put(opened(folder), "u")
    assert not left.exists()
    assert foreign.exists()
    assert alive.commit()
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
    """A file that is not as long as it says, or has lost its footer, is deleted, and can be written again."""
    store = opened(folder)
    put(store, "u")
    file = file_of(folder, "u")
    file.write_bytes(tear(file.read_bytes()))
    assert held(store, "u") is None
    assert not file.exists()
    put(store, "u")
    assert held(store, "u") == DATA


def test_a_file_of_an_earlier_boot_is_verified(folder: Path) -> None:
    """After a restart of the system a file's bytes are checked once: torn ones go, whole ones are marked."""
    store = opened(folder)
    put(store, "whole")
    put(store, "torn")
    whole, torn = file_of(folder, "whole"), file_of(folder, "torn")
    before = whole.read_bytes()
    whole.write_bytes(before[:-BOOT_SIZE] + bytes(BOOT_SIZE))
    # The length is right, and a block in the middle never reached the disk.
    data = torn.read_bytes()
    torn.write_bytes(data[:100] + bytes(50) + data[150:-BOOT_SIZE] + bytes(BOOT_SIZE))
    assert held(store, "torn") is None
    assert not torn.exists()
    assert held(store, "whole") == DATA
    assert whole.read_bytes() == before
    # From now on it is trusted, as the page cache is.
    whole.write_bytes(before.replace(DATA[:10], b"0123456789", 1))
    assert held(store, "whole") != DATA


def test_a_file_that_is_cut_under_a_reader(folder: Path) -> None:
    """It says so, is deleted, and never gives fewer bytes than asked for."""
    store = opened(folder)
    put(store, "u")
    entry = store.open(hash_key("u"), "1")
    assert entry is not None
    os.truncate(file_of(folder, "u"), 100)
    assert entry.read(0, 100) == DATA[:100]
    with pytest.raises(EntryLost, match="it was cut"):
        entry.read(50, 100)
    assert not file_of(folder, "u").exists()
    entry.close()


def test_a_deleted_file_is_read_to_its_end(folder: Path) -> None:
    """Who has an object open keeps it, although it was evicted meanwhile."""
    store = opened(folder)
    put(store, "u")
    entry = store.open(hash_key("u"), "1")
    assert entry is not None
    file_of(folder, "u").unlink()
    assert content(entry) == DATA


def test_a_renamed_file_is_not_believed(folder: Path) -> None:
    """A file under another object's name is not given for that object."""
    store = opened(folder)
    put(store, "u", "1")
    for url, etag in [("u", "2"), ("v", "1")]:
        target = file_of(folder, url, etag)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file_of(folder, "u", "1").read_bytes())
        assert held(store, url, etag) is None


# ------------------------------------------------------------------------------------------------------ the limit


def test_the_least_recently_used_goes(folder: Path) -> None:
    """What was used longest ago is evicted first, and a read is a use; the limit holds at every moment."""
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


def test_evictions_are_counted(folder: Path) -> None:
    """The counter tells how many files went."""
    counts = CacheCounts()
    store = CacheStore(str(folder), 40 * 4096, counts)
    for number in range(100):
        put(store, str(number))
        assert disk_use(folder) <= 40 * 4096
    assert counts.evictions == 100 - len(everything(folder))
    assert 30 <= len(everything(folder)) <= 40


def test_the_time_of_use_is_known_to_the_minute(folder: Path) -> None:
    """A hit renews a time that is older than a minute, or in the future, and leaves the others alone."""
    store = opened(folder)
    put(store, "u")
    file = file_of(folder, "u")
    now = file.stat().st_mtime
    for age, renewed in [(30, False), (3600, True), (-3600, True)]:
        os.utime(file, (now - age, now - age))
        held(store, "u")
        assert (file.stat().st_mtime >= now) is (renewed or age < 0), age
        assert file.stat().st_mtime < now + 3000


def test_an_object_that_is_too_large_is_not_cached(folder: Path) -> None:
    """It evicts nothing."""
    store = opened(folder, 8192)
    put(store, "u")
    put(store, "large", data=bytes(8193))
    assert held(store, "large") is None
    assert held(store, "u") == DATA


def test_what_is_being_written_counts(folder: Path) -> None:
    """Space is taken before the first byte is written, so that fills together cannot pass the limit."""
    store = opened(folder, 8 * 4096)
    first = begun(store, "1", size=4 * 4096)
    assert store.begin(hash_key("2"), "1", 4 * 4096) is None
    first.abort()
    begun(store, "2", size=4 * 4096).abort()


def test_foreign_files_stay(folder: Path) -> None:
    """Eviction deletes what has the name of an object and nothing else, and follows no link."""
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
    (shelf / file_of(folder, "c").name).symlink_to(precious)
    (folder / ROOT_NAME / "objects" / "linked").symlink_to(outside)
    for number in range(20):
        put(store, str(number))
    assert precious.exists()
    assert all(file.exists() for file in foreign)
    assert not file_of(folder, "a").exists()


def test_a_link_in_place_of_an_object(folder: Path) -> None:
    """It is not followed, neither to read nor to write."""
    store = opened(folder)
    put(store, "a")
    target = folder.parent / "target"
    target.write_bytes(file_of(folder, "a").read_bytes())
    file_of(folder, "a").unlink()
    file_of(folder, "a").symlink_to(target)
    assert held(store, "a") is None
    assert target.exists()


def test_the_account_heals(folder: Path) -> None:
    """An account that is lost, damaged or wrong is made again from what is there."""
    store = opened(folder, 6 * 4096)
    account = folder / ROOT_NAME / "usage"
    put(store, "a")
    for wrong in [None, b"", b"torn", account.read_bytes() + b"\0", account.read_bytes()[:8] + b"\x7f" + bytes(7)]:
        account.unlink() if wrong is None else account.write_bytes(wrong)
        put(store, f"after {wrong!r}")
        assert held(store, f"after {wrong!r}") == DATA
        assert disk_use(folder) <= 6 * 4096


def test_a_long_account_is_made_short(folder: Path) -> None:
    """An account that has grown is rewritten when a process begins to write."""
    put(opened(folder), "a")
    account = folder / ROOT_NAME / "usage"
    account.write_bytes(account.read_bytes() + bytes(2 << 20))
    put(opened(folder), "b")
    assert account.stat().st_size < 100


def test_who_evicts_keeps_others_from_waiting(folder: Path) -> None:
    """While one process counts and deletes, another does not wait: its object is just not cached."""
    store, other = opened(folder, 2 * 4096), opened(folder, 2 * 4096)
    put(store, "a")
    put(store, "b")
    with store.usage._lock() as locked:
        assert locked
        put(other, "c")
        assert held(other, "c") is None
    put(other, "c")
    assert held(other, "c") == DATA


# ------------------------------------------------------------------------------------------------ what is not ours


def test_a_directory_of_somebody_else(folder: Path) -> None:
    """A directory of the cache's name without its mark is left alone, with an error that says so."""
    root = folder / ROOT_NAME
    root.mkdir(parents=True)
    (root / "data").write_text("mine")
    store = opened(folder)
    with pytest.raises(PermissionError, match=MARKER_NAME):
        put(store, "u")
    with pytest.raises(PermissionError, match=MARKER_NAME):
        store.has(hash_key("u"))
    assert {each.name for each in folder.iterdir()} == {ROOT_NAME}
    assert {each.name for each in root.iterdir()} == {"data"}


def test_a_link_in_place_of_the_directory(folder: Path) -> None:
    """A link under the cache's name, which might lead anywhere, is refused."""
    folder.mkdir(parents=True)
    elsewhere = folder.parent / "elsewhere"
    put(opened(elsewhere), "u")
    (folder / ROOT_NAME).symlink_to(elsewhere / ROOT_NAME)
    with pytest.raises(PermissionError, match="not a directory of this user"):
        opened(folder).has(hash_key("u"))


def test_a_cache_that_is_deleted_is_made_again(folder: Path) -> None:
    """Who deletes the directory while it is in use loses what was cached, and nothing else."""
    store = opened(folder)
    put(store, "u")
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()
    assert held(store, "u") is None
    put(store, "u")
    assert held(store, "u") == DATA
