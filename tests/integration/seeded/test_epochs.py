"""The epoch of a seeded loader: completed epochs advance it, abandoned epochs do not, users set it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, get_worker_info

from asyncloader import SeededSampler
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH
from tests.helpers.seeded_datasets import AllDraws, Rows
from tests.helpers.seeded_runs import Stepwise, epochs_of

N = 20
PLACES = [(0, False), (2, False), (2, True)]
SEEDED: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 7}


@pytest.fixture(params=PLACES, ids=["inline", "workers", "persistent"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The places where samples are made."""
    workers, persistent = request.param
    return {**SEEDED, "num_workers": workers, "persistent_workers": persistent}


@pytest.fixture(scope="module")
def epochs() -> list[list[Any]]:
    """Epochs 0 to 4."""
    return epochs_of("sync", AllDraws(N), 5, **SEEDED)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_an_epoch_whose_last_batch_was_delivered_is_complete(
    kind: str, options: dict[str, Any], epochs: list[list[Any]]
) -> None:
    """Frameworks stop at ``len(loader)`` without a further `next`: that counts as the end, once."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        for number in range(3):
            run.begin()
            assert_same(run.take(len(run.loader)), epochs[number])
        assert_same(run.epoch(), epochs[3])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("seed", [None, 5])
def test_the_loader_says_its_epoch(kind: str, seed: int | None) -> None:
    """`epoch` is that of the batches read, then the next; an epoch left early does not count; a state has its own."""
    with Stepwise(kind, AllDraws(N), batch_size=4, num_workers=1, seed=seed) as run:
        assert run.loader.epoch == 0
        run.begin()
        run.step()
        assert run.loader.epoch == 0
        run.rest()
        assert run.loader.epoch == 1
        run.begin()
        run.step()
        state = run.loader.state_dict()
        assert run.loader.epoch == 1
        run.epoch()
        assert run.loader.epoch == 2
        run.loader.load_state_dict(state)
        assert run.loader.epoch == 1
        run.epoch()
        run.loader.set_epoch(7)
        assert run.loader.epoch == 7


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("where", ["loader", "sampler"])
def test_set_epoch(kind: str, where: str, options: dict[str, Any], epochs: list[list[Any]]) -> None:
    """Setting the epoch on the loader or on its sampler has the same effect, forwards and backwards."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        target = run.loader if where == "loader" else run.loader.sampler
        for number in (3, 0, 2, 2):
            target.set_epoch(number)
            assert_same(run.epoch(), epochs[number])
            assert run.loader.sampler.epoch == number + 1
        run.begin()
        run.step()
        target.set_epoch(1)  # the iterator continues with its own epoch
        assert_same(run.rest(), epochs[3][1:])
        assert run.loader.sampler.epoch == 1, "what was set meanwhile stays"
        assert_same(run.epoch(), epochs[1])


class Told(Rows):
    """Has `set_epoch`, like a dataset of Hugging Face."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.epoch, get_worker_info() is not None])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_datasets_are_told(kind: str, options: dict[str, Any]) -> None:
    """`set_epoch` of a dataset is called for each epoch, in every copy: also in persistent workers."""
    with Stepwise(kind, Told(N), **options) as run:
        for number in (0, 1, 5):
            run.loader.set_epoch(number)
            rows = torch.cat(run.epoch())
            assert set(rows[:, 1].tolist()) == {number}
            assert set(rows[:, 2].tolist()) == {int(options["num_workers"] > 0)}
        assert set(torch.cat(run.epoch())[:, 1].tolist()) == {6}


@pytest.mark.parametrize("kind", BOTH)
def test_samplers_of_the_users_are_told(kind: str) -> None:
    """A sampler with `set_epoch`, and a sampler inside a batch sampler, follow the loader's epoch."""
    for make in (
        lambda: {"sampler": SeededSampler(range(N), 3), "batch_size": 4},
        lambda: {"batch_sampler": BatchSampler(SeededSampler(range(N), 3), 4, drop_last=False)},
    ):
        expected = SeededSampler(range(N), 3)
        with Stepwise(kind, Rows(N), seed=1, **make()) as run:
            for number in range(3):
                expected.set_epoch(number)
                assert torch.cat(run.epoch()).tolist() == list(expected)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("before", ["an epoch", "a state", "the state of an end"])
def test_a_state_between_epochs_is_of_the_epoch_that_was_set(
    kind: str, before: str, options: dict[str, Any], epochs: list[list[Any]]
) -> None:
    """The next iterator gives the epoch that `set_epoch` chose, and so does a loader resumed from this state."""
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.begin()
        run.take(2)
        state = run.loader.state_dict()
        run.rest()
        if before == "the state of an end":
            state = run.loader.state_dict()
        if before != "an epoch":
            run.loader.load_state_dict(state)
            assert run.loader.state_dict() == state
        run.loader.set_epoch(3)
        state = run.loader.state_dict()
        assert_same(run.epoch(), epochs[3])
    with Stepwise(kind, AllDraws(N), **options) as run:
        run.loader.load_state_dict(state)
        assert_same(run.epoch(), epochs[3])
        assert_same(run.epoch(), epochs[4])
