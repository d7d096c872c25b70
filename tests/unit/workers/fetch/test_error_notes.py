"""Errors that name their sample, from fetchers that otherwise behave exactly like torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset
from torch.utils.data._utils import fetch as torch_fetch

from asyncloader.base.events import Cursor, SkippedSample
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.error_notes import add_note, index_text, note_collation, take_notes
from asyncloader.workers.fetch.map_fetcher import MapFetcher
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample import SampleMaker
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.fetch.stream_fetcher import StreamFetcher
from tests.unit.workers.fetch.raising import (
    MODES,
    SEEDED,
    SKIP,
    AsyncGetitems,
    AsyncMap,
    AsyncStream,
    Getitems,
    Map,
    Stream,
    at,
    fetch,
    reader,
)

# --------------------------------------------------------------------------------- exactly torch's behaviour


class Log:
    """Records the indices that it is asked for."""

    def __init__(self, length: int, bad: int | None, getitems: Any = "none") -> None:
        self.length, self.bad = length, bad
        self.calls: list[Any] = []
        if getitems != "none":
            self.__getitems__ = getitems

    def __getitem__(self, index: Any) -> Any:
        self.calls.append(index)
        if index == self.bad:
            raise KeyError(index)
        return index

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield self[number]


def outcomes(fetcher: Any, batches: list[Any]) -> list[Any]:
    found: list[Any] = []
    for batch in batches:
        try:
            found.append(fetcher.fetch(batch))
        except Exception as error:
            found.append((type(error), error.args))
    return found


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 9)), st.tuples(st.integers(0, 9)), st.builds(range, st.integers(0, 9)))),
    st.none() | st.integers(0, 9),
    st.sampled_from(["none", None, len]),
    st.booleans(),
)
def test_map_datasets_are_asked_as_torch_asks(batches: list[Any], bad: int | None, getitems: Any, auto: bool) -> None:
    """Calls, batches and errors are those of torch's fetcher, for any indices, with and without `__getitems__`."""
    ours, theirs = Log(9, bad, getitems), Log(9, bad, getitems)
    mine = MapFetcher(SampleMaker(ours), auto, repr)
    other: Any = torch_fetch._MapDatasetFetcher(theirs, auto, repr, False)
    assert outcomes(mine, batches) == outcomes(other, batches)
    assert ours.calls == theirs.calls


@given(st.integers(0, 12), st.none() | st.integers(0, 12), st.integers(1, 4), st.booleans(), st.booleans())
def test_streams_are_read_as_torch_reads(length: int, bad: int | None, size: int, auto: bool, drop_last: bool) -> None:
    """Streams have torch's short batches, `drop_last`, end, and behaviour after an error."""
    ours, theirs = Log(length, bad), Log(length, bad)
    mine = StreamFetcher(iter(ours), SampleMaker(None), auto, repr, drop_last)
    other: Any = torch_fetch._IterableDatasetFetcher(theirs, auto, repr, drop_last)
    batches = [range(size)] * 15
    end = [(StopIteration, ()) if found == (EndOfData, ()) else found for found in outcomes(mine, batches)]
    assert end == outcomes(other, batches)
    assert ours.calls == theirs.calls


# ------------------------------------------------------------------------------------------ errors with their place


async def note_of(one: DatasetReader, index: Any = None, batches: int = 1) -> list[str]:
    for _ in range(batches - 1):
        await fetch(one, index)
    with pytest.raises(Exception) as caught:
        await fetch(one, index)
    return list(caught.value.__notes__)


@pytest.mark.parametrize("kind", [Map, AsyncMap])
async def test_an_error_names_its_sample(kind: Any) -> None:
    """The note has its index, its place in the batch, and in seeded mode its position."""
    batch = [11, 17, 5, 17]
    assert await note_of(reader(kind(5)), batch) == ["while fetching sample index 5 (item 2 of the batch)"]
    assert await note_of(reader(kind(17)), tuple(batch)) == ["while fetching sample index 17 (item 1 of the batch)"]
    seeded = reader(kind(5), seeded=SEEDED._replace(replicas=3))
    assert await note_of(seeded, (10, batch)) == ["while fetching sample index 5 (item 2 of the batch), position 16"]
    assert await note_of(reader(kind(5), batch_size=None), 5) == ["while fetching sample index 5"]
    single = reader(kind(5), seeded=SEEDED, batch_size=None)
    assert await note_of(single, (8, 5)) == ["while fetching sample index 5, position 8"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Getitems, AsyncGetitems])
async def test_an_error_of_a_whole_batch_names_the_batch(kind: Any, mode: str) -> None:
    """With `__getitems__` it is unknown which sample raised."""
    found = await note_of(reader(kind(5), seeded=MODES[mode]), at(mode, 0, [4, 5]))
    assert found == ["while fetching the batch of indices [4, 5]"]


