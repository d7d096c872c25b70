"""An error in which a worker starts: `StatefulDataLoader` raises it from `iter()`, as torchdata; `DataLoader` from the
first `next()`, as torch.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import IterableDataset

from asyncloader import DataLoader, StatefulDataLoader
from tests.pairwise import quickly

METHODS = pytest.mark.parametrize("method", quickly(["fork", "spawn", "forkserver"], "fork", "forkserver"))
ROWS: Any = list(range(6))


class Refused(Exception):
    """The worker's."""


def refuse(worker: int) -> None:
    if worker == 1:
        raise Refused(f"by worker {worker}")


class Once(IterableDataset[Any]):
    """A stream whose `__iter__` works once in each process."""

    epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        if self.epochs > 1:
            raise Refused("the second epoch")
        return iter(ROWS)


@pytest.mark.thorough
@METHODS
def test_a_stateful_loader_raises_it_from_iter(method: str) -> None:
    """No batch comes before it, and a loader that is set right can be iterated."""
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
    """As torch does."""
    loader: Any = DataLoader(ROWS, 2, num_workers=2, worker_init_fn=refuse, multiprocessing_context=method)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(Refused, match="by worker 1"):
        next(batches)
    loader.close()


def test_persistent_workers_begin_each_epoch_so() -> None:
    """A later epoch that cannot begin is no end: `iter()` raises, and the next one starts new workers."""
    loader: Any = StatefulDataLoader(Once(), 3, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    assert len(list(loader)) == 2
    with pytest.raises(Refused, match="the second epoch"):
        iter(loader)
    assert len(list(loader)) == 2
    loader.close()
