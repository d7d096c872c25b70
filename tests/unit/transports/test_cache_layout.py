from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports.cache_layout import (
    BLOCK_BYTES,
    MOST_ETAG,
    TAIL_SIZE,
    CacheFooter,
    Stored,
    block_key,
    choose_victims,
    entry_name,
    entry_url_key,
    fill_charge,
    fill_name,
    hash_key,
    object_url,
    storable_etag,
    stream_step,
)

UNUSED = 16  # bytes at the end

SIZES = st.integers(0, 2**60)
ETAGS = st.text(max_size=300).filter(storable_etag)
FOOTERS = st.builds(
    CacheFooter,
    url_key=st.text().map(hash_key),
    etag=ETAGS,
    size=SIZES,
    crc=st.integers(0, 2**32 - 1),
    created=SIZES,
)


@pytest.mark.parametrize(
    ("root", "url"),
    [
        ("http://host", "http://host/a/b c"),
        ("http://host/", "http://host/a/b c"),
        ("http://host/dir?sig=x/y", "http://host/dir/a/b c?sig=x/y"),
        ("memory://", "memory:/a/b c"),
        ("/data", "/data/a/b c"),
    ],
)
def test_object_url(root: str, url: str) -> None:
    """An object's name is its root's URL and its path, however the root ends; a query stays at the end."""
    assert object_url(root, "a/b c") == url


def test_objects_of_two_sizes_share_no_block() -> None:
    """A version that is named by a date alone may be of both."""
    sizes = [BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES]
    assert len({block_key("memory:/a", 0, size) for size in sizes}) == 3


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, None, 8), (3.5, None, 11), (0, 2.5, 3), (2.7, 2.8, 3), (3, 2.5, 4), (20, None, 20.3)],
)
def test_steps_of_streams(start: float, stop: float | None, expected: float) -> None:
    """Eight blocks at a time; up to the block of `stop`, and behind that one at a time."""
    blocks = [None if each is None else int(each * BLOCK_BYTES) for each in (start, stop)]
    assert stream_step(blocks[0] or 0, blocks[1], int(20.3 * BLOCK_BYTES)) == int(expected * BLOCK_BYTES)


@given(st.text(), st.text())
def test_names_are_hashes(url: str, etag: str) -> None:
    """For any URL and ETag a name has harmless characters only; another version has another name."""
    key = hash_key(url)
    name = entry_name(key, etag)
    assert entry_url_key(name) == key
    assert set(name) <= set("0123456789abcdef.")
    assert entry_name(key, f"{etag}'") != name
    assert fill_charge(fill_name(key, etag, 4096)) == 4096


@given(st.text())
def test_other_names_are_ignored(name: str) -> None:
    """Only a file with exactly the name of an object, or of an object being written, is taken for one."""
    ours = entry_name(hash_key("u"), "e")
    for foreign in [name, f"{ours}{name or 'x'}", f"{name or 'x'}{ours}", ours.replace(".", "G"), ours[:-1]]:
        assert entry_url_key(foreign) is None
    assert fill_charge(ours) is None
    assert fill_charge(f"{ours}.-5") is None


@given(FOOTERS, st.binary(max_size=100))
def test_footer_comes_back(footer: CacheFooter, data: bytes) -> None:
    """A footer is read from its file's end, whatever bytes precede it."""
    packed = footer.pack()
    tail = (data + packed)[-TAIL_SIZE:]
    assert CacheFooter.parse(tail, footer.size + len(packed)) == footer
    assert len(packed) <= TAIL_SIZE


@given(FOOTERS, st.data())
def test_damaged_footer_is_none(footer: CacheFooter, data: st.DataObject) -> None:
    """A file of another length than its footer states, or with a lost or changed byte in its footer, has no footer."""
    packed = footer.pack()
    size = footer.size + len(packed)
    assert CacheFooter.parse(packed, size + data.draw(st.integers(1, 9))) is None
    assert CacheFooter.parse(packed, size - 1) is None
    cut = data.draw(st.integers(1, len(packed)))
    assert CacheFooter.parse(packed[:-cut], size - cut) is None
    place = data.draw(st.integers(0, len(packed) - UNUSED - 1))
    changed = bytearray(packed)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert CacheFooter.parse(bytes(changed), size) is None
    assert CacheFooter.parse(bytes(len(packed)), size) is None


@pytest.mark.parametrize(
    ("etag", "storable"),
    [('"x"', True), ("é" * (MOST_ETAG // 2), True), ("é" * (MOST_ETAG // 2) + "x", False), ("\udcff", False)],
)
def test_storable_etag(etag: str, storable: bool) -> None:
    """ETags that a header can hold but a footer cannot are not cached."""
    assert storable_etag(etag) is storable


@given(
    st.lists(st.builds(Stored, st.integers(0, 9), st.text(max_size=3), st.integers(1, 50)), unique=True),
    st.integers(-5, 400),
)
def test_victims_are_the_oldest_and_enough(files: list[Stored], excess: int) -> None:
    """No file is chosen before a file that was used earlier, no more than needed, and all if they are too few."""
    victims = choose_victims(iter(files), excess)
    kept = set(files) - set(victims)
    assert len(victims) + len(kept) == len(files)
    freed = sum(file.charged for file in victims)
    assert freed >= excess or not kept
    if victims:
        newest = max(file.used for file in victims)
        assert all(file.used >= newest for file in kept)
        assert any(freed - file.charged < excess for file in victims if file.used == newest)
