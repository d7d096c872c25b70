"""User code that cancels itself, or awaits a cancelled task, has failed: its batch is replaced by an error."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers.running import BOTH, outcomes
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.loops

WORKERS = [0, 1]


async def awaits_cancelled() -> None:
    """Await a cancelled task, like a client whose connection another task has closed."""
    task = asyncio.ensure_future(asyncio.sleep(1))
    task.cancel()
    await task


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> Any:
        return index


class Stream:
    """A stream of four batches of two samples; the second batch cannot be read."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(8):
            if number == 3:
                await awaits_cancelled()
            yield number


class GoesOn(Stream):
    """An iterator that can be read further after an error."""

    def __aiter__(self) -> AsyncIterator[int]:
        self.number = -1
        return self

    async def __anext__(self) -> int:
        self.number += 1
        if self.number == 8:
            raise StopAsyncIteration
        if self.number == 3:
            await awaits_cancelled()
        return self.number


class Opens(Rows):
    """A dataset whose context cannot be entered."""

    async def __aenter__(self) -> Self:
        await awaits_cancelled()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Pooled(Dataset[int]):
    """A blocking dataset that uses an executor of its own, which cancelled one call."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        if index == 3:
            future.cancel()
        else:
            future.set_result(index)
        return future.result()


def cancels(samples: list[int]) -> torch.Tensor:
    if 3 in samples:
        raise asyncio.CancelledError
    return torch.tensor(samples)


class Sampler:
    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(8):
            if number == 3:
                await awaits_cancelled()
            yield number


MISTAKES: dict[str, tuple[Callable[[], Any], dict[str, Any], list[Any]]] = {
    "a stream": (Stream, {}, [[0, 1], RuntimeError]),
    "an iterator that goes on": (GoesOn, {}, [[0, 1], RuntimeError, [4, 5], [6, 7]]),
    "a sampler": (Rows, {"sampler": Sampler()}, [[0, 1], RuntimeError]),
    "a collate function": (Rows, {"collate_fn": cancels}, [[0, 1], RuntimeError, [4, 5], [6, 7]]),
}


def shown(got: list[Any]) -> list[Any]:
    return [each.tolist() if isinstance(each, torch.Tensor) else each[0] for each in got]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_in_its_place(kind: str, workers: int, name: str) -> None:
    """The error is raised once, instead of the batch; the other batches are delivered, and the epoch ends."""
    make, options, expected = MISTAKES[name]
    got = outcomes(kind, make(), **{"batch_size": 2, "num_workers": workers, **options})
    assert shown(got) == expected


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_context(kind: str, workers: int) -> None:
    """Each call of `next` enters it once more; of workers another loop."""
    with Stepwise(kind, Opens(), batch_size=2, num_workers=workers) as run:
        for _ in range(2):
            if workers or run.iterator is None:
                run.begin()
            with pytest.raises(RuntimeError, match="cancelled itself"):
                run.step()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_blocking_dataset(workers: int) -> None:
    """The error is not mistaken for a cancellation of the task that iterates."""
    got = outcomes("asyncio", Pooled(), batch_size=2, num_workers=workers)
    assert [each.tolist() if isinstance(each, torch.Tensor) else None for each in got] == [[0, 1], None, [4, 5], [6, 7]]
