"""User code that raises what means something else to an event loop: a cancellation, or the end of an iteration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.integration.running import BOTH, KINDS, outcomes

CANCELLED = "code cancelled itself, or let what it awaited be cancelled"
ENDED = "code raised StopAsyncIteration"


async def cancelled() -> None:
    """Await what somebody has cancelled."""
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone


class Stream:
    """Counts to 4; instead of 2 it lets itself be cancelled."""

    def __init__(self) -> None:
        self.number = -1

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> int:
        self.number += 1
        if self.number == 2:
            await cancelled()
        if self.number == 4:
            raise StopAsyncIteration
        return self.number


class Context(Dataset[Any]):
    """Lets itself be cancelled before its first sample."""

    def __len__(self) -> int:
        return 2

    async def __aenter__(self) -> None:
        await cancelled()

    async def __aexit__(self, *_: object) -> None: ...

    async def __getitem__(self, index: int) -> int:
        return index


class Sampler:
    """Lets itself be cancelled after two indices."""

    async def __aiter__(self) -> AsyncIterator[int]:
        yield 0
        yield 1
        await cancelled()


class Ending(Dataset[Any]):
    """Sample 1 raises what the end of an asynchronous iterator within it raises."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise StopAsyncIteration
        return index


class AsyncEnding(Ending):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


def shown(found: list[Any]) -> list[Any]:
    """Batches as numbers, errors as they are."""
    return [each if isinstance(each, tuple) else int(each) for each in found]


@pytest.mark.parametrize("kind", KINDS)
def test_stream_that_lets_itself_be_cancelled(kind: str) -> None:
    """The cancellation is an error in the batch's place; nobody waits for ever."""
    first, second, (error, text), last = shown(outcomes(kind, Stream(), num_workers=1))
    assert (first, second, last) == (0, 1, 3)
    assert error is RuntimeError
    assert CANCELLED in text


@pytest.mark.parametrize("kind", KINDS)
def test_context_that_lets_itself_be_cancelled(kind: str) -> None:
    """Start-up has failed, and each batch says so."""
    for error, text in outcomes(kind, Context(), num_workers=1):
        assert error is RuntimeError
        assert CANCELLED in text


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_that_lets_itself_be_cancelled(kind: str) -> None:
    """The batches that were asked for come, and then the error."""
    first, second, (error, text) = shown(outcomes(kind, range(9), sampler=Sampler(), num_workers=1))
    assert (first, second) == (0, 1)
    assert error is RuntimeError
    assert CANCELLED in text


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "fetch_threads": 2}], ids=str)
def test_stop_async_iteration_of_a_map_dataset(options: dict[str, Any]) -> None:
    """It fails its batch, and does not pass for the end of the epoch, where ``async for`` would take it for that."""
    first, (error, text), last = shown(outcomes("asyncio", Ending(), **options))
    assert (first, last) == (0, 2)
    assert error is RuntimeError
    assert ENDED in text


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_stop_async_iteration_of_an_async_map_dataset(kind: str, workers: int) -> None:
    """The same for awaited samples, for both loaders; the note names the sample."""
    first, (error, text), last = shown(outcomes(kind, AsyncEnding(), num_workers=workers))
    assert (first, last) == (0, 2)
    assert error is RuntimeError
    assert ENDED in text
    assert "while fetching sample index 1 (item 0 of the batch)" in text
