"""The contract of readers, for every format and for a user's own reader."""

from __future__ import annotations

import gzip
import tarfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncloader.formats import (
    CompressedReader,
    Located,
    ShardError,
    ShardRange,
    ShardReader,
    open_reader,
    shard_format,
)
from asyncloader.formats.base import base_name
from asyncloader.formats.compressed import MemberDecoder
from tests.drawn import scaled
from tests.unit.formats.shard_readers import URL, check_any_split, check_resume, chunked, corrupted, cut_points, drive
from tests.unit.formats.test_tar import pack
from tests.unit.remote.shards import MAKERS, mds_entry


def test_shard_error_says_where() -> None:
    """The error has message, URL and offset, as far as they are known."""
    error = ShardError("broken", url="s3://b/x.tar", offset=12345)
    assert str(error) == "broken (s3://b/x.tar at byte 12,345)"
    assert str(ShardError("broken", url="u")) == "broken (u)"
    assert str(ShardError("broken")) == "broken"


@pytest.mark.parametrize("url", ["a.tar", "a.jsonl", "a.tfrecord", "a.jsonl.gz"])
def test_an_empty_part_is_done_at_once(url: str) -> None:
    """Nothing needs to be fetched for the part; feeding or ending its reader is harmless."""
    reader = open_reader(url, part=ShardRange(10, 10, sync=False))
    assert reader.done
    assert not reader.pending
    assert reader.feed(b"anything") == []
    assert reader.end() == []


NARROWED = {
    "a.tar": MAKERS["a.tar"](range(7)),
    "a.tar.gz": gzip.compress(MAKERS["a.tar"](range(7))),
    "a.tfrecord": MAKERS["a.tfrecord"](range(7)),
    "a.mds": MAKERS["a.mds"](range(7)),
    "b.jsonl": MAKERS["a.jsonl"](range(7)),
    "a.jsonl": b'\xef\xbb\xbf\n{"n": 0}\n\n{"n": 1}\nbad\n[]\n  \r\n{"n": 2}\r\n{"n": 3}\nbad\n{"n": 4}',
}


@pytest.mark.parametrize("url", NARROWED)
@given(cuts=cut_points, skip=st.integers(0, 8), most=st.none() | st.integers(0, 8))
@example(cuts=[], skip=0, most=0)
@example(cuts=[], skip=2, most=3)
def test_a_narrowed_reader(url: str, cuts: list[float], skip: int, most: int | None) -> None:
    """Samples, good or bad, are counted: those before are passed over, and those behind are neither made nor read."""

    def found(skip: int, most: int | None, cuts: list[float]) -> list[tuple[int | None, str]]:
        bad: list[ShardError] = []
        shard = mds_entry(range(7)) if url.endswith(".mds") else None
        reader = open_reader(url, on_bad=bad.append, shard=shard, skip=skip, most=most)
        samples, error = drive(reader, chunked(NARROWED[url], cuts))
        assert error is None
        good = [(resume, repr(sample)) for sample, resume in samples]
        return sorted([*good, *((error.resume, str(error)) for error in bad)])

    whole = found(0, None, [])
    assert len(whole) >= 7
    assert found(skip, most, cuts) == whole[skip:][:most]


def test_a_part_of_a_tar_ends_where_the_next_sample_begins() -> None:
    """No byte behind it is needed."""
    data = NARROWED["a.tar"]
    ends = [resume for _, resume in drive(open_reader("a.tar"), [data])[0]]
    reader = open_reader("a.tar", part=ShardRange(ends[1], ends[3], sync=False))
    assert [resume for _, resume in reader.feed(data[ends[1] : ends[3]])] == ends[2:4]
    assert reader.done


def test_a_part_of_a_tar_that_ends_inside_a_sample() -> None:
    """As where the shard was replaced since its samples were counted: the sample is whole all the same."""
    data = NARROWED["a.tar"]
    whole = drive(open_reader("a.tar"), [data])[0]
    part = ShardRange(0, whole[0][1] + 512, sync=False)
    assert drive(open_reader("a.tar", part=part), [data]) == (whole[:2], None)


DAMAGED = {
    **{url: MAKERS[url](range(5)) for url in ("a.tar", "a.tfrecord", "a.mds", "a.jsonl")},
    "pax.tar": pack([("deep/" * 30 + f"{n}.txt", b"x" * 9) for n in "ab"], tarfile.PAX_FORMAT),
}


@pytest.mark.parametrize("url", DAMAGED)
@given(data=st.data(), cuts=cut_points)
@settings(max_examples=scaled(100))
def test_damaged_bytes(url: str, data: st.DataObject, cuts: list[float]) -> None:
    """Give samples or a `ShardError`, the same for any chunks; so where bad samples are skipped."""
    drawn = data.draw(corrupted(DAMAGED[url]))
    shard = mds_entry(range(5)) if url.endswith(".mds") else None
    kind, skipping = shard_format(url), data.draw(st.booleans())
    on_bad = list[ShardError]().append if skipping else None
    check_any_split(lambda _: open_reader(URL, kind, shard=shard, on_bad=on_bad), drawn, cuts)


@pytest.mark.parametrize("url", ["a.tar", "a.jsonl", "a.tfrecord"])
def test_any_buffer_can_be_fed(url: str) -> None:
    """Transports give bytes; a memoryview of a bytearray is copied, and may be changed afterwards."""
    reader = open_reader(url)
    chunk = bytearray(7)
    assert reader.feed(memoryview(chunk)) == []  # type: ignore[arg-type]
    chunk[:] = b"changed"
    with pytest.raises(ShardError):
        reader.end()


@pytest.mark.parametrize(
    ("url", "name"),
    [("a/b.tar", "b.tar"), ("s3://b/k/x.tar?v=1#f", "x.tar"), ("x.tar", "x.tar"), ("/a/q?.tar", "q?.tar"), ("", "")],
)
def test_base_name(url: str, name: str) -> None:
    """Only a URL has a query; a path may contain question marks."""
    assert base_name(url) == name


class FixedRecords:
    """A user's own reader that only meets the protocol: records of four bytes."""

    pending = False
    done = False

    def __init__(self, start: int) -> None:
        self.feed_from = start
        self._at = start
        self._held = b""

    def feed(self, chunk: bytes, /) -> list[Located]:
        self._held += chunk
        found: list[Located] = []
        while len(self._held) >= 4:
            self._at += 4
            found.append(Located({"__key__": str(self._at), "__url__": URL, "raw": self._held[:4]}, self._at))
            self._held = self._held[4:]
        return found

    def end(self) -> list[Located]:
        if self._held:
            raise ShardError("a record is cut off", url=URL, offset=self._at)
        self.done = True
        return []


def test_a_users_own_reader() -> None:
    """The reader needs no base class, also inside a compression."""
    data = b"abcdefghijkl"

    def packed(start: int) -> ShardReader:
        return CompressedReader(URL, FixedRecords(start), MemberDecoder("gzip"))

    check_any_split(FixedRecords, data, [0.1, 0.7])
    check_resume(FixedRecords, data)
    check_any_split(packed, gzip.compress(data), [0.1, 0.7])
    check_resume(packed, gzip.compress(data))
    assert check_any_split(packed, gzip.compress(data[:-1]), [0.5])[1] == (f"a record is cut off ({URL} at byte 8)", 8)
