"""StatefulDataLoader over streams that draw in their workers: a state of an epoch's end gives the next epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from asyncloader import AsyncDataLoader, StatefulDataLoader
from tests.helpers.running import run_async

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 8
WORKERS = 3


class Seeded(IterableDataset[int]):
    """Shuffles with a generator seeded with its worker's seed."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(info.seed)).tolist())


class Drawing:
    """Draws from the worker's global generator, whose state is part of its own state."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        if self.given == COUNT:
            raise StopIteration
        self.given += 1
        return int(torch.randint(1 << 30, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["given"]
        torch.set_rng_state(state_dict["generator"])


class OfIterators(IterableDataset[int]):
    """Its iterators have the state."""

    def __iter__(self) -> Iterator[int]:
        return Drawing()


class OfItself(Drawing, IterableDataset[int]):
    """Is its own iterator."""

    def __iter__(self) -> Self:
        self.given = 0
        return self


STREAMS = [Seeded, OfIterators, OfItself]


def options(**others: Any) -> dict[str, Any]:
    """Options with which each loader draws the same numbers in the same order."""
    generator = torch.Generator().manual_seed(15)
    return {"generator": generator, "num_workers": WORKERS, "multiprocessing_context": "fork", **others}


def plain(batches: list[Any]) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_next_epoch(stream: Any, persistent: bool, batch_size: int | None, epochs: int) -> None:
    """The loader's generator is seeded as at the start; with persistent workers the epoch after it is equal, too."""

    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader[Any](stream(), batch_size=batch_size, **options(persistent_workers=persistent))

    with make() as loader:
        read = [plain(list(loader)) for _ in range(epochs)]
        state = loader.state_dict()
        following = [plain(list(loader)) for _ in range(2)]
    assert len(following[0]) == len(read[0])
    with make() as loader:
        loader.load_state_dict(state)
        assert plain(list(loader)) == following[0]
        if persistent:
            assert plain(list(loader)) == following[1]


async def _epochs(loader: AsyncDataLoader[Any], count: int) -> list[list[Any]]:
    return [plain([batch async for batch in loader]) for _ in range(count)]


def test_the_next_epoch_of_an_async_loader() -> None:
    """Also from a state taken when that epoch has begun, before its first batch."""

    async def run() -> None:
        async with AsyncDataLoader[Any](OfIterators(), **options(persistent_workers=True)) as loader:
            await _epochs(loader, 1)
            states = [loader.state_dict()]
            batches = aiter(loader)
            states.append(loader.state_dict())
            following = plain([batch async for batch in batches])
        for state in states:
            async with AsyncDataLoader[Any](OfIterators(), **options(persistent_workers=True)) as loader:
                loader.load_state_dict(state)
                assert await _epochs(loader, 1) == [following]

    run_async(run())
