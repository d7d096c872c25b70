"""Errors of the user's code: raised instead of the failing batch, with torch's type and text; iteration continues."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Numbers
from tests.helpers.running import BOTH, KINDS, collect, outcomes, run_async
from tests.helpers.side_by_side import shut_down

HEAD = "Caught {} in DataLoader worker process {}.\nOriginal Traceback (most recent call last):\n"


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class OwnError(ValueError):
    """A user's own error that takes one string."""


class Failing(Dataset[Any]):
    """Some indices raise."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise KeyError("a key\nof two lines")
        if index == 5:
            raise OwnError("five")
        if index == 6:
            raise TwoArguments(1, 2)
        return torch.tensor(index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_errors_of_getitem(kind: str, workers: int) -> None:
    """Each failing batch raises in its place, with torch's type and text; all other batches are delivered."""
    options: dict[str, Any] = {"num_workers": workers, "batch_size": 2}
    expected = outcomes("torch", Failing(), **options)
    got = outcomes(kind, Failing(), **options)
    assert len(got) == len(expected) == 6
    for a, b in zip(got, expected, strict=True):
        if not isinstance(b, tuple):
            assert_same(a, b)
            continue
        assert a[0] is b[0]
        text, note = a[1].rstrip("\n").rsplit("\n", 1)
        place = r"while fetching sample index \d+ \(item [01] of the batch\)"
        assert re.fullmatch(rf"{place}, in worker \d \(pid \d+\)" if workers else place, note)
        if not workers:
            assert text == b[1]
            continue
        assert text.splitlines()[0] == b[1].splitlines()[0]
        assert text.splitlines()[-1] == b[1].splitlines()[-1]
        assert "in __getitem__" in a[1]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_one_worker_leave_the_others(kind: str) -> None:
    """Batches before, between and after the errors are delivered in order."""
    got = outcomes(kind, Failing(), num_workers=2, batch_size=2, prefetch_factor=3)
    assert [not isinstance(outcome, tuple) for outcome in got] == [True, False, False, False, True, True]
    assert got[1][0] is KeyError
    assert got[1][1].startswith(HEAD.format("KeyError", 1))
    assert got[2][0] is OwnError
    assert got[3][0] is RuntimeError  # its own type cannot be constructed from one string


def broken_collate(samples: list[Any]) -> Any:
    if int(samples[0][0]) == 200:
        raise ZeroDivisionError("in collate")
    return samples


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("persistent", [False, True])
def test_errors_of_collate(kind: str, persistent: bool) -> None:
    """An error of collate_fn is raised in its place, too; persistent workers continue."""
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 2, "collate_fn": broken_collate}
    got = outcomes(kind, Numbers(8), persistent_workers=persistent, **options)
    expected = outcomes("torch", Numbers(8), **options)
    assert_same([got[0], *got[2:]], [expected[0], *expected[2:]])
    assert got[1][0] is expected[1][0] is ZeroDivisionError
    assert got[1][1].startswith(HEAD.format("ZeroDivisionError", 1))


def unpicklable_batch(samples: list[Any]) -> Any:
    return lambda: samples


@pytest.mark.parametrize("kind", BOTH)
def test_batch_that_cannot_be_pickled(kind: str) -> None:
    """The error belongs to that batch (torch loses it in a thread and hangs)."""
    for kind_of_error, text in outcomes(kind, Numbers(4), num_workers=1, batch_size=2, collate_fn=unpicklable_batch):
        assert issubclass(kind_of_error, Exception)
        assert "pickle" in text
        assert "unpicklable_batch" in text


class FailingStream(IterableDataset[Any]):
    def __init__(self, where: str) -> None:
        self.where = where

    def __iter__(self) -> Iterator[Any]:
        if self.where == "iter":
            raise LookupError("in __iter__")
        return self._stream()

    def _stream(self) -> Iterator[Any]:
        yield 0
        yield 1
        if self.where == "next":
            raise LookupError("in __next__")
        yield 2


@pytest.mark.parametrize("kind", BOTH)
def test_errors_of_a_stream(kind: str) -> None:
    """A generator that fails has ended after its error."""
    got = outcomes(kind, FailingStream("next"), num_workers=1, batch_size=1)
    expected = outcomes("torch", FailingStream("next"), num_workers=1, batch_size=1)
    assert_same(got[:2], expected[:2])
    assert got[2][0] is expected[2][0] is LookupError
    assert len(got) == len(expected) == 3


def test_error_of_iter_comes_first() -> None:
    """The failure of `__iter__` is raised instead of the worker's first batch."""
    for make in (torch.utils.data.DataLoader, DataLoader):
        batches = iter(make(FailingStream("iter"), num_workers=1))
        with pytest.raises(LookupError) as caught:
            next(batches)
        shut_down(batches)
        assert str(caught.value).startswith(HEAD.format("LookupError", 0))

    async def run() -> None:
        async with AsyncDataLoader[Any](FailingStream("iter"), num_workers=1) as loader:
            with pytest.raises(LookupError, match="Caught LookupError in DataLoader worker process 0"):
                await anext(aiter(loader))

    run_async(run())


