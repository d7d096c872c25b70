"""Errors that Python would take for the end of the data: only the exhausted iterator itself ends an epoch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader
from asyncloader.workers.fetch.data_end import not_the_end
from tests.helpers.running import BOTH, collect, outcomes, run_async

Error = type[StopIteration] | type[StopAsyncIteration]
STOPS: list[Error] = [StopIteration, StopAsyncIteration]


class Count:
    """Counts from 0 to 7; raises instead of 3, and continues."""

    def __init__(self, error: Error | None = None) -> None:
        self.at, self.error = -1, error

    def __iter__(self) -> Count:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 8:
            raise StopIteration
        if self.at == 3 and self.error is not None:
            raise self.error("mine")
        return self.at


class Stream(IterableDataset[int]):
    def __init__(self, error: Error | None = None) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        return Count(self.error)


class AsyncStream(Stream):
    async def __aiter__(self) -> AsyncIterator[int]:
        for number in Count():
            yield number


class Map(Dataset[int]):
    def __init__(self, error: Error | None = None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3 and self.error is not None:
            raise self.error("mine")
        return index


class AsyncMap(Map):
    """The samples of `Map`, awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


class Order:
    def __init__(self, error: Error) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in Count(self.error))


class Collate:
    """Raises for the batch that has sample 3."""

    def __init__(self, error: Error) -> None:
        self.error = error

    def __call__(self, samples: list[int]) -> list[int]:
        if 3 in samples:
            raise self.error("mine")
        return samples


def assert_raised_once(found: list[Any]) -> None:
    """Check that the second batch is an error with the user's text, and all other batches were delivered."""
    first, (kind, text), *others = found
    assert [list(batch) for batch in (first, *others)] == [[0, 1], [4, 5], [6, 7]]
    assert issubclass(kind, (RuntimeError, StopAsyncIteration))
    assert "mine" in text


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", STOPS)
def test_collation_of_streams(error: Error, workers: int, kind: str) -> None:
    """An error of `collate_fn` for a batch of a stream fails that batch."""
    for stream in (Stream(), AsyncStream()):
        assert_raised_once(outcomes(kind, stream, batch_size=2, num_workers=workers, collate_fn=Collate(error)))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_stop_async_iteration_of_a_blocking_stream(workers: int, kind: str) -> None:
    """The exception is an error of its iterator like any other, as in torch."""
    found = outcomes(kind, Stream(StopAsyncIteration), batch_size=2, num_workers=workers)
    assert_raised_once(found)
    if kind == "sync":
        expected = outcomes("torch", Stream(StopAsyncIteration), batch_size=2, num_workers=workers)
        assert [batch[0] for batch in found] == [batch[0] for batch in expected]
    # The end itself still ends the epoch.
    assert [*map(list, outcomes(kind, Stream(StopIteration), batch_size=2, num_workers=workers))] == [[0, 1], [2]]


@pytest.mark.parametrize("where", ["sample", "collate"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"concurrency": 2},
        {"num_workers": 1, "concurrency": 2},
        {"seeded": 1, "shuffle": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("error", STOPS)
def test_map_datasets_in_an_async_loop(error: Error, options: dict[str, Any], where: str) -> None:
    """No error of a sample or of its collation ends ``async for``: a RuntimeError that names it takes its place."""
    # With a seed and no shuffle the order is that of the indices.
    dataset, collate = (Map(error), list) if where == "sample" else (Map(), Collate(error))
    found = outcomes("asyncio", dataset, batch_size=2, collate_fn=collate, **options)
    assert_raised_once(found)
    assert found[1][0] is RuntimeError
    assert f"raised {error.__name__}" in found[1][1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_stop_async_iteration_of_an_async_map_dataset(kind: str, workers: int) -> None:
    """Awaited samples fail their batch, too, for both loaders; the note names the sample."""
    found = outcomes(kind, AsyncMap(StopAsyncIteration), batch_size=2, num_workers=workers)
    assert_raised_once(found)
    assert found[1][0] is RuntimeError
    assert "code raised StopAsyncIteration" in found[1][1]
    assert "while fetching sample index 3 (item 1 of the batch)" in found[1][1]


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_async_iteration_of_a_sampler(workers: int) -> None:
    """A plain sampler ends with StopIteration alone; any other exception is its error, whichever loop reads it."""

    async def run() -> list[Any]:
        found: list[Any] = []
        async with AsyncDataLoader[Any](Map(), batch_sampler=Order(StopAsyncIteration), num_workers=workers) as loader:
            try:
                async for batch in loader:
                    found.append(batch.tolist())  # noqa: PERF401 - what came before the error counts
            except RuntimeError as error:
                found.append(str(error))
        return found

    *given, error = run_async(run())
    assert given == [[0], [1], [2]]
    assert "mine" in error


class EmptySource(IterableDataset[int]):
    """Reads a header in `__iter__`, and its source is empty."""

    def __iter__(self) -> Iterator[int]:
        return iter([next(iter([]))])


@pytest.mark.parametrize("kind", BOTH)
def test_stop_iteration_at_the_start_of_a_worker(kind: str) -> None:
    """A StopIteration at the start makes no empty epoch: the error is raised, as without workers."""
    with pytest.raises(RuntimeError, match="start-up code raised StopIteration"):
        collect(kind, EmptySource(), num_workers=1)


def _oddly(error: BaseException) -> str:
    raise ValueError("no text")


@pytest.mark.parametrize("text", [lambda _: "mine", _oddly], ids=["plain", "raises"])
def test_replacement_keeps_text_and_notes(text: Callable[[BaseException], str]) -> None:
    """The replacement has the text, notes and cause of the user's error; a `__str__` that raises loses the text."""
    error = type("Odd", (StopIteration,), {"__str__": text})()
    error.add_note("a note")
    instead = not_the_end(error, "a test")
    assert str(instead) in ("a test raised Odd: mine", "a test raised Odd")
    assert instead.__notes__ == ["a note"]
    assert instead.__cause__ is error
