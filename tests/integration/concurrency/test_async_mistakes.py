"""``async`` and ``await`` in the wrong place: each error names the right way, and nothing is silently left out."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions, StatefulDataLoader
from asyncloader.errors import NoEffectWarning
from tests.helpers.datasets import Numbers

SYNC = [DataLoader, StatefulDataLoader]
USE_SYNC = (
    "AsyncDataLoader is read with 'async for'; for a plain 'for' make an asyncloader.DataLoader, which takes the same "
    "arguments"
)
USE_ASYNC = (
    "DataLoader is read with a plain 'for', which blocks; for 'async for' make an asyncloader.AsyncDataLoader, which "
    "takes the same arguments"
)
ENTER_ASYNC = (
    "DataLoader is closed by a plain 'with', which blocks; for 'async with' make an asyncloader.AsyncDataLoader, which "
    "takes the same arguments"
)
PLAIN = "is a coroutine function, but it is called, and not awaited: make it a plain function, without async"


async def read(loader: Any) -> None:
    async for _ in loader:
        raise AssertionError("a batch")


async def take(loader: Any) -> None:
    await anext(aiter(loader))


async def enter(loader: Any) -> None:
    async with loader:
        raise AssertionError("entered")


async def enter_and_read(loader: Any) -> None:
    async with loader:
        await read(loader)


def text_of(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(TypeError) as caught:
        function(*args)
    return str(caught.value)


@pytest.mark.parametrize("kind", SYNC)
@pytest.mark.parametrize(
    ("use", "text"), [(read, USE_ASYNC), (take, USE_ASYNC), (enter, ENTER_ASYNC), (enter_and_read, ENTER_ASYNC)]
)
def test_the_sync_loaders_name_the_async_one(kind: Any, use: Any, text: str) -> None:
    """``async for``, `anext` and ``async with`` raise, and leave the loader usable."""
    with kind(Numbers(6)) as loader:
        assert text_of(asyncio.run, use(loader)) == text
        assert len(list(loader)) == 6, "nothing has happened to it"


@pytest.mark.parametrize("use", [list, iter, enumerate, lambda loader: next(iter(loader))])
def test_the_async_loader_names_the_sync_one(use: Any) -> None:
    """A plain ``for`` and its equivalents raise, also inside a plain ``with``, which is allowed."""
    with AsyncDataLoader(Numbers(6)) as loader:
        assert text_of(use, loader) == USE_SYNC


def forget_one(batches: Any) -> None:
    assert asyncio.iscoroutine(anext(batches))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_is_not_awaited(workers: int) -> None:
    """Python's own warning names the iterator's method; the epoch continues with the first batch."""

    async def forget() -> Any:
        async with AsyncDataLoader(Numbers(6), num_workers=workers) as loader:
            batches = aiter(loader)
            with pytest.warns(RuntimeWarning, match=r"coroutine 'Async\w+Iterator.__anext__' was never awaited"):
                forget_one(batches)
            return await anext(batches)

    assert asyncio.run(forget())[0, 0] == 0


def test_aclose_that_is_not_awaited() -> None:
    """Python's own warning names the loader's method."""
    with pytest.warns(RuntimeWarning, match=r"coroutine 'AsyncDataLoader.aclose' was never awaited"):
        assert asyncio.iscoroutine(AsyncDataLoader(Numbers(6)).aclose())


class Awaited(list[int]):
    """A sampler, and a dataset, whose methods are coroutine functions."""

    async def feedback(self, loss: float) -> None:
        raise AssertionError(f"called with {loss}")

    async def set_epoch(self, epoch: int) -> None:
        raise AssertionError(f"called with {epoch}")


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_methods_of_the_users_that_would_have_to_be_awaited(kind: Any) -> None:
    """A call of `feedback` or `set_epoch` of a sampler, or of `set_epoch` of a dataset, raises and names the method."""
    sampled, seeded = kind(Numbers(6), sampler=Awaited([1, 2])), kind(Awaited([1, 2]), seed=1)
    assert text_of(sampled.feedback, 0.5) == f"Awaited.feedback {PLAIN}"
    assert text_of(sampled.set_epoch, 1) == f"Awaited.set_epoch {PLAIN}"
    assert text_of(seeded.set_epoch, 1) == f"Awaited.set_epoch {PLAIN}"
    for loader in (sampled, seeded):
        loader.close()


async def awaited(batch: Any) -> Any:
    return batch


def test_a_transform_that_would_have_to_be_awaited() -> None:
    """`DeviceOptions` refuses the transform when it is constructed."""
    with pytest.raises(TypeError, match=PLAIN):
        DeviceOptions(device_transform=awaited)


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_a_collation_that_would_have_to_be_awaited(kind: Any) -> None:
    """An async `collate_fn` is a warning and no error: torch accepts it, and a user may await the coroutines."""
    with pytest.warns(NoEffectWarning, match="async does nothing for collate_fn, .* each batch would be a coroutine"):
        loader = kind(Numbers(2), collate_fn=awaited)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.clone(batch_size=2)  # an option taken over was warned of before