class Stopping(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise StopIteration
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_of_a_map_dataset(workers: int) -> None:
    """StopIteration ends a `for` loop early, as in torch; no batch is delivered twice, and nothing hangs."""
    if not workers:
        assert [int(batch) for batch in torch.utils.data.DataLoader(Stopping())] == [0]
    assert [int(batch) for batch in DataLoader[Any](Stopping(), num_workers=workers)] == [0]
    first, *rest = outcomes("asyncio", Stopping(), num_workers=workers)
    assert int(first) == 0
    if workers:  # a coroutine cannot raise StopIteration
        assert rest[0][0] is RuntimeError
        assert [int(batch) for batch in rest[1:]] == [2, 3]


class Sometimes(AsyncNumbers):
    async def __getitem__(self, index: int) -> Any:
        if index in (2, 3):
            raise OwnError(f"number {index}")
        return await super().__getitem__(index)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_an_async_dataset(kind: str) -> None:
    """A failing `async def __getitem__` fails its batch alone, with the text of other errors."""
    got = outcomes(kind, Sometimes(8), num_workers=2, batch_size=2)
    assert [isinstance(outcome, tuple) for outcome in got] == [False, True, False, False]
    assert got[1][0] is OwnError
    assert got[1][1].startswith(HEAD.format("OwnError", 1))
    assert "number" in got[1][1]


def failing_sampler() -> Iterator[list[int]]:
    yield [0]
    yield [1]
    raise PermissionError("in the sampler")


class FailingSampler:
    def __iter__(self) -> Iterator[list[int]]:
        return failing_sampler()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_a_sampler_sync(workers: int) -> None:
    """The sampler runs in the caller's thread: its error is raised unchanged, behind the batches it gave."""
    given = []
    with pytest.raises(PermissionError, match=r"^in the sampler$"):  # noqa: PT012
        for batch in DataLoader[Any](Numbers(3), batch_sampler=FailingSampler(), num_workers=workers):
            given.append(batch)  # noqa: PERF402 - what came before the error counts
    assert len(given) == 2


@pytest.mark.parametrize("workers", [0, 1])
async def test_errors_of_a_sampler_async(workers: int) -> None:
    """The asynchronous loader raises a sampler's error unchanged, at the same place."""
    given = []
    async with AsyncDataLoader[Any](Numbers(3), batch_sampler=FailingSampler(), num_workers=workers) as loader:
        with pytest.raises(PermissionError, match=r"^in the sampler$"):  # noqa: PT012
            async for batch in loader:
                given.append(batch)  # noqa: PERF401 - what came before the error counts
    assert len(given) == 2


class LateSampler:
    """Fails beyond the batches that are read ahead at the start."""

    def __iter__(self) -> Iterator[list[int]]:
        for i in range(4):
            yield [i]
        raise PermissionError("late")


@pytest.mark.parametrize("kind", KINDS)
def test_late_error_of_a_sampler(kind: str) -> None:
    """An error beyond the first read-ahead costs no batch. In torch it takes the place of one."""
    late = (PermissionError, "late")
    assert outcomes("torch", Numbers(8), batch_sampler=LateSampler(), num_workers=1).index(late) == 2
    *got, error = outcomes(kind, Numbers(8), batch_sampler=LateSampler(), num_workers=1)
    assert error == late
    assert_same(got, outcomes("torch", Numbers(8), batch_sampler=[[0], [1], [2], [3]]))


def test_error_while_iterating_leaves_no_worker() -> None:
    """An error ends the caller's loop; when it is deleted, the workers end, too (the leak check would find them)."""
    with pytest.raises(KeyError):
        for _ in DataLoader[Any](Failing(), num_workers=2):
            pass

    async def run() -> None:
        with pytest.raises(KeyError):
            async for _ in AsyncDataLoader[Any](Failing(), num_workers=2):
                pass

    run_async(run())


class OnTheGpu(Dataset[Any]):
    """Uses CUDA like a process that was forked after CUDA had been used."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), index, device="cuda")


@pytest.mark.parametrize("kind", BOTH)
def test_a_forked_worker_that_touches_cuda(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error is raised, which names the remedy, with the worker's number and traceback."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # the flag that torch sets after a fork
    with pytest.raises(RuntimeError, match=r"(?s)worker process 0.*Cannot re-initialize CUDA in forked .*'spawn'"):
        collect(kind, OnTheGpu(), num_workers=1, multiprocessing_context="fork")


class Exiting(Dataset[Any]):
    exits = True

    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> int:
        if index == 3 and self.exits:
            sys.exit("a broken file")
        return index


def test_a_sample_that_exits_here() -> None:
    """Without workers SystemExit is raised to the caller, though the sample ran in the thread of the loader's loop. It
    may come anywhere, from a signal's handler, and costs no batch: the next call makes it again.
    """
    dataset = Exiting()
    batches = iter(DataLoader[Any](dataset, batch_size=2))
    assert next(batches).tolist() == [0, 1]
    for _ in range(2):
        with pytest.raises(SystemExit, match="a broken file"):
            next(batches)
    dataset.exits = False
    assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5], [6, 7]]
