"""Helpers that drive shard readers by their contract, and checks that every reader must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from asyncloader.formats import IndexedReader, Located, ShardError, ShardReader

MakeReader: TypeAlias = Callable[[int], ShardReader]
"""A reader with this `start`."""

Outcome: TypeAlias = tuple[list[tuple[Any, int]], tuple[str, int | None] | None]
"""Samples with their resume offsets; then the error's text and offset, or None."""

MOST_STEPS = 500
"""Calls of `feed` for one chunk: a reader that needs more would go on for ever."""

URL = "s3://bucket/train/shard-0001.ext?version=7"
NAME = "shard-0001.ext"

cut_points = st.lists(st.floats(0, 1), max_size=12)
"""Where to cut bytes into chunks, as fractions of their length."""


def plain(value: Any) -> Any:
    """The value in a form comparable by ``==``: arrays and numpy scalars with their types, NaN as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return (str(value.dtype), value.shape, value.tobytes())
    return repr(value) if isinstance(value, float) else value


def chunked(data: bytes, cuts: Sequence[float]) -> list[bytes]:
    edges = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(edges)]


def drive(reader: ShardReader | IndexedReader, chunks: Sequence[bytes]) -> Outcome:
    """Feed `chunks` as the contract prescribes, and record all samples and the error."""
    got: list[Located] = []
    error: tuple[str, int | None] | None = None
    place: tuple[str, bool] | None = None
    try:
        for chunk in chunks:
            got += reader.feed(chunk)
            steps = 0
            while reader.pending:
                got += reader.feed(b"")
                steps += 1
                assert steps < MOST_STEPS, "the reader never takes its bytes"
            if reader.done:
                break
        else:
            got += reader.end()
    except ShardError as fault:
        error = (str(fault), fault.offset)
        place = (fault.url, reader.done)
    assert place == (URL, False) or error is None
    return [(plain(sample), resume) for sample, resume in got], error


def samples_of(reader: ShardReader, data: bytes) -> list[Any]:
    """All samples of a good shard, unchanged; the shard is fed at once."""
    found = [*reader.feed(data[reader.feed_from :])]
    while reader.pending:
        found += reader.feed(b"")
    if not reader.done:
        found += reader.end()
    return [sample for sample, _ in found]


def read(make: MakeReader, data: bytes, cuts: Sequence[float] = (), start: int = 0) -> Outcome:
    reader = make(start)
    return drive(reader, chunked(data[reader.feed_from :], cuts))


def check_any_split(make: MakeReader, data: bytes, cuts: Sequence[float]) -> Outcome:
    """Chunks cut anywhere, and single bytes, give the same outcome as the whole shard."""
    whole = read(make, data)
    assert read(make, data, cuts) == whole
    if len(data) < 20_000:
        assert drive(make(0), [data[at : at + 1] for at in range(len(data))]) == whole
    return whole


def check_resume(make: MakeReader, data: bytes) -> None:
    """From each sample's resume offset, a new reader gives exactly the samples that follow."""
    samples, error = read(make, data)
    assert error is None
    for number, (_, resume) in enumerate(samples, 1):
        assert read(make, data, start=resume) == (samples[number:], None)


@st.composite
def corrupted(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some bytes overwritten, perhaps truncated, perhaps with other bytes appended."""
    bytes_ = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data) - 1))
        piece = draw(st.binary(min_size=1, max_size=8))
        bytes_[at : at + len(piece)] = piece
    end = draw(st.one_of(st.just(len(bytes_)), st.integers(0, len(bytes_))))
    return bytes(bytes_[:end]) + draw(st.one_of(st.just(b""), st.binary(max_size=600)))


def error_of(make: MakeReader, data: bytes) -> tuple[str, int | None]:
    """The error that reading `data` raises; it must be equal for single bytes."""
    _, error = check_any_split(make, data, [0.3, 0.31])
    assert error is not None
    return error
