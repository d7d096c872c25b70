"""Samples in flight: bounded over all batches, in order within each, and none left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.workers.fetch.map_async import Flights

variable: ContextVar[int] = ContextVar("variable", default=-1)


class Airport:
    """Samples that end when they are told to, and note who is up."""

    def __init__(self) -> None:
        self.up: dict[Any, asyncio.Future[Any]] = {}
        self.most = 0
        self.started: list[Any] = []
        self.cancelled: list[Any] = []

    async def fly(self, name: Any) -> Any:
        self.started.append(name)
        future = self.up[name] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.up))
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            del self.up[name]

    async def turn(self) -> None:
        """Let everybody run until nobody can."""
        for _ in range(6):
            await asyncio.sleep(0)


def batch(airport: Airport, flights: Flights, name: str, count: int) -> asyncio.Task[list[Any]]:
    return asyncio.get_running_loop().create_task(flights.fly(lambda item, _: airport.fly((name, item)), count))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    room=st.integers(1, 7),
    random=st.randoms(use_true_random=False),
)
def test_results_are_in_order_within_the_bound(sizes: list[int], room: int, random: Random) -> None:
    """Whichever sample ends first, a batch has its results in order; no more than `room` are up; older ones start
    first, and no place stays empty while a sample waits.
    """

    async def run() -> None:
        airport, flights = Airport(), Flights(room)
        tasks = [batch(airport, flights, str(number), size) for number, size in enumerate(sizes)]
        await airport.turn()
        left = sum(sizes)
        while left:
            assert len(airport.up) == min(room, left)
            name = random.choice(sorted(airport.up))
            airport.up[name].set_result(name)
            left -= 1
            await airport.turn()
        everything = [(str(number), item) for number, size in enumerate(sizes) for item in range(size)]
        assert airport.started == everything
        assert airport.most <= room
        for number, task in enumerate(tasks):
            assert await task == [(str(number), item) for item in range(sizes[number])]

    asyncio.run(run())


async def test_a_slow_sample_does_not_stop_the_next_batch() -> None:
    """With the first sample of the first batch still up, all others of both batches come and go."""
    airport, flights = Airport(), Flights(2)
    first, second = batch(airport, flights, "a", 3), batch(airport, flights, "b", 3)
    await airport.turn()
    for name in [("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]:
        airport.up[name].set_result(name)
        await airport.turn()
    assert second.done()
    assert not first.done()
    airport.up["a", 0].set_result(("a", 0))
    assert await first == [("a", 0), ("a", 1), ("a", 2)]


async def test_the_first_error_is_raised_alone() -> None:
    """The others of its batch are cancelled, those that did not start never do, other batches go on."""
    airport, flights = Airport(), Flights(3)
    told: list[tuple[int, BaseException]] = []
    failing = asyncio.ensure_future(
        flights.fly(lambda item, _: airport.fly(("a", item)), 5, lambda item, error: told.append((item, error)))
    )
    other = batch(airport, flights, "b", 1)
    await airport.turn()
    error = OSError("sample 1")
    airport.up["a", 1].set_exception(error)
    with pytest.raises(OSError, match="sample 1") as raised:
        await failing
    assert raised.value is error
    assert told == [(1, error)]
    assert airport.cancelled == [("a", 0), ("a", 2)]
    await airport.turn()
    assert ("a", 3) not in airport.started
    airport.up["b", 0].set_result(7)
    assert await other == [7]


async def test_an_error_before_the_coroutine_is_the_samples() -> None:
    """What the dataset raises when it is asked for a coroutine fails that sample's batch."""

    def start(item: int, context: Context) -> Coroutine[Any, Any, Any]:
        if item == 1:
            raise KeyError(item)
        return asyncio.sleep(0, item)

    failed: list[int] = []
    with pytest.raises(KeyError):
        await Flights(4).fly(start, 3, lambda item, _: failed.append(item))
    assert failed == [1]


async def test_cancelling_waits_for_what_is_up() -> None:
    """A cancelled batch ends when its samples have: their `finally` blocks have run, and the places are free again."""
    airport, flights = Airport(), Flights(2)
    task = batch(airport, flights, "a", 4)
    await airport.turn()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert airport.cancelled == [("a", 0), ("a", 1)]
    assert not airport.up
    after = batch(airport, flights, "b", 2)
    await airport.turn()
    assert list(airport.up) == [("b", 0), ("b", 1)]
    after.cancel()
    with pytest.raises(asyncio.CancelledError):
        await after


async def test_a_sample_that_is_cancelled_by_itself_is_an_error() -> None:
    """Nobody asked for it, so the batch fails rather than never come."""

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await Flights(2).fly(lambda item, context: cancels(), 1)


async def test_each_sample_has_a_context_of_its_own() -> None:
    """What is set in one is seen by no other, whichever sample's end made room for it; `start` may set it, too."""

    async def sets(item: int) -> tuple[int, int]:
        before = variable.get()
        variable.set(item)
        await asyncio.sleep(0)
        return before, variable.get()

    def start(item: int, context: Context) -> Coroutine[Any, Any, Any]:
        context.run(variable.set, 100 + item)
        return sets(item)

    variable.set(5)
    assert await Flights(1).fly(lambda item, _: sets(item), 3) == [(5, 0), (5, 1), (5, 2)]
    assert await Flights(1).fly(start, 2) == [(100, 0), (101, 1)]
    assert variable.get() == 5