async def test_samples_of_an_async_subset_are_named() -> None:
    """The note has the subset's own indices."""
    one = reader(Subset(AsyncMap(25), range(20, 30)))
    assert await note_of(one, [4, 5]) == ["while fetching sample index 5 (item 1 of the batch)"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Stream, AsyncStream])
async def test_an_error_of_a_stream_names_the_number(kind: Any, mode: str) -> None:
    """The note has the sample's number in the worker's stream, and the worker, also in a resumed stream."""
    one = reader(kind(11, 6), seeded=MODES[mode])
    assert await note_of(one, batches=2) == ["while reading sample number 6 of worker 2's stream"]
    samples = 4 if mode == "seeded" else 0
    start = EpochStart(cursor=Cursor(1, samples, False, None, {"at": 4}))
    one = reader(kind(11, 6), seeded=MODES[mode], start=start)
    assert await note_of(one) == ["while reading sample number 6 of worker 2's stream"]
    one = reader(kind(11, 2), seeded=MODES[mode], batch_size=None, collate_fn=tuple)
    assert await note_of(one, batches=3) == ["while reading sample number 2 of worker 2's stream"]


def broken_collate(samples: Any) -> Any:
    raise TypeError("does not collate")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [None, SKIP])
async def test_an_error_of_collation_names_the_batch(mode: str, policy: Any) -> None:
    """The error belongs to no sample, so it is never skipped or recorded."""

    async def found(one: DatasetReader, index: Any = None) -> list[str]:
        bad: list[SkippedSample] = []
        with pytest.raises(TypeError, match="does not collate") as caught:
            await fetch(one, index, bad)
        assert bad == []
        return list(caught.value.__notes__)

    options: dict[str, Any] = {"seeded": MODES[mode], "collate_fn": broken_collate}
    for kind in (Map, AsyncMap):
        assert await found(reader(kind(), policy, **options), at(mode, 0, [4, 5])) == [
            "while collating the batch of indices [4, 5]"
        ]
        alone = reader(kind(), policy, batch_size=None, **options)
        assert await found(alone, at(mode, 0, 4)) == ["while collating sample index 4"]
    for stream in (Stream, AsyncStream):
        assert await found(reader(stream(9), policy, **options)) == [
            "while collating samples number 0 to 3 of worker 2's stream"
        ]


def test_what_torchs_collation_does_not_say() -> None:
    """For samples that cannot be put together the note has advice; for other errors it has no advice."""
    for error, advice in (
        (RuntimeError("stack expects each tensor to be equal size, but got"), " (samples of different sizes need"),
        (TypeError("default_collate: batch must contain tensors; found <class 'int'>"), " (samples of this type need"),
        (TypeError("default_collate: batch must contain tensors; found <class 'coroutine'>"), " (a dataset whose"),
        (TypeError(7), ""),
        (ValueError("found <class"), ""),
    ):
        note_collation(error, 3, batched=False)
        assert error.__notes__[0].startswith(f"while collating sample index 3{advice}")
        assert advice or error.__notes__ == ["while collating sample index 3"]


def test_notes_are_added_once_and_to_what_takes_them() -> None:
    """An exception that refuses notes, or has no `__notes__`, is raised unchanged."""

    class Refusing(Exception):
        def add_note(self, note: str) -> None:
            raise RuntimeError("no notes")

    class Frozen(Exception):
        def __getattribute__(self, name: str) -> Any:
            if name == "__notes__":
                raise RuntimeError("no")
            return super().__getattribute__(name)

    error = ValueError()
    add_note(error, "while fetching a")
    add_note(error, "while fetching a")
    add_note(error, "mine")
    assert error.__notes__ == ["while fetching a", "mine"]
    assert take_notes(error) == ["while fetching a"]
    assert error.__notes__ == ["mine"]
    assert take_notes(error) == []
    for odd in (Refusing(), Frozen()):
        add_note(odd, "while fetching a")
        assert take_notes(odd) == []


def test_an_index_takes_one_short_line() -> None:
    """Long batches and long keys are shortened; an object without a text has a substitute."""

    class Textless:
        def __repr__(self) -> str:
            raise RuntimeError("none")

    assert index_text([1, 2, 3]) == "[1, 2, 3]"
    assert index_text(range(256)) == "range(0, 256)"
    assert index_text(list(range(256))) == "[0, 1, 2, 3, 4, 5, 6, 7, ..., 255] (256 of them)"
    assert index_text("a.jpg") == "'a.jpg'"
    assert len(index_text(["x" * 10_000] * 256)) < 2500
    assert len(index_text(dict.fromkeys(range(1000), "y" * 1000))) < 2500
    assert "Textless" in index_text(Textless())
