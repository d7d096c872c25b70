"""Samples whose offsets are known: the same samples and errors as those of the format's reader, whatever the bytes."""

from __future__ import annotations

import tarfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.formats import (
    IndexedReader,
    ShardFormat,
    ShardRange,
    ShardReader,
    open_indexed_reader,
    open_reader,
    parse_mds_index,
)
from asyncloader.formats.indexed import STEP_SAMPLES
from tests.drawn import scaled
from tests.helpers.shards_of_formats import COLUMNS, of_every_column
from tests.unit.formats.mds_writer import shard_entry, write_index
from tests.unit.formats.shard_readers import URL, Outcome, chunked, corrupted, cut_points, drive, read
from tests.unit.formats.test_tar import pack
from tests.unit.remote.shards import jsonl, tfrecord

SAMPLES = 2 * STEP_SAMPLES + 3
MDS = of_every_column(range(SAMPLES))
(ENTRY,) = parse_mds_index(write_index(shard_entry(COLUMNS, SAMPLES, len(MDS), "shard.00000.mds")))
MEMBERS = [(f"{at}.{field}", b"x" * (at * 99 % 700)) for at in range(SAMPLES) for field in ("a", "B")]
DATA = {
    "tar": pack(MEMBERS),
    # As webdataset writes it: a header of records before each member, because the time is no whole number.
    "tar, pax": pack(MEMBERS, tarfile.PAX_FORMAT, mtime=1.5),
    "tar, long names": pack([(f"{'directory/' * 11}{name}", data) for name, data in MEMBERS]),
    "tar, unusual": pack([(f"{'é' * 99}{name}", data) for name, data in MEMBERS], tarfile.PAX_FORMAT),
    "jsonl": jsonl(range(SAMPLES)),
    "jsonl, blanks": jsonl(range(SAMPLES)).replace(b"\n", b" \t\r\n"),
    "tfrecord": tfrecord(range(SAMPLES)),
    "mds": MDS,
}
SKIP: dict[str, Any] = {"on_bad": lambda _: None}


def by_format(name: str, part: ShardRange, most: int, **options: Any) -> ShardReader:
    shard = ENTRY if name == "mds" else None
    return open_reader(URL, ShardFormat(name.partition(",")[0], None), part=part, shard=shard, most=most, **options)


def by_index(name: str, edges: list[int], *, last: bool, **options: Any) -> IndexedReader:
    shard = ENTRY if name == "mds" else None
    form, offsets = ShardFormat(name.partition(",")[0], None), np.array(edges, np.int64)
    return open_indexed_reader(URL, form, offsets, last=last, shard=shard, **options)


def edges_of(name: str) -> list[int]:
    samples, error = read(lambda start: by_format(name, ShardRange(start, None, sync=False), SAMPLES), DATA[name])
    assert error is None
    return [int(ENTRY.offsets(MDS[: ENTRY.header_size])[0]) if name == "mds" else 0, *(end for _, end in samples)]


def both(name: str, data: bytes, first: int, stop: int, cuts: list[float], **options: Any) -> tuple[Outcome, Outcome]:
    """What the two readers make of samples `first` to `stop`, given all bytes behind the first one's beginning."""
    edges = edges_of(name)
    last = stop == SAMPLES
    chunks = chunked(data[edges[first] :], cuts)
    part = ShardRange(edges[first], None if last else edges[stop], sync=False)
    indexed = by_index(name, edges[first : stop + 1], last=last, **options)
    assert indexed.feed_from == edges[first]
    return drive(by_format(name, part, stop - first, **options), chunks), drive(indexed, chunks)


parts = st.tuples(st.integers(0, SAMPLES - 1), st.integers(1, SAMPLES)).filter(lambda part: part[0] < part[1])


@pytest.mark.parametrize("name", DATA)
@given(part=parts, cuts=cut_points, data=st.data())
@settings(max_examples=scaled(40))
def test_samples_and_errors_are_those_of_the_format(
    name: str, part: tuple[int, int], cuts: list[float], data: st.DataObject
) -> None:
    """Also of damaged bytes, and of a shard that was cut off."""
    expected, found = both(name, DATA[name], *part, cuts)
    assert found == expected
    assert len(found[0]) == part[1] - part[0]
    short = DATA[name][: int(data.draw(st.floats(0, 1)) * len(DATA[name]))]
    for damaged, options in ((data.draw(corrupted(DATA[name])), SKIP), (short, {})):
        expected, found = both(name, damaged, *part, cuts, **options)
        assert found[1] == expected[1]
        # A sample of a tar that is followed by no header is returned: its reader cannot know that it is complete.
        more = found[0][len(expected[0]) :] if name.startswith("tar") and expected[1] is not None else []
        assert found[0] == [*expected[0], *more]
        assert len(more) < 2


@pytest.mark.parametrize("name", sorted(DATA.keys() - {"tar, unusual"}))
def test_only_unusual_samples_are_left_to_the_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those from the first of them on; and the last of a shard, behind which more may lie."""
    opened: list[tuple[int, int | None]] = []

    def opens(*args: Any, part: ShardRange, most: int | None, **options: Any) -> ShardReader:
        opened.append((part.start, most))
        return open_reader(*args, part=part, most=most, **options)

    monkeypatch.setattr("asyncloader.formats.open_reader", opens)
    edges = edges_of(name)
    reader = by_index(name, edges[:-1], last=False)
    assert len(drive(reader, [DATA[name][edges[0] :]])[0]) == SAMPLES - 1
    assert not opened
    reader = by_index(name, edges, last=True)
    assert len(drive(reader, [DATA[name][edges[0] :]])[0]) == SAMPLES
    assert opened == [(edges[-2], 1)]
    at = edges[5]
    broken = DATA[name][edges[0] : at] + bytes(edges[6] - at) + DATA[name][edges[6] :]
    reader = by_index(name, edges[:-1], last=False)
    assert len(drive(reader, [broken])[0]) == 5
    assert opened[1:] == [(at, SAMPLES - 6)]


def test_a_large_sample_is_joined_once() -> None:
    """Bytes are kept in the chunks in which they come until a sample is complete; a sample over the limit is refused
    before.
    """
    data = pack([("a.x", b"x" * (1 << 20)), ("b.x", b"")])
    size = (1 << 20) + 512
    reader = by_index("tar", [0, size, size + 512], last=False)
    for at in range(0, size - 4096, 4096):
        assert not reader.feed(data[at : at + 4096])
        assert not reader.pending
    assert len(reader._more) == size // 4096
    assert len(reader.feed(data[size // 4096 * 4096 :])) == 1  # across chunks; the next is in the last of them
    assert len(reader.feed(b"")) == 1
    assert reader.done
    small = by_index("tar", [0, size, size + 512], last=False, max_sample_bytes=4096)
    samples, error = drive(small, [data[:1024]])
    assert not samples
    assert error is not None
    assert error[0].startswith("a sample takes more than max_sample_bytes=4,096 bytes")
