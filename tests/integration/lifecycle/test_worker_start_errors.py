"""An error while a worker starts: `StatefulDataLoader` raises it from `iter()`, like torchdata; `DataLoader` instead of
that worker's first batch, like torch.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch.utils.data import Dataset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader, StatefulDataLoader
from tests.helpers.running import BOTH, run_async
from tests.pairwise import quickly

METHODS = pytest.mark.parametrize("method", quickly(["fork", "spawn", "forkserver"], "fork", "forkserver"))
ROWS: Any = list(range(6))


class Refused(Exception):
    """The error raised in the worker."""


def refuse(worker: int) -> None:
    if worker == 1:
        raise Refused(f"by worker {worker}")


@pytest.mark.thorough
@METHODS
def test_a_stateful_loader_raises_it_from_iter(method: str) -> None:
    """No batch is delivered before the error, and a loader whose option is corrected can be iterated."""
    loader: Any = StatefulDataLoader(
        ROWS, 2, num_workers=2, worker_init_fn=refuse, multiprocessing_context=method, persistent_workers=True
    )
    with pytest.raises(Refused, match="by worker 1"):
        iter(loader)
    loader.worker_init_fn = None
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.close()


@pytest.mark.thorough
@METHODS
def test_a_plain_loader_raises_it_with_that_workers_first_batch(method: str) -> None:
    """The other worker's batch is delivered before the error, as in torch."""
    loader: Any = DataLoader(ROWS, 2, num_workers=2, worker_init_fn=refuse, multiprocessing_context=method)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(Refused, match="by worker 1"):
        next(batches)
    loader.close()


class Initialized(Dataset[Any]):
    """Each sample is the number of the attempt at `worker_init_fn` that succeeded in its worker."""

    attempts = 0
    attempt = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.attempt


class AwaitedInitialized(Initialized):
    """The samples of `Initialized`, awaited."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return self.attempt


def succeeds_at_third(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.attempts += 1
    if info.dataset.attempts < 3:
        raise Refused(f"worker {worker}, attempt {info.dataset.attempts}")
    info.dataset.attempt = info.dataset.attempts


@pytest.mark.parametrize("dataset", [Initialized(), AwaitedInitialized()])
@pytest.mark.parametrize("kind", BOTH)
def test_persistent_workers_do_not_go_on_uninitialized(kind: str, dataset: Any) -> None:
    """Each epoch calls `worker_init_fn` again until it has returned, and not afterwards. (torch continues without.)"""
    options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": succeeds_at_third, "persistent_workers": True}

    async def load() -> list[Any]:
        found: list[Any] = []
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            for _ in range(4):
                try:
                    found.append([int(batch) async for batch in loader])
                except Refused as error:
                    found.append(str(error))
        return found

    def load_sync() -> list[Any]:
        found: list[Any] = []
        with DataLoader[Any](dataset, **options) as loader:
            for _ in range(4):
                try:
                    found.append([int(batch) for batch in loader])
                except Refused as error:
                    found.append(str(error))
        return found

    found = load_sync() if kind == "sync" else run_async(load())
    assert [re.findall(r"Refused: worker 0, attempt (\d)", text) for text in found[:2]] == [["1"], ["2"]]
    assert found[2:] == [[3, 3, 3, 3]] * 2
