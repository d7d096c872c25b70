"""Streams in batches: the end, several tasks at a time, and the numbers by which samples are seeded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncloader.workers.fetch.sample import SampleMaker
from asyncloader.workers.fetch.seeding import EpochSeeding, SampleSeeder
from asyncloader.workers.fetch.stream_fetcher import StreamFetcher
from tests.unit.workers.fetch.drawing import at_sample, drawn

# --------------------------------------------------------------------------------------------------- seeded mode


def numbers(start: int, count: int) -> Iterator[Any]:
    for value in range(start, start + count):
        yield value, drawn()


def seeded(stream: Any, read: int = 0, *, asynchronous: bool = False) -> StreamFetcher:
    maker = SampleMaker(None, EpochSeeding(SampleSeeder(1, 0, 4), None, 1), asynchronous=asynchronous)
    return StreamFetcher(stream, maker, False, lambda sample: sample, read=read)


def test_an_error_in_a_stream_is_not_a_sample() -> None:
    """A sample that failed has no number; the next sample, if there is one, has it."""

    class Stumbling:
        tries = 0

        def __next__(self) -> Any:
            self.tries += 1
            if self.tries == 2:
                raise OSError("once")
            return drawn()

    stream = seeded(Stumbling())
    assert stream.fetch(None) == at_sample(0, 4)
    with pytest.raises(OSError, match="once"):
        stream.fetch(None)
    assert stream.fetch(None) == at_sample(1, 4)
