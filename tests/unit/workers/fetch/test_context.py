"""A dataset's asynchronous context: entered once, left in bounded time, in one task."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any, Self

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from asyncloader.workers.fetch.context import DatasetContext, context_managers


class Opens(Dataset[Any]):
    def __init__(self, *, broken: int = 0) -> None:
        self.broken = broken  # how often entering raises
        self.entered: list[Any] = []
        self.left: list[Any] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        if self.broken:
            self.broken -= 1
            raise ConnectionError("no store")
        self.entered.append(asyncio.current_task())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)
        self.left.append(asyncio.current_task())


def test_views_forward_to_what_they_view() -> None:
    """Datasets in Subset and ConcatDataset, nested too, are found once each."""
    one, other = Opens(), Opens()
    nested: Any = ConcatDataset([Subset(one, [0]), Subset(Subset(other, [1]), [0]), one])
    assert context_managers(nested) == [one, other]
    assert context_managers([1, 2]) == []


async def test_it_is_entered_once_and_left_in_the_same_task() -> None:
    """The context is entered once, however many tasks wait for it; `close` may be called twice."""
    dataset = Opens()
    context = DatasetContext(Subset(dataset, [0]))
    assert context.needed
    await asyncio.gather(*(context.open() for _ in range(5)))
    await context.open()
    assert len(dataset.entered) == 1
    assert dataset.entered[0] is not asyncio.current_task()
    assert await context.close() is None
    assert dataset.left == dataset.entered
    assert await context.close() is None
    assert len(dataset.left) == 1


async def test_an_error_is_raised_to_all_and_tried_again() -> None:
    """Contexts that were entered before the error are left again."""
    first, second = Opens(), Opens(broken=1)
    context = DatasetContext(ConcatDataset([first, second]))
    found = await asyncio.gather(context.open(), context.open(), return_exceptions=True)
    assert [str(error) for error in found] == ["no store", "no store"]
    assert len(first.left) == 1
    await context.open()
    assert len(second.entered) == 1
    await context.close()
    assert (len(first.left), len(second.left)) == (2, 1)


async def test_leaving_takes_bounded_time() -> None:
    """An `__aexit__` that never ends is cancelled; an error that it raises is returned."""

    class Sticks(Opens):
        async def __aexit__(self, *_: object) -> None:
            await asyncio.Event().wait()

    class Breaks(Opens):
        async def __aexit__(self, *_: object) -> None:
            raise OSError("lost")

    stuck = DatasetContext(Sticks())
    await stuck.open()
    assert await stuck.close(seconds=0.01) is None
    broken = DatasetContext(Breaks())
    await broken.open()
    assert isinstance(await broken.close(), OSError)


async def test_a_cancelled_waiter_leaves_it_to_the_others() -> None:
    """Cancelling one of the waiting tasks neither cancels nor repeats the entering."""
    dataset = Opens()
    context = DatasetContext(dataset)
    one, other = asyncio.ensure_future(context.open()), asyncio.ensure_future(context.open())
    await asyncio.sleep(0)
    one.cancel()
    await other
    assert one.cancelled()
    assert len(dataset.entered) == 1
    await context.close()


async def test_a_context_in_a_reference_cycle_is_exited_by_its_own_task() -> None:
    """The owner is collected as garbage and asks for the exit; the collector does not end the task by itself."""
    exited: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()

    class Notes(Opens):
        async def __aenter__(self) -> Self:
            self.task = id(asyncio.current_task())
            return self

        async def __aexit__(self, *error: object) -> None:
            await asyncio.sleep(0)
            exited.set_result((id(asyncio.current_task()), error[0] is None))

    class Owner:
        def __init__(self, context: DatasetContext) -> None:
            self.context = context
            self.itself = self

        def __del__(self) -> None:
            self.context.close_soon()

    dataset = Notes()
    context = DatasetContext(dataset)
    await context.open()
    owner = Owner(context)
    del context, owner
    gc.collect()
    assert await asyncio.wait_for(exited, 30) == (dataset.task, True)


@pytest.mark.parametrize("seed", range(5))
async def test_tasks_go_on_in_the_order_in_which_they_came(seed: int) -> None:
    """Tasks arrive before, while and after the context opens, and some are cancelled."""
    draw = random.Random(seed)
    for _ in range(20):
        dataset = Slow(draw.randrange(8))
        context = DatasetContext(dataset)
        passed: list[int] = []
        tasks: list[asyncio.Task[None]] = []
        for number in range(12):
            tasks.append(asyncio.create_task(_pass(context, number, passed)))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            if draw.random() < 0.1:
                draw.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert passed == sorted(passed)
        assert len(passed) == sum(not task.cancelled() for task in tasks)
        await context.close()


class Slow(Opens):
    """Opens after a number of turns of the loop."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    async def __aenter__(self) -> Self:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return self


async def _pass(context: DatasetContext, number: int, passed: list[int]) -> None:
    await context.open()
    passed.append(number)
