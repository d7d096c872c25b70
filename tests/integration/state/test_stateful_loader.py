"""StatefulDataLoader: the meaning of a state at each moment of an epoch, and the batches after it; no torchdata."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from asyncloader import (
    DataLoader,
    DeviceOptions,
    Recovery,
    StatefulDataLoader,
    StatefulDistributedSampler,
    StatefulRandomSampler,
    Tuning,
)
from tests.helpers.stateful_cases import (
    MOMENTS,
    ROWS,
    WORKERS,
    Batches,
    Counting,
    Order,
    OrderOfIterators,
    Plain,
    Rows,
    Stream,
    StreamOfIterators,
    plain,
    resumed,
    uninterrupted,
)
from tests.pairwise import quickly

pytestmark = pytest.mark.filterwarnings("ignore:neither the dataset nor its iterator has state_dict")


def _generator() -> torch.Generator:
    # A resumed process has seeded its generator differently.
    return torch.Generator().manual_seed(torch.initial_seed())


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"dataset": Rows(), "batch_size": 2},
    "shuffle": lambda: {"dataset": Rows(), "batch_size": 2, "shuffle": True, "drop_last": True},
    "shuffle, generator": lambda: {"dataset": Rows(), "batch_size": 2, "shuffle": True, "generator": _generator()},
    "shuffle, no batches": lambda: {"dataset": Rows(), "batch_size": None, "shuffle": True},
    "replacement": lambda: {
        "dataset": Rows(),
        "batch_size": 8,
        "sampler": StatefulRandomSampler(Rows(), replacement=True, num_samples=70),
    },
    "torch's sampler": lambda: {
        "dataset": Rows(),
        "batch_size": 2,
        "sampler": RandomSampler(Rows(), generator=_generator()),
    },
    "distributed": lambda: {
        "dataset": Rows(),
        "batch_size": 2,
        "sampler": StatefulDistributedSampler(Rows(), 2, 1, seed=3),
    },
    "sampler": lambda: {"dataset": Rows(), "batch_size": 2, "sampler": Order()},
    "sampler, every 2": lambda: {"dataset": Rows(), "batch_size": 2, "sampler": Order(), "snapshot_every_n_steps": 2},
    "sampler's iterator": lambda: {"dataset": Rows(), "batch_size": 2, "sampler": OrderOfIterators()},
    "batch sampler": lambda: {"dataset": Rows(), "batch_sampler": Batches()},
    "map dataset": lambda: {"dataset": Counting(), "batch_size": 2},
    "stream": lambda: {"dataset": Stream(), "batch_size": 2},
    "stream, every 3": lambda: {"dataset": Stream(), "batch_size": 2, "snapshot_every_n_steps": 3},
    "stream's iterator, never": lambda: {
        "dataset": StreamOfIterators(),
        "batch_size": 2,
        "snapshot_every_n_steps": None,
    },
    "stream without a state": lambda: {"dataset": Plain(), "batch_size": 2},
}

FEW = ["shuffle", "shuffle, generator", "sampler", "map dataset", "stream", "stream without a state"]
"""The cases in which workers make a difference."""


def _check(case: str, workers: str, moments: tuple[str, ...]) -> None:
    def make() -> Any:
        return StatefulDataLoader(**CASES[case](), **WORKERS[workers])

    run = uninterrupted(make)
    expected = {moment: run.left(moment) for moment in moments}
    assert {moment: resumed(make, run.states[moment], len(expected[moment])) for moment in moments} == expected


@pytest.mark.parametrize("case", CASES)
def test_each_moment(case: str) -> None:
    """A state resumes to the batches left of the epoch, and to the epochs after it, wherever it was taken.

    On the last batch in the loop no batch is left; after the loop a whole new epoch follows.
    """
    _check(case, "0", MOMENTS)


@pytest.mark.thorough
@pytest.mark.parametrize("case", quickly(FEW, "map dataset", "stream"))
def test_each_moment_with_workers(case: str) -> None:
    """States resume at each moment with workers that live for an epoch."""
    _check(case, "2", ("new", "iter", "within", "last", "end"))


@pytest.mark.thorough
@pytest.mark.parametrize("case", FEW)
def test_each_moment_with_persistent_workers(case: str) -> None:
    """States resume at each moment with workers that live as long as the loader."""
    _check(case, "2 persistent", ("within", "end", "later"))


def test_workers_draw_as_in_torchdata() -> None:
    """With workers torchdata draws two permutations per epoch and uses the second: the same seed, the same batches."""
    torch.manual_seed(3)
    expected = [plain(StatefulDataLoader(Rows(), None, sampler=order)) for order in _permutations(6)]
    torch.manual_seed(3)
    loader = StatefulDataLoader(Rows(), 1, shuffle=True, num_workers=2)
    got = [[int(batch) for batch in loader] for _ in range(3)]
    assert got == [expected[1], expected[3], expected[5]]
    torch.manual_seed(3)
    loader = StatefulDataLoader(Rows(), 1, shuffle=True)
    assert [[int(batch) for batch in loader] for _ in range(3)] == expected[:3]


def _permutations(count: int) -> list[list[int]]:
    sampler = StatefulRandomSampler(Rows())
    return [list(sampler) for _ in range(count)]


# -------------------------------------------------------------------------------------------------- the two methods


def test_what_is_read_again_is_said() -> None:
    """Loading the state of a stream without a state warns of the number of batches to be read and dropped."""
    loader = StatefulDataLoader(Plain(), 2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other = StatefulDataLoader(Plain(), 2)
    with pytest.warns(UserWarning, match="3 batches that were delivered already will be read again"):
        other.load_state_dict(loader.state_dict())
    assert plain(other) == [[6, 7], [8, 9], [10]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(StatefulDataLoader(Plain(), 2).state_dict())
        StatefulDataLoader(Stream(), 2).load_state_dict(StatefulDataLoader(Stream(), 2).state_dict())


# ------------------------------------------------------------------------------------------------- the constructor


def test_signature() -> None:
    """torch's arguments in torch's order, then torchdata's and our own, with their defaults; no seeded mode."""
    parameters = inspect.signature(StatefulDataLoader).parameters
    torchs = inspect.signature(torch.utils.data.DataLoader).parameters
    assert list(parameters)[: len(torchs)] == list(torchs)
    assert all(parameters[name].kind == parameter.kind for name, parameter in torchs.items())
    own = {name: parameter.default for name, parameter in parameters.items() if name not in torchs}
    assert own == {
        "snapshot_every_n_steps": 1,
        "concurrency": None,
        "decode": None,
        "on_error": "raise",
        "max_worker_restarts": None,
        "workers": None,
        "device": None,
        "recovery": Recovery(),
        "tuning": Tuning(),
        "device_options": DeviceOptions(),
    }
    assert isinstance(StatefulDataLoader(Rows()), DataLoader)


def test_shuffle_draws_once_from_the_global_generator() -> None:
    """The sampler's seed is drawn when the loader is made, each iterator's base seed when it is made; nothing else."""
    torch.manual_seed(4)
    loader = StatefulDataLoader(Rows(), 2, shuffle=True)
    list(loader)
    list(loader)
    after = torch.rand(())
    torch.manual_seed(4)
    for _ in range(3):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.rand(()), after)
    assert len(loader) == -(-ROWS // 2)
