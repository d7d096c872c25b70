"""A stream of the user's own raises, once: what `next()` gives then, and where the state that was taken resumes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import Recovery
from asyncloader.transports import ReadFailed
from tests.helpers.seeded_runs import Stepwise

COUNT = 16
OPENING = -1
REPLAYS = Recovery(allow_replay=True)


class Numbers(IterableDataset[int]):
    """Each worker's share of the numbers. Raises at one of them, or when it is opened, once in all processes."""

    def __init__(self, folder: Path, at: int | None = None, error: type[Exception] = ReadFailed) -> None:
        self.file, self.at, self.error = folder / f"{error.__name__}{at}", at, error

    def read(self, number: int) -> int:
        if number == self.at and not self.file.exists():
            self.file.touch()
            raise self.error("away")
        return number

    def share(self) -> list[int]:
        info = get_worker_info()
        return list(range(COUNT)) if info is None else list(range(info.id, COUNT, info.num_workers))

    def __iter__(self) -> Iterator[int]:
        for number in self.share():
            yield self.read(number)


class Awaited(Numbers):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in self.share():
            await asyncio.sleep(0)
            yield self.read(number)


class Opened(Numbers):
    """Opens its store in `__iter__`, which in the second of several workers fails."""

    def __iter__(self) -> Iterator[int]:
        share = self.share()
        self.read(OPENING if share[0] or len(share) == COUNT else 0)
        return iter(share)


class Awaits(Awaited):
    """The same, of a stream that is awaited."""

    def __aiter__(self) -> AsyncIterator[int]:
        share = self.share()
        self.read(OPENING if share[0] or len(share) == COUNT else 0)
        return super().__aiter__()


class Mapped(Numbers):
    """An iterator that goes on after an error, at the next number."""

    def __iter__(self) -> Iterator[int]:
        return map(self.read, self.share())


def run_of(dataset: Numbers, loop: str = "sync", workers: int = 0, seed: int | None = None) -> Stepwise:
    return Stepwise(loop, dataset, batch_size=2, num_workers=workers, seed=seed, recovery=REPLAYS)


def lists(batches: list[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def rest_of(run: Stepwise) -> list[Any]:
    """The iterator's rest; if the epoch could not begin, or has no iterator, another loop over the loader."""
    if run.iterator is not None:
        with suppress(ReadFailed):
            return run.rest()
    return run.epoch()


BEGINNINGS = [(Numbers, 0), (Numbers, 1), (Awaited, 1), (Opened, OPENING), (Awaits, OPENING)]


@pytest.mark.parametrize("way", [("sync", None), ("asyncio", 5)])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("case", BEGINNINGS)
def test_a_stream_that_could_not_begin_begins_again(
    case: tuple[type[Numbers], int], workers: int, way: tuple[str, int | None], tmp_path: Path
) -> None:
    """The store fails before the first batch of a worker: the next call gives all batches, in their order."""
    (kind, at), (loop, seed) = case, way
    with run_of(kind(tmp_path), loop, workers, seed) as run:
        expected = lists(run.epoch())
    state: dict[str, Any] = {}
    before = 0
    with run_of(kind(tmp_path, at), loop, workers, seed) as run:
        got: list[Any] = []
        try:
            run.begin()
            while not got or len(got) < len(expected):
                got.append(run.step())
        except ReadFailed:
            state = run.loader.state_dict()
            before = len(got)
            if before and workers:  # the epoch had begun: it goes on from the state
                run.loader.load_state_dict(state)
            got += rest_of(run)
        assert lists(got) == expected
    with run_of(kind(tmp_path), loop, workers, seed) as run:
        run.loader.load_state_dict(state)
        assert lists(got[:before] + run.epoch()) == expected


@pytest.mark.parametrize("loop", ["sync", "asyncio"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Awaited, Mapped])
def test_a_state_that_is_taken_after_an_error(kind: type[Numbers], workers: int, loop: str, tmp_path: Path) -> None:
    """It has the batches that were delivered, and not that of the error: a run that resumes asks for it again."""
    with run_of(Numbers(tmp_path), workers=workers) as run:
        expected = lists(run.epoch())
    for at in (0, 5):
        with run_of(kind(tmp_path, at, ValueError), loop, workers, 5) as run:
            run.begin()
            got: list[Any] = []
            with suppress(ValueError):
                while len(got) < COUNT:
                    got.append(run.step())
            state = run.loader.state_dict()
        assert (state["step"], state["finished"]) == (len(got), False)
        with run_of(kind(tmp_path), loop, workers, 5) as run:
            run.loader.load_state_dict(state)
            assert lists(got + run.epoch()) == expected


@pytest.mark.parametrize("loop", ["sync", "asyncio"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Numbers, Awaited, Mapped])
def test_a_store_that_fails_while_a_stream_is_read_again(
    kind: type[Numbers], workers: int, loop: str, tmp_path: Path
) -> None:
    """A run resumes by reading and dropping what was delivered. What fails meanwhile is read, and dropped, again."""
    with run_of(kind(tmp_path), loop, workers) as run:
        run.begin()
        got = run.take(3)
        state = run.loader.state_dict()
    with run_of(kind(tmp_path, 3), loop, workers) as run:
        run.loader.load_state_dict(state)
        with pytest.raises(ReadFailed, match="away"):
            run.epoch()
        got += rest_of(run)
    assert lists(got) == [[number, number + 1] for number in range(0, COUNT, 2)]
