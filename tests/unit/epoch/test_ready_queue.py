"""Wake-ups of tasks that share an iterator."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncloader.base.events import Finish
from asyncloader.epoch.ready_queue import ReadyQueue


async def waiting(queue: ReadyQueue, count: int) -> list[asyncio.Task[None]]:
    """Tasks that are waiting on the queue."""
    tasks = [asyncio.ensure_future(queue.wait()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_a_waiter_that_is_cancelled_just_after_it_was_woken_loses_nothing() -> None:
    """All that wait are woken, and look whether there is an item."""
    queue = ReadyQueue()
    first, second, third = await waiting(queue, 3)
    queue.put(Finish())
    first.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert [task.done() for task in (first, second, third)] == [True] * 3
    assert (first.cancelled(), second.cancelled(), third.cancelled()) == (True, False, False)
    assert len(queue.items) == 1


async def test_a_waiter_that_was_not_woken_leaves_nothing() -> None:
    """A task that waits with a deadline, over and over, leaves no waiter."""
    queue = ReadyQueue()
    first, second = await waiting(queue, 2)
    first.cancel()
    await asyncio.wait([first])
    assert len(queue._waiters) == 1
    queue.wake()
    await second
    assert not queue._waiters


async def test_an_item_that_is_given_back_wakes_a_waiter() -> None:
    """An item that is given back is the next, before items that were put later."""
    queue = ReadyQueue()
    items: list[Any] = [Finish(), Finish()]
    for item in items:
        queue.put(item)
    taken = queue.items.popleft()
    (waiter,) = await waiting(queue, 1)
    queue.give_back(taken)
    await waiter
    assert [id(item) for item in queue.items] == [id(item) for item in items]
