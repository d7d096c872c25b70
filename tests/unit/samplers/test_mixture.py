"""The mixture: proportions held at every prefix, passes complete, and any position found at once."""

from __future__ import annotations

import itertools
import pickle
from bisect import bisect_right
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Sampler, TensorDataset

from asyncloader import DataLoader
from asyncloader.samplers.mixture import MixtureSampler
from asyncloader.samplers.mixture_order import DEVIATION

SEEDS = st.integers(0, 2**64 - 1)


class Rows:
    """A dataset with a length, however large, and nothing else."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@st.composite
def mixtures(draw: st.DrawFn, on_exhausted: str | None = None) -> MixtureSampler:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    weights = draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)).filter(any))
    how: Any = on_exhausted or draw(st.sampled_from(["repeat", "stop", "drop"]))
    sampler = MixtureSampler(
        [range(size) for size in sizes],
        weights,
        draw(SEEDS),
        num_samples=draw(st.none() | st.integers(0, 150)) if how == "repeat" else None,
        on_exhausted=how,
        shuffle=draw(st.booleans()),
    )
    sampler.set_epoch(draw(st.integers(0, 5) | SEEDS))
    return sampler


def source_of(sampler: MixtureSampler, index: int) -> int:
    ends = list(itertools.accumulate(sampler._sizes))
    assert 0 <= index < ends[-1]
    return bisect_right(ends, index)


def by_source(sampler: MixtureSampler, indices: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in sampler._sizes]
    for index in indices:
        found[source_of(sampler, index)].append(index)
    return found


def epochs(sampler: MixtureSampler, number: int) -> list[int]:
    """The indices of the first epochs, in one list."""
    found: list[int] = []
    for epoch in range(number):
        sampler.set_epoch(epoch)
        found += sampler
    return found


# ------------------------------------------------------------------------------------------------ every `on_exhausted`


@pytest.mark.thorough
@settings(deadline=None)
@given(mixtures())
def test_the_rest_of_an_epoch_from_any_position(sampler: MixtureSampler) -> None:
    """`iter_from(k)` is the epoch without its first k indices, and `len` is their number."""
    indices = list(sampler)
    assert len(sampler) == len(indices)
    for start in range(len(indices) + 1):
        assert list(sampler.iter_from(start)) == indices[start:]
    for start in (-1, len(indices) + 1):
        with pytest.raises(ValueError, match=f"between 0 and {len(indices)}, but got start={start}"):
            sampler.iter_from(start)


@settings(deadline=None)
@given(mixtures("repeat") | mixtures("stop"))
def test_each_pass_over_a_dataset_is_complete(sampler: MixtureSampler) -> None:
    """Over several epochs a dataset's samples are all given before one is repeated; each pass has its own shuffle."""
    for source, given_indices in enumerate(by_source(sampler, epochs(sampler, 3))):
        size, offset = sampler._sizes[source], sampler._offsets[source]
        passes = [given_indices[first : first + size] for first in range(0, len(given_indices), size)]
        for each in passes[:-1]:
            assert sorted(each) == list(range(offset, offset + size))
        assert len(set(passes[-1])) == len(passes[-1]) if passes else True
        if not sampler.shuffle:
            assert all(each == list(range(offset, offset + len(each))) for each in passes)


def sampler_of_two(**options: Any) -> MixtureSampler:
    return MixtureSampler([range(3000), range(2000)], [0.75, 0.25], seed=1, **options)


def test_the_mixture_is_for_ever() -> None:
    """The order is written down here: a run resumed with a later version must go on in the same order."""
    sampler = MixtureSampler([range(6), range(3)], [2, 1], seed=3)
    assert epochs(sampler, 2) == [2, 7, 4, 1, 8, 5, 3, 6, 0, 0, 8, 1, 3, 6, 2, 5, 7, 4]


# ------------------------------------------------------------------------------------------------ each `on_exhausted`


def test_repeat() -> None:
    """Epochs have `num_samples`, by default the number of all samples; each goes on where the epoch before ended."""
    assert len(sampler_of_two()) == 5000
    short = sampler_of_two(num_samples=7)
    long = sampler_of_two(num_samples=70)
    assert len(short) == 7
    assert epochs(short, 10) == list(long)
    assert len(MixtureSampler([range(10), range(5)], [0, 1], 0)) == 5


@settings(deadline=None)
@given(mixtures("drop"))
def test_drop_gives_every_sample_once(sampler: MixtureSampler) -> None:
    """Every sample of datasets with a weight is given once; when a dataset is used up, the others keep proportion."""
    indices = list(sampler)
    groups = by_source(sampler, indices)
    shares = list(sampler.proportions)
    for source, group in enumerate(groups):
        first = sampler._offsets[source]
        assert sorted(group) == (list(range(first, first + sampler._sizes[source])) if shares[source] else [])
    # From one dataset's end to the next, the proportions of the remaining datasets hold at every prefix.
    left = [len(group) for group in groups]
    counts, number = [0] * len(left), 0
    for index in indices:
        source = source_of(sampler, index)
        counts[source] += 1
        number += 1
        left[source] -= 1
        for each, share in enumerate(shares):
            assert abs(counts[each] - number * share / sum(shares)) <= DEVIATION
        if not left[source]:
            shares[source] = Fraction(0)
            counts, number = [0] * len(left), 0


# ------------------------------------------------------------------------------------------------ in loaders; options


def test_in_every_loader() -> None:
    """The sampler is of torch's class, pickles, takes the ConcatDataset itself, and feeds torch's loader and ours."""
    both: ConcatDataset[Any] = ConcatDataset([TensorDataset(torch.arange(30)), TensorDataset(torch.arange(100, 110))])
    sampler = MixtureSampler(both, [2, 1], seed=4, on_exhausted="drop")
    assert isinstance(sampler, Sampler)
    sampler.set_epoch(3)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
    assert sampler.proportions == (Fraction(2, 3), Fraction(1, 3))
    expected = [batch.tolist() for (batch,) in torch.utils.data.DataLoader(both, 6, sampler=sampler)]
    assert [sum(x >= 100 for x in batch) for batch in expected] == [2, 2, 2, 2, 2, 0, 0]
    with DataLoader[Any](both, 6, sampler=sampler, num_workers=2) as loader:
        assert [batch.tolist() for (batch,) in loader] == expected
    assert repr(sampler) == (
        "<MixtureSampler of [30, 10] as 2/3, 1/3, seed=4, epoch=3, on_exhausted='drop', 40 samples>"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, "one weight a dataset, but got 1 for 2"),
        ({"weights": [1, -1]}, "weight 1 is -1"),
        ({"seed": -1}, "seed=-1"),
        ({"num_samples": -1}, "num_samples should be 0 or more, but got num_samples=-1"),
        ({"num_samples": 9, "on_exhausted": "stop"}, "num_samples=9 needs on_exhausted=\"repeat\", but got 'stop'"),
        ({"on_exhausted": "end"}, "got on_exhausted='end'"),
        ({"datasets": [range(4), []]}, "dataset 1 is empty, so its weight of 2 cannot be met"),
        ({"datasets": [], "weights": []}, "at least one weight"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    """Bad options are refused; the error has the value."""
    arguments: dict[str, Any] = {"datasets": [range(4), range(5)], "weights": [1, 2], "seed": 0, **options}
    with pytest.raises(ValueError, match=message):
        MixtureSampler(**arguments)
