"""A state is loaded while an older iterator is in use, and the older iterator is read further."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader import StatefulDataLoader
from tests.helpers.datasets import Numbers
from tests.helpers.seeded_runs import Stepwise
from tests.helpers.state_parts import StreamOfCursors

KINDS = ["sync", "asyncio"]
PLACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "no workers": (Numbers(12), {"shuffle": True}),
    "workers": (Numbers(12), {"num_workers": 2, "multiprocessing_context": "fork"}),
    "persistent": (Numbers(12), {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}),
    "seeded": (Numbers(12), {"seed": 3, "shuffle": True}),
    "stream": (StreamOfCursors(12), {}),
}


def firsts(batches: list[Any]) -> list[float]:
    return [float(batch.flatten()[0]) for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loaded", ["a position", "nothing"])
def test_a_state_describes_the_batches_that_were_delivered(kind: str, place: str, loaded: str) -> None:
    """The state follows the older iterator while that is read; the next iterator begins at the loaded position."""
    dataset, options = PLACES[place]
    with Stepwise(kind, dataset, batch_size=1, **options) as run:
        run.begin()
        run.take(5)
        given = run.loader.state_dict() if loaded == "a position" else {}
        rest = firsts(run.take(7))
        run.begin()
        run.take(1)
        run.loader.load_state_dict(given)
        assert run.loader.state_dict()["step"] == (5 if given else 0)
        run.take(1)
        state = run.loader.state_dict()
        assert state["step"] == 2
        assert ", 2" in repr(run.loader)
        following = firsts(run.take(3))
        assert run.loader.state_dict()["step"] == 5
        if given:
            run.begin()
            assert run.loader.state_dict()["step"] == 5
            assert firsts(run.take(7)) == rest
    with Stepwise(kind, dataset, batch_size=1, **options) as run:
        run.loader.load_state_dict(state)
        run.begin()
        assert firsts(run.take(3)) == following


@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_data_loader(workers: int) -> None:
    """StatefulDataLoader, too; and an older iterator that has ended leaves the loaded position in force."""
    loader = StatefulDataLoader[Any](Numbers(4), num_workers=workers)
    batches = iter(loader)
    next(batches)
    saved = loader.state_dict()
    loader.load_state_dict(saved)
    next(batches)
    assert loader.state_dict()["step"] == 2
    assert len(list(batches)) == 2
    assert loader.state_dict()["step"] == 1
    assert len(list(loader)) == 3
