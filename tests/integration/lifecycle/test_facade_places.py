"""The sync facade works wherever it is called from: threads, coroutines, callbacks, notebooks, several at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import AsyncNumbers, Numbers
from tests.helpers.running import KINDS, collect, run_async

EXPECTED = collect("torch", Numbers(30), batch_size=4)
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no workers": (Numbers(30), {}),
    "no workers, async": (AsyncNumbers(30), {}),
    "workers": (Numbers(30), {"num_workers": 2}),
    "workers, async": (AsyncNumbers(30), {"num_workers": 2}),
    "persistent": (Numbers(30), {"num_workers": 1, "persistent_workers": True}),
}
every = pytest.mark.parametrize("name", OPTIONS)


def two_epochs(name: str) -> None:
    dataset, options = OPTIONS[name]
    with DataLoader[Any](dataset, batch_size=4, **options) as loader:
        for _ in range(2):
            assert_same(list(loader), EXPECTED)


@pytest.mark.parametrize("kind", KINDS[1:])
@every
def test_inside_a_coroutine(kind: str, name: str) -> None:
    """A plain `for` inside a coroutine, under a running loop, as in a notebook cell."""

    async def cell() -> None:
        two_epochs(name)
        await asyncio.sleep(0)
        two_epochs(name)

    run_async(cell(), kind)


@every
async def test_in_a_callback_and_in_a_thread_of_a_running_loop(name: str) -> None:
    """The loader is used in `call_soon` and in `to_thread`, while the loop runs."""
    done = asyncio.get_running_loop().create_future()

    def callback() -> None:
        try:
            two_epochs(name)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    asyncio.get_running_loop().call_soon(callback)
    await done
    await asyncio.to_thread(two_epochs, name)


async def test_async_loader_beside_a_facade() -> None:
    """Both loaders work at the same time in one process: a validation loop inside a training loop."""
    count = 0
    async with AsyncDataLoader[Any](Numbers(30), batch_size=4, num_workers=1) as train:
        got = []
        async for batch in train:
            got.append(batch)
            if len(got) % 4 == 1:
                assert_same(list(DataLoader[Any](Numbers(30), batch_size=4, num_workers=1)), EXPECTED)
                count += 1
    assert_same(got, EXPECTED)
    assert count == 2
