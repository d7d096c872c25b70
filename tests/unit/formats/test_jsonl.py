"""JSON lines: a line is a sample, wherever the shard is cut."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncloader.formats import JsonlReader, ShardError, cut_shard, shard_format
from tests.drawn import scaled
from tests.unit.formats.shard_readers import (
    NAME,
    URL,
    check_any_split,
    check_resume,
    cut_points,
    error_of,
    read,
    samples_of,
)

SMALL = b'{"text": "a", "n": 1, "__key__": "x"}\n\n{"text": "\xc3\xa9"}\r\n{"x": [1, {"y": null}]}'


LINES = shard_format("x.jsonl")


def make(start: int = 0) -> JsonlReader:
    return JsonlReader(URL, start=start)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False), st.lists, max_leaves=5
)
objects = st.dictionaries(st.text(max_size=4).filter(lambda key: key[:1] != "_"), values, max_size=4)


def test_lines_become_samples() -> None:
    """Fields are parsed values; the key is the shard's name and the line's offset, whatever the line says; blank lines
    give no sample.
    """
    assert samples_of(make(), SMALL) == [
        {"text": "a", "n": 1, "__key__": f"{NAME}:0", "__url__": URL},
        {"text": "é", "__key__": f"{NAME}:39", "__url__": URL},
        {"x": [1, {"y": None}], "__key__": f"{NAME}:55", "__url__": URL},
    ]
    check_resume(make, SMALL)


@given(lines=st.lists(objects, max_size=8), end=st.sampled_from(["", "\n", "\r\n\n"]), cuts=cut_points)
@settings(deadline=None, max_examples=scaled(60))
def test_any_lines_in_any_chunks(lines: list[dict[str, object]], end: str, cuts: list[float]) -> None:
    """The fields are those that json wrote; chunks make no difference; every resume offset works."""
    data = ("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + end).encode()
    check_any_split(make, data, cuts)
    check_resume(make, data)
    fields = [{key: value for key, value in s.items() if key[:2] != "__"} for s in samples_of(make(), data)]
    assert fields == lines


@example(lines=["a", "b", "c", "d"], parts=4, end=True, cuts=[])
@given(lines=st.lists(st.text(max_size=12), max_size=12), parts=st.integers(1, 9), end=st.booleans(), cuts=cut_points)
@settings(deadline=None, max_examples=scaled(80))
def test_parts_are_the_whole(lines: list[str], parts: int, end: bool, cuts: list[float]) -> None:
    """Cut by size alone, every line is in exactly one part, also where an edge is a line's first byte. The parts never
    outnumber the bytes.
    """
    data = "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines).encode() + b"\n" * end
    found = []
    for start, stop, sync in cut_shard(LINES, len(data), parts):

        def part(_: int, start: int = start, stop: int | None = stop, sync: bool = sync) -> JsonlReader:
            return JsonlReader(URL, start=start, stop=stop, sync=sync)

        samples, error = read(part, data, cuts)
        assert error is None
        found += samples
    assert found == read(make, data)[0]


def test_a_part_inside_a_long_line_is_done_at_its_end() -> None:
    """The line belongs to an earlier part: its bytes after this part are not read."""
    reader = JsonlReader(URL, start=10, stop=20, sync=True)
    assert reader.feed(b"x" * 8) == []
    assert not reader.done
    assert reader.feed(b"x" * 8) == []
    assert reader.done


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "no JSON"),
        (b'{"a": 1} x', "no JSON"),
        (b'{"a": "\xff"}', "no JSON"),
        (b"[" * 200_000, "no JSON"),  # deeper than the parser goes
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),  # Python's own bound on integers
        (b"[1]", "a JSON list"),
    ],
)
def test_bad_lines(line: bytes, message: str) -> None:
    """A bad line is an error with its offset, after the samples before it; with `on_bad` it is skipped and reported."""
    data = b'{"a": 1}\n' + line + b'\n{"a": 2}\n'
    samples, error = check_any_split(make, data, [0.2, 0.9])
    assert [sample["a"] for sample, _ in samples] == [1]
    assert error is not None
    assert message in error[0]
    assert error[1] == 9
    told: list[ShardError] = []
    assert [s["a"] for s in samples_of(JsonlReader(URL, on_bad=told.append), data)] == [1, 2]
    assert [(bad.offset, bad.url) for bad in told] == [(9, URL)]


def test_max_sample_bytes() -> None:
    """A line without an end is refused as soon as it is too long, and no more than the limit is held."""
    assert len(samples_of(JsonlReader(URL, max_sample_bytes=9), b'{"a": 12}\n')) == 1
    assert "max_sample_bytes" in error_of(lambda _: JsonlReader(URL, max_sample_bytes=8), b'{"a": 12}\n')[0]
    reader = JsonlReader(URL, max_sample_bytes=100_000)
    tracemalloc.start()
    for _ in range(100):
        reader.feed(b"x" * 1000)
    for _ in range(1000):
        with pytest.raises(ShardError, match="max_sample_bytes"):
            reader.feed(b"x" * 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("options", [{"start": -1}, {"stop": -1}, {"max_sample_bytes": 0}])
def test_wrong_arguments(options: dict[str, Any]) -> None:
    """Offsets and limits are checked when the reader is made."""
    with pytest.raises(ValueError, match=r"offsets|at least"):
        JsonlReader(URL, **options)
