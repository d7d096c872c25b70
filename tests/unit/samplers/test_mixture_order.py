"""The order of a mixture whose weights change: every epoch goes on where the epoch before ended."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.samplers.interleave import DEVIATION
from asyncloader.samplers.mixture_order import EpochMixture, MixtureOrder

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, list[int]]], Any, int | None]:
    """The arguments of an order."""
    sizes = draw(SIZES)
    weights = st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)).filter(any)
    epochs = sorted({0, *draw(st.sets(st.integers(1, 6), max_size=2))})
    how = draw(st.sampled_from(["repeat", "stop", "drop"]))
    number = draw(st.none() | st.integers(0, 60)) if how == "repeat" else None
    return sizes, [(epoch, draw(weights)) for epoch in epochs], how, number


def samples_of(mixed: EpochMixture) -> list[tuple[int, int]]:
    """The source of each sample of an epoch, and how many of its samples came before."""
    found: list[Any] = []
    while True:
        size, parts = mixed.block(len(found))
        if not size:
            return found
        block: list[Any] = [None] * size
        for source, first, offsets in parts:
            for number, offset in enumerate(offsets.tolist()):
                block[offset] = source, first + number
        found += block


@given(orders())
def test_every_epoch_goes_on_where_the_last_ended(arguments: Any) -> None:
    """Each source's samples are counted on over all epochs, and each stretch of epochs keeps its proportions."""
    order, (sizes, weights, how, _) = MixtureOrder(*arguments), arguments
    used = [0] * len(sizes)
    since, begun, present = 0, used, weights[0][1]
    for epoch in range(9):
        if epoch in dict(weights):
            since, begun, present = 0, [*used], dict(weights)[epoch]
        mixed = order.epoch(epoch)
        samples = samples_of(mixed)
        assert len(samples) == mixed.size
        before = [*used]
        for source, number in samples:
            assert number == used[source]
            used[source] += 1
            since += 1
            if how == "repeat":
                share = Fraction(present[source], sum(present))
                assert abs(used[source] - begun[source] - since * share) <= DEVIATION
        each = [now - then for now, then in zip(used, before, strict=True)]
        if how == "drop":
            assert each == [size if weight else 0 for size, weight in zip(sizes, present, strict=True)]
        elif how == "stop":
            full = [count == size for count, size in zip(each, sizes, strict=True)]
            assert sum(full) == 1 or not mixed.size
            assert all(count <= size for count, size in zip(each, sizes, strict=True))


@given(orders(), st.integers(0, 8), st.integers(0, 120))
def test_any_position_is_found_at_once(arguments: Any, epoch: int, position: int) -> None:
    """A block that begins at any position has the samples that the whole epoch has there."""
    mixed = MixtureOrder(*arguments).epoch(epoch)
    samples = samples_of(mixed)
    size, parts = mixed.block(position)
    assert size == 0 or position < mixed.size
    for source, first, offsets in parts:
        assert [samples[position + offset] for offset in offsets.tolist()] == [
            (source, first + number) for number in range(len(offsets))
        ]


def test_passes_are_shuffled_anew() -> None:
    """Each pass has every sample once; a source that is not shuffled keeps its order."""
    taken = MixtureOrder([10] * 4, [(0, [1] * 4)], "repeat", None, seed=7).take(3, 5, 30).tolist()
    passes = [taken[5:15], taken[15:25]]
    assert [sorted(each) for each in passes] == [list(range(10))] * 2
    assert passes[0] != passes[1]
    assert np.array_equal(MixtureOrder([10] * 4, [(0, [1] * 4)], "repeat", None).take(3, 8, 5), [8, 9, 0, 1, 2])


def test_an_empty_source_has_no_share() -> None:
    """Unless it is left out, or counts as used up."""
    with pytest.raises(ValueError, match="dataset 1 is empty, so its weight of 2"):
        MixtureOrder([3, 0], [(0, [1, 0]), (4, [1, 2])], "repeat", None)
    assert MixtureOrder([3, 0], [(0, [1, 2])], "drop", None).epoch(1).size == 3
