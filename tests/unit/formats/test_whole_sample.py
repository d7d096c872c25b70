"""Samples whose bytes are all there: the same as those of the shard's reader, or left to it."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import JsonlReader, MdsReader, ShardReader, TarReader, parse_mds_index
from asyncloader.formats.base import ReadWhole
from asyncloader.formats.jsonl import json_lines
from asyncloader.formats.mds import mds_samples
from asyncloader.formats.tar import END, tar_samples
from asyncloader.formats.tfrecord import TFRecordReader, crc32c, tfrecords
from tests.drawn import scaled
from tests.helpers.shards_of_formats import COLUMNS, of_every_column
from tests.unit.formats.mds_writer import shard_entry, write_index
from tests.unit.formats.shard_readers import URL, corrupted, plain, read
from tests.unit.formats.test_tar import pack
from tests.unit.remote.shards import jsonl, tfrecord

MEMBERS = [("a.jpg", b"J" * 700), ("a.CLS", b"3"), ("b.jpg", b""), ("d/c.left.PNG", b"P" * 512), ("d/c.x", b"y" * 513)]
LONG = [(f"{'directory/' * 11}{name}", data) for name, data in MEMBERS]  # ustar: in the prefix
MDS = of_every_column(range(1, 5))
(ENTRY,) = parse_mds_index(write_index(shard_entry(COLUMNS, 4, len(MDS), "shard.00000.mds")))


class Case(NamedTuple):
    data: bytes
    whole: ReadWhole
    reader: Callable[..., ShardReader]
    tail: bytes = b""


CASES = {
    "ustar": Case(pack(MEMBERS), tar_samples(URL), TarReader, END),
    "ustar, long names": Case(pack(LONG), tar_samples(URL), TarReader, END),
    "gnu": Case(pack(MEMBERS, tarfile.GNU_FORMAT), tar_samples(URL), TarReader, END),
    # As webdataset writes it: a header of records before each member, because the time is no whole number.
    "pax": Case(pack(MEMBERS, tarfile.PAX_FORMAT, mtime=1.5), tar_samples(URL), TarReader, END),
    "mds": Case(MDS, mds_samples(URL, ENTRY), partial(MdsReader, shard=ENTRY)),
    "jsonl": Case(jsonl(range(4)), json_lines(URL), JsonlReader),
    "jsonl, blanks behind": Case(jsonl(range(4)).replace(b"\n", b" \t\r\n"), json_lines(URL), JsonlReader),
    "tfrecord": Case(tfrecord(range(4)), tfrecords(URL, crc32c), partial(TFRecordReader, checksum=crc32c)),
    "tfrecord, not verified": Case(tfrecord(range(4)), tfrecords(URL, None), partial(TFRecordReader, checksum=None)),
}


def edges_of(case: Case) -> list[int]:
    samples, error = read(lambda start: case.reader(URL, start=start), case.data)
    assert error is None
    first = int(ENTRY.offsets(MDS[: ENTRY.header_size])[0]) if case.data is MDS else 0
    return [first, *(resume for _, resume in samples)]


def by_reader(case: Case, data: bytes, start: int) -> list[Any]:
    """The samples in the bytes of one, each with its end; [] if there is an error."""
    samples, error = read(lambda at: case.reader(URL, start=at), bytes(start) + data + case.tail, start=start)
    return [] if error is not None and not samples else samples


@pytest.mark.parametrize("name", CASES)
def test_usual_samples(name: str) -> None:
    """They are read here, from any source that has them somewhere."""
    case = CASES[name]
    edges = edges_of(case)
    assert len(edges) > 3
    for start, stop in pairwise(edges):
        data = case.data[start:stop]
        found = case.whole(b"before" + data + b"behind", 6, 6 + len(data), start)
        assert [(plain(found), stop)] == by_reader(case, data, start)


UNUSUAL = {
    "a GNU long name": pack([("n" * 120 + ".a", b"x")], tarfile.GNU_FORMAT),
    "a pax name": pack([("é" * 120 + ".a", b"x")], tarfile.PAX_FORMAT),
    "a directory": pack([("d", b"")], type=tarfile.DIRTYPE) + pack([("d/a.x", b"1")])[:1024],
    "no extension": pack([("a", b"1")]),
    "a field twice": pack([("a.x", b"1"), ("a.x", b"2")]),
    "reserved": pack([("a.__key__", b"1")]),
    "metadata without a folder": pack([("__a.x", b"1"), ("__a.y__", b"2")]),
    "two samples": pack([("a.x", b"1"), ("b.x", b"2")]),
    "nothing": b"",
    "an end": END,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_members_are_left_to_the_reader(name: str) -> None:
    """Also those that it can read."""
    data = UNUSUAL[name].rstrip(b"\0")
    data += bytes(-len(data) % 512)
    assert tar_samples(URL)(data, 0, len(data), 0) is None


@settings(max_examples=scaled(600))
@given(st.data(), st.sampled_from(sorted(CASES)))
def test_bad_bytes(data: st.DataObject, name: str) -> None:
    """Whatever is read here, the reader reads as well, and as the only sample of these bytes."""
    case = CASES[name]
    start, stop = data.draw(st.sampled_from([*pairwise(edges_of(case))]))
    drawn = data.draw(corrupted(case.data[start:stop]))
    found = case.whole(drawn, 0, len(drawn), start)
    assert found is None or by_reader(case, drawn, start) == [(plain(found), start + len(drawn))]
