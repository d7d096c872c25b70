"""torch's random samplers in seeded mode: one order for all ranks, found at any position, whatever they have drawn."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncloader import DataLoader
from asyncloader.samplers.seeded import SeededDraws, with_seeded_draws
from asyncloader.workers.fetch.seeding import derive

LENGTH = 103
DATASET: Any = range(LENGTH)
WEIGHTS = [1.0 + (number % 7 == 0) * 9 for number in range(LENGTH)]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: RandomSampler(range(LENGTH)),
    "with replacement": lambda: RandomSampler(range(LENGTH), replacement=True, num_samples=150),
    "more than once": lambda: RandomSampler(range(LENGTH), num_samples=250),
    "subset": lambda: SubsetRandomSampler(range(1, LENGTH, 2)),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 200),
    "weighted, once each": lambda: WeightedRandomSampler(WEIGHTS, 50, replacement=False),
}


def disturb(seed: int) -> None:
    """Seed all global generators, which two processes may have seeded differently."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def epochs_of(name: str, rank: int, world_size: int, **options: Any) -> list[list[int]]:
    disturb(rank)
    loader = DataLoader[Any](
        DATASET, batch_size=4, sampler=SAMPLERS[name](), seed=5, rank=rank, world_size=world_size, **options
    )
    return [[int(index) for batch in loader for index in batch] for _ in range(2)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_share_one_order(name: str) -> None:
    """The ranks together read the order of one process; each epoch has its own order, which the same seed repeats."""
    whole = epochs_of(name, 0, 1)
    assert whole == epochs_of(name, 0, 1)
    assert whole[0] != whole[1]
    assert len(whole[0]) == len(SAMPLERS[name]())
    ranks = [epochs_of(name, rank, 3, on_uneven="drop") for rank in range(3)]
    for epoch in range(2):
        shared = Counter(index for rank in ranks for index in rank[epoch])
        assert not shared - Counter(whole[epoch])
        assert shared.total() > len(whole[epoch]) - 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_is_found_at_any_place(name: str) -> None:
    """A state taken anywhere restores the rest, whatever was drawn in between."""

    def loader() -> DataLoader[Any]:
        return DataLoader[Any](DATASET, batch_size=4, sampler=SAMPLERS[name](), seed=5)

    whole = [batch.tolist() for batch in loader()]
    for stop in (1, 7, len(whole) - 1):
        disturb(stop)
        first = loader()
        batches = iter(first)
        head = [next(batches).tolist() for _ in range(stop)]
        disturb(stop + 1)
        again = loader()
        again.load_state_dict(first.state_dict())
        assert head + [batch.tolist() for batch in again] == whole


@pytest.mark.parametrize("options", [{"replacement": True}, {}])
def test_as_many_as_asked_are_drawn_as_needed(options: dict[str, Any]) -> None:
    """An epoch of 10**12 samples begins at once, anywhere, in the order of torch's own iterator."""
    endless = SeededDraws(RandomSampler(range(1000), num_samples=10**12, **options), 5)
    generator = torch.Generator().manual_seed(derive(5, "sampler", 0))
    expected = list(RandomSampler(range(1000), num_samples=2_100_000, generator=generator, **options))
    for start in (0, 4095, 2_098_765):
        assert list(islice(endless.iter_from(start), 1234)) == expected[start : start + 1234]
    assert list(SeededDraws(RandomSampler(range(1000), num_samples=5432, **options), 5)) == expected[:5432]


class Mine(RandomSampler):
    """A class of the user's, which may draw as it likes."""


def test_what_is_left_alone() -> None:
    """Samplers with their own generator, samplers of other classes, and in torch mode all samplers are left alone."""
    kept: list[Sampler[int]] = [
        RandomSampler(range(4), generator=torch.Generator()),
        SequentialSampler(range(4)),
        Mine(range(4)),
    ]
    for sampler in kept:
        assert with_seeded_draws(sampler, 5) is sampler
    for name, make in SAMPLERS.items():
        sampler = make()
        assert with_seeded_draws(sampler, None) is sampler, name
        made = with_seeded_draws(sampler, 5)
        assert type(made) is SeededDraws
        assert with_seeded_draws(made, None) is sampler
        assert with_seeded_draws(made, 7).sampler is sampler
        with pytest.raises(ValueError, match="start should be between 0 and"):
            made.iter_from(1000)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_default_device_changes_nothing(name: str) -> None:
    """Many programs set the default device "cuda"; here it is "meta", which every machine has."""
    sampler = SeededDraws(SAMPLERS[name](), 5)
    expected = list(sampler)
    with torch.device("meta"):
        assert list(sampler) == expected


def test_another_random_sampler_warns_where_ranks_share_its_order() -> None:
    """A sampler that drew from the global generator is warned of; not for one rank or with a generator of its own."""
    for world_size, generator, warns in ((2, None, True), (1, None, False), (2, torch.Generator(), False)):
        sampler = Mine(DATASET, generator=generator)
        loader = DataLoader[Any](DATASET, batch_size=4, sampler=sampler, seed=5, rank=0, world_size=world_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader)
        assert [str(each.message)[:14] for each in caught] == ["Mine drew its "] * warns
