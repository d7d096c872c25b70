from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from asyncloader.transports.base import gather_all


async def test_a_cancelled_caller_takes_the_calls_with_it() -> None:
    """No call outlives its caller."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    task = asyncio.create_task(gather_all([waits()]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_failure_keeps_no_results() -> None:
    """The error and the results of the other calls are freed with the error's last use, not by the collector."""

    class Result:
        pass

    class Failure(Exception):
        pass

    kept: list[weakref.ref[Result | Failure]] = []

    async def succeeds() -> Result:
        result = Result()
        kept.append(weakref.ref(result))
        return result

    async def fails() -> Result:
        error = Failure()
        kept.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.disable()
    try:
        with pytest.raises(Failure):
            await gather_all([succeeds(), fails()])
        await asyncio.sleep(0)  # the loop lets go of the tasks' last calls
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()
