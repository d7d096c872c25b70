"""StatefulDataLoader beside torchdata's: equal seeds give equal batches, states have the same meaning at every moment.

Layouts of states are each library's own. Where torchdata's resumed run is not the rest of its uninterrupted run, ours
is, and the case is listed in `DEFECTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader import StatefulDataLoader, StatefulDistributedSampler, StatefulRandomSampler
from tests.clients.frameworks.helping import draws, seed_all
from tests.helpers.stateful_cases import (
    MOMENTS,
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

pytestmark = [
    pytest.mark.clients,
    # torchdata's loader calls a function of torch that gives this warning.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:neither the dataset nor its iterator has state_dict"),
]


class Library:
    """One of the two libraries, by the names that a user imports."""

    def __init__(self, loader: Any, random: Any, distributed: Any) -> None:
        self.loader = loader
        self.random = random
        self.distributed = distributed


@pytest.fixture(scope="module")
def theirs() -> Library:
    samplers = import_module("torchdata.stateful_dataloader.sampler")
    loader = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return Library(loader, samplers.RandomSampler, samplers.StatefulDistributedSampler)


OURS = Library(StatefulDataLoader, StatefulRandomSampler, StatefulDistributedSampler)

CASES: dict[str, Callable[[Library], dict[str, Any]]] = {
    "sequential": lambda _: {"dataset": Rows(), "batch_size": 2},
    "drop_last": lambda _: {"dataset": Rows(), "batch_size": 2, "drop_last": True},
    "shuffle": lambda _: {"dataset": Rows(), "batch_size": 2, "shuffle": True},
    "shuffle, generator": lambda _: {
        "dataset": Rows(),
        "batch_size": 2,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(torch.initial_seed()),
    },
    "shuffle, no batches": lambda _: {"dataset": Rows(), "batch_size": None, "shuffle": True},
    "replacement": lambda library: {
        "dataset": Rows(),
        "batch_size": 8,
        "sampler": library.random(Rows(), replacement=True, num_samples=70),
    },
    "their sampler": lambda _: {
        "dataset": Rows(),
        "batch_size": 2,
        "sampler": import_module("torchdata.stateful_dataloader.sampler").RandomSampler(Rows()),
    },
    "distributed": lambda library: {
        "dataset": Rows(),
        "batch_size": 2,
        "sampler": library.distributed(Rows(), 2, 1, seed=3),
    },
    "sampler": lambda _: {"dataset": Rows(), "batch_size": 2, "sampler": Order()},
    "sampler's iterator": lambda _: {"dataset": Rows(), "batch_size": 2, "sampler": OrderOfIterators()},
    "batch sampler": lambda _: {"dataset": Rows(), "batch_sampler": Batches()},
    "a plain batch sampler": lambda _: {
        "dataset": Rows(),
        "batch_sampler": BatchSampler(SequentialSampler(Rows()), 3, drop_last=True),
    },
    "map dataset": lambda _: {"dataset": Counting(), "batch_size": 2},
    "stream": lambda _: {"dataset": Stream(), "batch_size": 2},
    "stream, no batches": lambda _: {"dataset": Stream(), "batch_size": None},
    "stream, every 3": lambda _: {"dataset": Stream(), "batch_size": 2, "snapshot_every_n_steps": 3},
    "stream's iterator": lambda _: {"dataset": StreamOfIterators(), "batch_size": 2},
    "stream's iterator, never": lambda _: {
        "dataset": StreamOfIterators(),
        "batch_size": 2,
        "snapshot_every_n_steps": 0,
    },
    "stream without a state": lambda _: {"dataset": Plain(), "batch_size": 2},
}


DEFECTS: dict[tuple[str, str], tuple[str, ...]] = {
    # Without workers, the number drawn from the generator between two epochs is left out when an epoch is resumed.
    ("shuffle, generator", "0"): MOMENTS,
    # The end of an epoch is taken for the beginning of the next, which then is empty, or a rank loads it twice.
    ("distributed", "0"): ("end", "next iter"),
    ("distributed", "2"): ("next iter",),
    ("distributed", "2 persistent"): ("next iter",),
    # A short last batch has seen the sampler's end, where this sampler has reset itself: a whole epoch is delivered
    # instead of none. With workers the sampler's state from before the end is loaded into the next epoch.
    ("sampler", "0"): ("last",),
    ("sampler", "2"): ("last", "end"),
    ("sampler", "2 persistent"): ("last", "end"),
    # A stream that resets itself does the same; persistent workers have read ahead in the epoch that is dropped.
    ("stream", "2"): ("last",),
    ("stream", "2 persistent"): ("last", "end"),
    ("stream, every 3", "2"): ("last",),
    ("stream, every 3", "2 persistent"): ("last", "end"),
}
"""Moments at which torchdata's resumed run is not the rest of its own uninterrupted run (0.11)."""


EQUAL = [(case, workers) for case in CASES for workers in WORKERS if (case, workers) != ("shuffle, generator", "0")]
"""Without workers torchdata draws a user's generator's first permutation before its base seed; torch and we draw it
after.
"""


@pytest.mark.parametrize(("case", "workers"), EQUAL)
def test_the_same_seed_gives_the_same_batches(case: str, workers: str, theirs: Library) -> None:
    """Three epochs from the same seed are equal, and the same numbers were drawn from the global generators."""
    runs = []
    for library in (theirs, OURS):
        seed_all()
        loader = library.loader(**CASES[case](library), **WORKERS[workers])
        runs.append(([plain(loader) for _ in range(3)], draws()))
    assert runs[1] == runs[0]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("case", CASES)
def test_states_mean_the_same(case: str, workers: str, theirs: Library) -> None:
    """From a state of each moment both resume to the same batches; ours are always those of the uninterrupted run."""
    got: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name, library in (("theirs", theirs), ("ours", OURS)):

        def make(library: Library = library) -> Any:
            return library.loader(**CASES[case](library), **WORKERS[workers])

        run = uninterrupted(make)
        expected = {moment: run.left(moment) for moment in MOMENTS}
        got[name] = {moment: resumed(make, run.states[moment], len(expected[moment])) for moment in MOMENTS}
    assert got["ours"] == expected
    defects = DEFECTS.get((case, workers), ())
    assert [moment for moment in MOMENTS if got["theirs"][moment] != expected[moment] and moment not in defects] == []
