"""A copy of a loader goes on from a loaded state, and has the epoch's number, as the loader that was copied would."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncloader import DataLoader, JoinSequences, PackedLoader, StateError, StatefulDataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.state_parts import StreamOfCursors

N, STEPS, TAKEN = 12, 6, 2

PLACES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "seeded": ("sync", Numbers(N), {"seed": 3, "shuffle": True}),
    "seeded, async": ("asyncio", Numbers(N), {"seed": 3, "shuffle": True}),
    "torch mode": ("sync", Numbers(N), {"shuffle": True}),
    "torch mode, async": ("asyncio", Numbers(N), {"shuffle": True}),
    "stream": ("sync", StreamOfCursors(N), {}),
    "stream, async": ("asyncio", StreamOfCursors(N), {"seed": 3}),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "copy of a pickle": lambda loader: copy.copy(pickle.loads(pickle.dumps(loader))),
}


def firsts(batches: list[Any]) -> list[float]:
    return [float(batch.flatten()[0]) for batch in batches]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("taken", [TAKEN, STEPS])
@pytest.mark.parametrize("epoch", [None, 7])
def test_it_goes_on(place: str, copied: str, taken: int, epoch: int | None) -> None:
    """Within an epoch and between epochs, and with an epoch that was set since."""
    kind, dataset, options = PLACES[place]
    with Stepwise(kind, dataset, batch_size=2, **options) as run:
        run.epoch()
        run.begin()
        run.take(taken)
        if taken == STEPS:
            assert run.rest() == []
        state = run.loader.state_dict()
    found = []
    for twin in (None, COPIES[copied]):
        torch.manual_seed(5)
        with Stepwise(kind, copy.deepcopy(dataset), batch_size=2, **options) as run:
            run.loader.load_state_dict(state)
            if epoch is not None:
                run.loader.set_epoch(epoch)
            run.loader = run.loader if twin is None else twin(run.loader)
            begun = run.loader.state_dict(), run.loader.epoch
            found.append((begun, firsts(run.epoch()), run.loader.epoch, firsts(run.epoch())))
    assert found[0] == found[1]
    assert (found[1][0][1], len(found[1][3])) == (epoch or 1 + taken // STEPS, STEPS)


@pytest.mark.parametrize("copied", COPIES)
def test_loaders_in_other_clothes(copied: str) -> None:
    """A `StatefulDataLoader`, and a `PackedLoader`, whose copy leaves the original where it is."""

    def packed() -> PackedLoader:
        sequences: Any = [[n] * (n % 3 + 1) for n in range(N)]
        return PackedLoader(DataLoader[Any](sequences, batch_size=4, collate_fn=JoinSequences(4)))

    for make in (lambda: StatefulDataLoader(Numbers(N), batch_size=2, shuffle=True), packed):
        loader: Any = make()
        rows = iter(loader)
        next(rows)
        next(rows)
        running = COPIES[copied](loader) if make is packed else None  # begins anew, as copies of all loaders do
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        twin = COPIES[copied](resumed)
        rest = [str(row) for row in rows]
        assert [str(row) for row in twin] == rest
        assert [str(row) for row in resumed] == rest
        if running is not None:
            assert running.state_dict()["delivered"] == 0
            assert len(list(running)) == len(rest) + 2


def test_a_forked_child_is_a_copy() -> None:
    """Its loader goes on, too; and a copy of a copy may be given another state, or none."""
    loader = DataLoader[Any](Numbers(N), batch_size=2)
    batches = iter(loader)
    next(batches)
    again = DataLoader[Any](Numbers(N), batch_size=2)
    again.load_state_dict(loader.state_dict())
    child = os.fork()
    if not child:
        os._exit(len(list(again)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == STEPS - 1
    twin = copy.copy(again)
    twin.load_state_dict({})
    assert (len(list(twin)), len(list(again))) == (STEPS, STEPS - 1)


def test_it_is_checked_where_it_is_read() -> None:
    """Against the ranks and workers of the copy's process: a state that no longer fits is refused, every time."""
    loader = DataLoader[Any](StreamOfCursors(N), batch_size=2)
    batches = iter(loader)
    next(batches)
    again = DataLoader[Any](StreamOfCursors(N), batch_size=2)
    again.load_state_dict(loader.state_dict())
    twin = pickle.loads(pickle.dumps(again))
    twin.num_workers = 2
    for _ in range(2):
        with pytest.raises(StateError, match="num_workers"):
            iter(twin)
    twin.num_workers = 0
    assert len(list(twin)) == STEPS - 1
