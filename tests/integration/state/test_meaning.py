"""The meaning of a state: before the first batch, in the middle, on the last batch, after the end."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import AllDraws, Rows
from tests.helpers.seeded_runs import Stepwise, epochs_of
from tests.helpers.state_parts import Failing, StreamOfCursors

N = 22
SEEDED: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 7}
STEPS = 6
PLACES = [(0, False), (2, False), (2, True)]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(params=PLACES, ids=["inline", "workers", "persistent"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The places where samples are made."""
    workers, persistent = request.param
    return {**SEEDED, "num_workers": workers, "persistent_workers": persistent}


@pytest.fixture(scope="module")
def epochs() -> list[list[Any]]:
    """Epochs 0 to 3."""
    return epochs_of("sync", AllDraws(N), 4, **SEEDED)


def resumed(kind: str, state: dict[str, Any], count: int, **options: Any) -> list[list[Any]]:
    """The epochs of a new loader that begins with the state."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.loader.load_state_dict(state)
        return [run.epoch() for _ in range(count)]


# ------------------------------------------------------------------------------------------- the position


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("taken", range(STEPS + 1))
def test_any_position(kind: str, taken: int, options: dict[str, Any], epochs: list[list[Any]]) -> None:
    """The state counts delivered batches: the rest of the epoch follows (none after the last), then whole epochs."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.epoch()
        run.begin()
        run.take(taken)
        state = run.loader.state_dict()
    assert (state["epoch"], state["step"], state["finished"]) == (1, taken, False)
    got = resumed("sync", state, 2, **options | {"num_workers": 0, "persistent_workers": False})
    assert_same(got, [epochs[1][taken:], epochs[2]])
    assert_same(resumed(kind, state, 2, **options), got)


@pytest.mark.parametrize("kind", BOTH)
def test_it_is_the_same_at_every_place(kind: str, options: dict[str, Any]) -> None:
    """The state depends neither on the number of workers nor on the batches fetched ahead."""
    states: list[dict[str, Any]] = []
    for other in (options, SEEDED):
        with Stepwise(kind, AllDraws(N), **other) as run:
            run.begin()
            run.take(3)
            states.append(run.loader.state_dict())
    assert states[0] == states[1]


# ------------------------------------------------------------------------------------------- the dictionary


@pytest.mark.parametrize("kind", BOTH)
def test_it_equals_what_was_loaded(kind: str, options: dict[str, Any]) -> None:
    """Right after loading, the state is the loaded state; also a finished state, and while an iterator exists."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.begin()
        run.take(2)
        middle = run.loader.state_dict()
        run.rest()
        finished = run.loader.state_dict()
    with Stepwise(kind, AllDraws(N), **options) as run:
        for state in (middle, finished, middle):
            run.loader.load_state_dict(state)
            assert run.loader.state_dict() == state
        run.begin()
        assert run.loader.state_dict() == middle, "an iterator that has given nothing stands where it began"
        run.step()
        run.loader.load_state_dict(finished)
        assert run.loader.state_dict() == finished


def test_it_passes_through_json_and_a_careful_torch_load() -> None:
    """States are plain values: equal after JSON, and after ``torch.load(weights_only=True)``."""
    for dataset, options in ((Rows(N), SEEDED), (StreamOfCursors(N), {"batch_size": 4}), (Rows(N), {"shuffle": True})):
        with Stepwise("sync", dataset, num_workers=1, **options) as run:
            run.begin()
            run.take(2)
            state = run.loader.state_dict()
        assert json.loads(json.dumps(state)) == state
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state


# ------------------------------------------------------------------------------------------- several iterators


@pytest.mark.parametrize("kind", BOTH)
def test_the_newest_iterator_speaks(kind: str) -> None:
    """The state is that of the newest iterator, whichever iterator is read."""
    with Stepwise(kind, Rows(N), num_workers=1, **SEEDED) as run:
        one = run.begin()
        run.take(3)
        two = run.begin()
        assert run.loader.state_dict()["step"] == 0
        run.step(one)
        assert run.loader.state_dict()["step"] == 0
        run.step(two)
        assert run.loader.state_dict()["step"] == 1
        del one
        assert run.loader.state_dict()["step"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_back_to_an_earlier_state(kind: str, options: dict[str, Any], epochs: list[list[Any]]) -> None:
    """The loader that saved a state can return to it, across epochs, any number of times."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.begin()
        run.take(3)
        state = run.loader.state_dict()
        run.rest()
        for _ in range(2):
            run.epoch()
            run.loader.load_state_dict(state)
            assert_same(run.epoch(), epochs[0][3:])
            assert_same(run.epoch(), epochs[1])


@pytest.mark.parametrize("kind", BOTH)
def test_an_empty_state(kind: str, options: dict[str, Any], epochs: list[list[Any]]) -> None:
    """``load_state_dict({})`` takes no position, and forgets a loaded position that was not used."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.begin()
        run.take(3)
        state = run.loader.state_dict()
        run.loader.load_state_dict(state)
        run.loader.load_state_dict({})
        assert run.loader.state_dict()["step"] == 0
        assert_same(run.epoch(), epochs[0])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_another_epoch_set_after_loading(kind: str, options: dict[str, Any], epochs: list[list[Any]]) -> None:
    """A position belongs to its epoch: setting the same epoch keeps it, another epoch begins at its beginning."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.loader.set_epoch(1)
        run.begin()
        run.take(3)
        state = run.loader.state_dict()
    for epoch, expected in ((1, epochs[1][3:]), (2, epochs[2])):
        with Stepwise(kind, AllDraws(N), **options) as run:
            run.loader.load_state_dict(state)
            run.loader.set_epoch(epoch)
            assert_same(run.epoch(), expected)


# ------------------------------------------------------------------------------------------- errors between batches


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_past_once_the_next_batch_came(kind: str, workers: int) -> None:
    """A consumer that caught a sample's error and continued does not get it again; one that stopped there does."""
    options: dict[str, Any] = {"batch_size": 2, "seed": 1, "num_workers": workers}
    with Stepwise(kind, Failing(10, bad=(4,)), **options) as run:
        run.begin()
        run.take(2)
        with pytest.raises(KeyError):
            run.step()
        at_the_error = run.loader.state_dict()
        assert run.step().tolist() == [6, 7]
        past_it = run.loader.state_dict()
    assert (at_the_error["step"], past_it["step"]) == (2, 4)
    for state, expected in ((at_the_error, [4, 5, 6, 7, 8, 9]), (past_it, [8, 9])):
        with Stepwise(kind, Rows(10), **options) as run:
            run.loader.load_state_dict(state)
            assert torch.cat(run.epoch()).tolist() == expected
