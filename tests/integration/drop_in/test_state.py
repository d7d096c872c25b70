"""Requirements of frameworks on a DataLoader, point by point: its state.

Points 19 to 22; the others are in `test_construction.py`, `test_iteration.py` and
`test_batches.py`. Each test repeats the actions of the frameworks that its docstring names.
"""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from asyncloader import AsyncDataLoader, DataLoader, Stateful, StatefulDataLoader
from tests.helpers.frameworks import epoch

BOTH_CLASSES = pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
WORKERS = pytest.mark.parametrize("workers", [0, 2])
ROWS: Any = list(range(20))


def values(batches: list[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def stopped_after(loader: Any, count: int) -> dict[str, Any]:
    """The state after `count` batches, saved as Lightning and Accelerate save it."""
    batches = iter(loader)
    for _ in range(count):
        next(batches)
    state: dict[str, Any] = loader.state_dict()
    loader.close()
    return stored(state)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    assert loaded == json.loads(json.dumps(state))
    return loaded


# ------------------------------------------------------------------------------------------- 19


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader, StatefulDataLoader])
def test_point_19_the_class_is_stateful(make: Any) -> None:
    """Frameworks check a runtime protocol (Lightning's `_Stateful`, torchdata's `Stateful`)."""
    loader = make(ROWS)
    assert isinstance(loader, Stateful)
    assert issubclass(type(loader), Stateful)


@BOTH_CLASSES
@WORKERS
def test_point_19_a_state_before_iter_is_the_whole_epoch(make: Any, workers: int) -> None:
    """`state_dict` is legal before `iter()`, starts no worker, and resumes to all batches (Lightning's first save)."""
    fresh = make(ROWS, 5, seed=3, num_workers=workers)
    state = stored(fresh.state_dict())
    expected = values(epoch(fresh))
    loader = make(ROWS, 5, seed=3, num_workers=workers)
    loader.load_state_dict(state)
    assert values(epoch(loader)) == expected


@WORKERS
def test_point_19_a_state_is_applied_at_the_next_iter(workers: int) -> None:
    """Loading does not touch the running iterator; the next iterator begins at the loaded position, the iterator
    after it begins at the beginning.
    """
    state = stopped_after(DataLoader(ROWS, 5), 3)
    loader = DataLoader[Any](ROWS, 5, num_workers=workers)
    running = iter(loader)
    next(running)
    loader.load_state_dict(state)
    assert next(running).tolist() == [5, 6, 7, 8, 9]
    assert values(epoch(loader)) == [[15, 16, 17, 18, 19]]
    assert len(epoch(loader)) == 4
    del running


@BOTH_CLASSES
@pytest.mark.parametrize(
    "options", [{"timeout": 5}, {"num_workers": 1, "prefetch_factor": 0}], ids=["inline", "workers"]
)
def test_point_19_a_position_survives_an_iter_that_fails(make: Any, options: dict[str, Any]) -> None:
    """An `iter()` that fails does not use up the loaded position: the next iterator begins there."""
    loader = make(ROWS, 5, **options)
    loader.load_state_dict(stopped_after(DataLoader(ROWS, 5), 3))
    with pytest.raises(AssertionError):
        _ = aiter(loader) if make is AsyncDataLoader else iter(loader)
    loader.timeout = 0
    if "prefetch_factor" in options:
        loader.prefetch_factor = 2
    assert values(epoch(loader)) == [[15, 16, 17, 18, 19]]


# ------------------------------------------------------------------------------------------- 20


def test_point_20_a_state_is_the_callers() -> None:
    """Each call gives a new dictionary: Accelerate writes into it, and loads it with its own keys."""
    loader = DataLoader[Any](ROWS, 5)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    before = dict(state)
    state |= {"_iterator_finished": False, "_num_yielded": 7, "anything": [1]}
    assert loader.state_dict() == before
    again = DataLoader[Any](ROWS, 5)
    again.load_state_dict(stored(state))
    assert len(epoch(again)) == 3


@pytest.mark.parametrize("seed", [None, 3])
def test_point_20_one_ranks_state_is_every_ranks(seed: int | None) -> None:
    """Lightning saves rank 0's state alone, Accelerate that of the last rank to write: every rank resumes from it."""

    def loader(rank: int) -> DataLoader[Any]:
        torch.manual_seed(1)  # like in each rank's process
        if seed is not None:
            return DataLoader(ROWS, 4, shuffle=True, seed=seed, rank=rank, world_size=2)
        return DataLoader(ROWS, 4, sampler=DistributedSampler(ROWS, 2, rank, seed=1))

    states = [stopped_after(loader(rank), 1) for rank in range(2)]
    assert states[0] == states[1]
    for rank in range(2):
        again = loader(rank)
        again.load_state_dict(states[0])
        assert values(epoch(again)) == values(epoch(loader(rank)))[1:]


# ------------------------------------------------------------------------------------------- 21


@WORKERS
@pytest.mark.parametrize("late", [False, True], ids=["before iter", "after iter"])
def test_point_21_an_epoch_can_be_told_instead(workers: int, late: bool) -> None:
    """At an epoch's end Lightning restores no state, but sets the sampler's epoch, before `iter()` or just after."""
    loader = DataLoader[Any](ROWS, 5, shuffle=True, seed=3, num_workers=workers)
    epochs = [values(epoch(loader)) for _ in range(3)]
    again = DataLoader[Any](ROWS, 5, shuffle=True, seed=3, num_workers=workers)
    if not late:
        again.sampler.set_epoch(2)  # type: ignore[attr-defined]
    batches = iter(again)
    if late:
        again.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert values(list(batches)) == epochs[2]
    assert values(epoch(again)) not in epochs


# ------------------------------------------------------------------------------------------- 22
