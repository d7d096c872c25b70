"""Work that goes on when a task that waits for it is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, Dataset
from asyncloader.base.shielding import shielded


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    """The errors that the event loop would log."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


class Wrong(Exception):
    """The error of the work."""


@pytest.mark.loops
@pytest.mark.parametrize("fails", [False, True])
async def test_each_waiter_gets_the_outcome(fails: bool, complaints: list[dict[str, Any]]) -> None:
    """A waiter that is cancelled changes nothing for the others; nothing is logged."""
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait() -> int:
        return await shielded(work)

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert not work.done()
    if fails:
        work.set_exception(Wrong())
    else:
        work.set_result(1)
    first, cancelled, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    for outcome in (first, last):
        assert isinstance(outcome, Wrong) if fails else outcome == 1
    late = (await asyncio.gather(wait(), return_exceptions=True))[0]
    assert isinstance(late, Wrong) if fails else late == 1
    assert complaints == []


async def test_work_that_is_cancelled_cancels_who_waits() -> None:
    """The waiter is cancelled as if it awaited the work directly."""
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = shielded(work)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


class Breaks(Dataset[int]):
    """Its one sample raises as soon as `may` is set."""

    def __init__(self) -> None:
        self.begun, self.may = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return 1

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.begun.set()
        await self.may.wait()
        raise Wrong


@pytest.mark.loops
async def test_a_batchs_error_comes_with_the_next_call_alone(complaints: list[dict[str, Any]]) -> None:
    """The call that waited for the batch was cancelled: the next call raises, and the loop logs nothing."""
    dataset = Breaks()
    async with AsyncDataLoader[Any](dataset) as loader:
        batches = aiter(loader)
        waiting = asyncio.ensure_future(anext(batches))
        await dataset.begun.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        dataset.may.set()
        with pytest.raises(Wrong):
            await anext(batches)
    assert complaints == []
