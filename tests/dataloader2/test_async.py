"""DataLoader2 read by ``async for``: items, limits, cancelled waits, awaited parts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from functools import partial
from typing import Any

import pytest

from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
)
from tests.dataloader2.parts import double, fails_at_5, hangs_at_3, numbers, slow_double, ticking
from tests.helpers.running import PATIENCE_S


@pytest.mark.parametrize("workers", [0, 2])
async def test_async_for(workers: int) -> None:
    """``async for`` gives the items of ``for``, also where several have arrived; it raises errors and ends like
    ``for``; positions count the items given; `aclose` ends the loader.
    """
    service = MultiProcessingReadingService(workers) if workers else InProcessReadingService(2)
    async with DataLoader2[int](numbers(50).sharding_filter().map(double), reading_service=service) as loader:
        for _ in range(2):
            found = []
            async for item in loader:
                found.append(item)
                assert loader.state_dict()["position"] == len(found)
            assert found == [2 * x for x in range(50)]
    with pytest.raises(RuntimeError, match="already been shut down"):
        aiter(loader)
    failing = DataLoader2[int](numbers(9).sharding_filter().map(fails_at_5), reading_service=service)
    items = aiter(failing)
    assert [await anext(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        await anext(items)
    await failing.aclose()


async def test_limits_and_calls_of_async_for() -> None:
    """A limit pauses ``async for``, too; a second call while another waits is refused."""
    async with DataLoader2[int](numbers(6), reading_service=InProcessReadingService()) as loader:
        items = aiter(loader)
        items.limit(2)
        assert [item async for item in items] == [0, 1]
        items.resume()
        first, second = await asyncio.gather(anext(items), anext(items), return_exceptions=True)
        assert (first, type(second)) == (2, RuntimeError)
        assert [item async for item in items] == [3]
        items.limit(None)
        items.resume()
        assert [item async for item in items] == [4, 5]


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancelled_wait_loses_nothing(late: bool) -> None:
    """The next call gets the item, even if the item had arrived when the wait was cancelled."""
    async with DataLoader2[int](numbers(3)) as loader:
        items: Any = aiter(loader)
        task = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        if late:
            items._reading.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not loader.state_dict()["position"]
        assert [item async for item in items] == [0, 1, 2]


async def test_a_cancelled_wait_for_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The loader ends although a thread is reading; the error of that read is not logged."""
    async with DataLoader2[Any](
        numbers(2, 3).map(hangs_at_3), reading_service=MultiProcessingReadingService(1)
    ) as loader:
        task = asyncio.ensure_future(anext(aiter(loader)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gc.collect()
    assert not caplog.records


BEGAN, GO = threading.Event(), threading.Event()


def waits_for_go(number: int) -> int:
    BEGAN.set()
    GO.wait(PATIENCE_S)
    return number


def fails_after_go(number: int) -> int:
    raise ValueError(waits_for_go(number))


@pytest.mark.parametrize("loop", ["runs", "stands still", "is closed", "is closed with the answer"])
def test_a_read_that_fails_when_nobody_waits(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """The thread ends when the iterator is dropped, without the garbage collector, and the error is not logged."""
    BEGAN.clear()
    GO.clear()
    loader = DataLoader2[int](numbers(2, 3).map(fails_after_go), reading_service=InProcessReadingService())

    async def give_up() -> None:
        task = asyncio.ensure_future(anext(aiter(loader)))
        await asyncio.to_thread(BEGAN.wait, PATIENCE_S)
        task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()  # Python 3.14 keeps a cancelled task's frames until then
        if loop == "runs":
            GO.set()
            await join()
        await asyncio.get_running_loop().shutdown_default_executor()

    async def join() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("asyncloader-dataloader2"):
                await asyncio.to_thread(thread.join, PATIENCE_S)
                assert not thread.is_alive()

    gc.disable()
    own = asyncio.new_event_loop()
    try:
        own.run_until_complete(give_up())
        if loop in ("stands still", "is closed with the answer"):
            GO.set()
            asyncio.run(join())
        if loop == "is closed with the answer":  # one turn, in which the read's future gets its outcome
            own.call_soon(own.stop)
            own.run_forever()
        own.close()
        GO.set()
        asyncio.run(join())
    finally:
        gc.enable()
        loader.shutdown()
    assert not caplog.records


CALLS = itertools.count()


def first_call_waits(number: int) -> int:
    return waits_for_go(number) if not next(CALLS) else number


def first_call_fails(number: int) -> int:
    return fails_after_go(number) if not next(CALLS) else number


@pytest.mark.parametrize("function", [first_call_waits, first_call_fails])
async def test_an_epoch_beside_a_cancelled_read(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for that read, whose item or error goes to nobody, and gives each item once."""
    monkeypatch.setitem(globals(), "CALLS", itertools.count())
    BEGAN.clear()
    GO.clear()
    graph = numbers(6).map(function).shuffle()
    async with DataLoader2[int](graph, reading_service=InProcessReadingService()) as loader:
        task = asyncio.ensure_future(anext(aiter(loader)))
        await asyncio.to_thread(BEGAN.wait, PATIENCE_S)
        task.cancel()
        await asyncio.wait([task])
        items = aiter(loader)
        first = asyncio.ensure_future(anext(items))
        while loader.valid_iterator_id == 0:  # noqa: ASYNC110 - until the second begins, of which no event tells
            await asyncio.sleep(0)
        GO.set()
        assert sorted([await first] + [item async for item in items]) == [0, 1, 2, 3, 4, 5]


def raises(error: type[BaseException], _: int) -> None:
    raise error("not yet")


@pytest.mark.parametrize("error", [StopAsyncIteration, asyncio.CancelledError])
async def test_an_error_that_is_not_the_end(error: type[BaseException]) -> None:
    """What the graph's code raises neither ends ``async for``, nor looks like a cancelled task."""
    with pytest.raises(RuntimeError, match=f"raised {error.__name__}: not yet"):
        _ = [item async for item in DataLoader2[int](numbers(3).map(partial(raises, error)))]


@pytest.mark.parametrize("closed", [False, True])
def test_a_cancelled_wait_in_another_event_loop(closed: bool) -> None:
    """The next call gets the item in its own loop."""
    BEGAN.clear()
    GO.clear()
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    with DataLoader2[int](numbers(4).map(waits_for_go)) as loader:
        items = aiter(loader)

        async def give_up() -> None:
            task = asyncio.ensure_future(anext(items))
            await asyncio.to_thread(BEGAN.wait, PATIENCE_S)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.get_running_loop().shutdown_default_executor()

        async def read() -> list[int]:
            return [item async for item in items]

        first.run_until_complete(give_up())
        if closed:
            first.close()
        GO.set()
        assert second.run_until_complete(asyncio.wait_for(read(), PATIENCE_S)) == [0, 1, 2, 3]
    first.close()
    second.close()


async def test_an_error_keeps_no_loader() -> None:
    """The loader is freed when it is dropped, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        async with DataLoader2[int](numbers(9).map(fails_at_5)) as loader:
            with pytest.raises(ValueError, match="five"):
                _ = [item async for item in loader]
        freed = weakref.ref(loader)
        del loader
        assert freed() is None
    finally:
        gc.enable()


async def test_parts_that_are_awaited() -> None:
    """``for`` and ``async for`` read `amap`, and a part with ``__aiter__`` alone, at a graph's end or before it."""
    for graph, expected in (
        (ticking(4), [0, 1, 2, 3]),
        (ticking(4).map(double), [0, 2, 4, 6]),
        (ticking(40).amap(slow_double, concurrency=7).map(double), [4 * x for x in range(40)]),
    ):
        for service in (None, InProcessReadingService()):
            loader = DataLoader2[int](graph, reading_service=service)
            assert list(loader) == expected
            assert [x async for x in loader] == expected
            loader.shutdown()
