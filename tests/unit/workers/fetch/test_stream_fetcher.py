"""Streams in batches: the end, several tasks at a time, and the numbers by which samples are seeded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from asyncloader.base.events import SkippedSample
from asyncloader.workers.fetch.data_end import MAX_CONSECUTIVE, EndOfData, StreamErrors
from asyncloader.workers.fetch.sample import SampleMaker
from asyncloader.workers.fetch.sample_errors import NoSamples
from asyncloader.workers.fetch.seeding import EpochSeeding, SampleSeeder
from asyncloader.workers.fetch.stream_fetcher import StreamFetcher
from tests.unit.workers.fetch.drawing import at_sample, drawn
from tests.unit.workers.fetch.raising import (
    MODES,
    SKIP,
    AsyncStream,
    BrokenAsyncGenerator,
    BrokenGenerator,
    Stream,
    fetch,
    indices,
    places,
    raised,
    reader,
    rest,
)

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


# --------------------------------------------------------------------------------------------------- samples that raise


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [Stream, AsyncStream])
async def test_a_stream_goes_on_past_bad_samples(kind: Any, drop_last: bool, mode: str) -> None:
    """A bad sample counts towards its batch's size, so all other samples and their random numbers are unchanged."""
    options: dict[str, Any] = {"seeded": MODES[mode], "drop_last": drop_last}
    raising = {1, 4, 5, 6, 7, 10}
    bad: list[SkippedSample] = []
    found = await rest(reader(kind(15, *raising), SKIP, **options), bad)
    assert [batch and indices(batch) for batch in found] == [[0, 2, 3], None, [8, 9, 11], [12, 13, 14]][
        : 3 if drop_last else 4
    ]
    assert places(bad) == [(None, number, "skipped") for number in sorted(raising)]
    if mode == "seeded":
        whole = await rest(reader(kind(15), **options))
        assert found == [[s for s in batch if s[0] not in raising] or None for batch in whole]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [Stream, AsyncStream])
async def test_records_before_the_end_are_not_lost(kind: Any, drop_last: bool) -> None:
    """Where no batch is left to carry the records, an empty batch precedes the end."""
    bad: list[SkippedSample] = []
    found = await rest(reader(kind(6, 4, 5), SKIP, drop_last=drop_last), bad)
    assert [batch and indices(batch) for batch in found] == [[0, 1, 2, 3], None]
    assert [record.position for record in bad] == [4, 5]
    bad = []
    found = await rest(reader(kind(6, 4), SKIP, drop_last=drop_last), bad)
    assert [batch and indices(batch) for batch in found] == [[0, 1, 2, 3], None if drop_last else [5]]
    assert [record.position for record in bad] == [4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_size", [4, 3, None])
@pytest.mark.parametrize("kind", [BrokenGenerator, BrokenAsyncGenerator])
async def test_a_generator_that_raised_is_no_streams_end(kind: Any, batch_size: int | None, mode: str) -> None:
    """The exception is raised, with advice, wherever in the batch it occurred; afterwards the stream has ended."""
    one = reader(kind(), SKIP, batch_size=batch_size, collate_fn=lambda data: data, seeded=MODES[mode])
    good = {4: 1, 3: 1, None: 3}[batch_size]
    for _ in range(good):
        await fetch(one)
    if batch_size is None:
        with pytest.raises(NoSamples):
            await fetch(one)
    with pytest.raises(ValueError, match="bad 3") as caught:
        await fetch(one)
    assert "a generator cannot go on" in caught.value.__notes__[0]
    with pytest.raises(EndOfData):
        await fetch(one)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Stream, AsyncStream])
async def test_a_stream_that_only_raises_is_given_up(kind: Any) -> None:
    """The stream is given up after 1000 consecutive failures, over all batches."""
    one = reader(kind(5000, *range(1, 5000)), SKIP)
    bad: list[SkippedSample] = []
    batches = 0
    with pytest.raises(ValueError, match="bad 1000") as caught:  # noqa: PT012 - its batches come first
        while True:
            with contextlib.suppress(NoSamples):
                await fetch(one, None, bad)
            batches += 1
    assert batches == 250
    assert len(bad) == 999
    assert "1000 times in a row" in caught.value.__notes__[0]
    assert caught.value.__notes__[1] == "while reading sample number 1000 of worker 2's stream"


# ---------------------------------------------------------------------------------------------- StreamErrors alone


def broken_generator() -> Iterator[Any]:
    yield 0
    raise ValueError("in a generator")


async def broken_async_generator() -> AsyncIterator[Any]:
    yield 0
    raise ValueError("in a generator")


def test_the_end_after_a_generators_exception_is_none() -> None:
    """The exception is raised again, with a note of the reason and the remedy; also from beneath a `map`."""
    for stream in (broken_generator(), map(str, broken_generator())):
        next(stream)
        one = StreamErrors()
        with pytest.raises(ValueError, match="in a generator") as caught:
            next(stream)
        assert not one.failed(caught.value, 1)
        assert one.ended(2) is caught.value
        assert "a generator cannot go on" in caught.value.__notes__[0]
        assert one.ended(2) is None  # it is raised once


async def test_the_end_after_an_async_generators_exception_is_none() -> None:
    """The exception of an async generator is raised again, too."""
    stream = broken_async_generator()
    await anext(stream)
    one = StreamErrors()
    with pytest.raises(ValueError, match="in a generator") as caught:
        await anext(stream)
    one.failed(caught.value, 1)
    assert one.ended(2) is caught.value


def test_an_iterator_may_end_after_an_exception() -> None:
    """An iterator other than a generator could have gone on; a stream that went on misses nothing."""
    one = StreamErrors()
    one.failed(raised(ValueError("bad")), 1)
    assert one.ended(2) is None
    stream = broken_generator()
    next(stream)
    with pytest.raises(ValueError, match="in a generator") as caught:
        next(stream)
    one.failed(caught.value, 1)
    assert one.ended(3) is None  # a sample was read in between


def test_a_stream_that_makes_no_progress_is_given_up() -> None:
    """The stream is given up after 1000 consecutive failures; each success resets the count."""
    one = StreamErrors()
    place = 0
    for _ in range(2):
        for _ in range(MAX_CONSECUTIVE - 1):
            assert not one.failed(raised(ValueError("bad")), place)
            place += 1
        place += 1  # a sample
    for _ in range(MAX_CONSECUTIVE - 1):
        assert not one.failed(raised(ValueError("bad")), place)
        place += 1
    error = raised(ValueError("last"))
    assert one.failed(error, place)
    assert "1000 times in a row" in error.__notes__[0]
