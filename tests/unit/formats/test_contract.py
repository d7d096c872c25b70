"""The contract of readers, for every format and for a user's own reader."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.errors import LoaderError
from asyncloader.formats import CompressedReader, Located, ShardError, ShardRange, ShardReader, open_reader
from asyncloader.formats.base import base_name
from asyncloader.formats.compressed import decoder
from tests.unit.formats.shard_readers import URL, check_any_split, check_resume


def test_shard_error_says_where() -> None:
    """The error has message, URL and offset, is a ValueError, can be made from a message alone, and pickles whole."""
    error = ShardError("broken", url="s3://b/x.tar", offset=12345)
    assert str(error) == "broken (s3://b/x.tar at byte 12,345)"
    assert str(ShardError("broken", url="u")) == "broken (u)"
    assert str(ShardError("broken")) == "broken"
    assert isinstance(error, LoaderError)
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.url, again.offset) == (str(error), "s3://b/x.tar", 12345)


@pytest.mark.parametrize("url", ["a.tar", "a.jsonl", "a.tfrecord", "a.jsonl.gz"])
def test_an_empty_part_is_done_at_once(url: str) -> None:
    """Nothing needs to be fetched for the part; feeding or ending its reader is harmless."""
    reader = open_reader(url, part=ShardRange(10, 10, sync=False))
    assert reader.done
    assert not reader.pending
    assert reader.feed(b"anything") == []
    assert reader.end() == []


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


@given(st.sampled_from(["http://", "s3://", "x+y://", "1a://"]), st.text("ab/:?#.% \t\xa0@;=é[]"))
def test_base_names_of_odd_urls(scheme: str, rest: str) -> None:
    """The name is that of the path found by the standard library, also where a shorter way is taken."""

    def found(find: Callable[[str], str]) -> str | None:
        with suppress(ValueError):
            return find(scheme + rest)
        return None

    assert found(base_name) == found(lambda url: urlsplit(url).path.rstrip("/").rpartition("/")[2])


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
        return CompressedReader(URL, FixedRecords(start), decoder("gzip"))

    check_any_split(FixedRecords, data, [0.1, 0.7])
    check_resume(FixedRecords, data)
    check_any_split(packed, gzip.compress(data), [0.1, 0.7])
    check_resume(packed, gzip.compress(data))
    assert check_any_split(packed, gzip.compress(data[:-1]), [0.5])[1] == (f"a record is cut off ({URL} at byte 8)", 8)
