"""The order of a mixture whose weights change: every epoch goes on where the epoch before ended."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.samplers.mixture_order import DEVIATION, LARGEST, EpochMixture, Interleave, MixtureOrder, whole_weights

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


def test_an_empty_source_has_no_share() -> None:
    """Unless it is left out, or counts as used up."""
    with pytest.raises(ValueError, match="dataset 1 is empty, so its weight of 2"):
        MixtureOrder([3, 0], [(0, [1, 0]), (4, [1, 2])], "repeat", None)
    assert MixtureOrder([3, 0], [(0, [1, 2])], "drop", None).epoch(1).size == 3


WEIGHTS = st.lists(st.integers(0, 5) | st.integers(0, 2000), min_size=1, max_size=8).filter(any)
FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55]


def sources(mixed: Interleave, first: int, size: int) -> list[int]:
    """The sources of a block's items, as one list."""
    found = np.full(size, -1)
    for source, before, offsets in mixed.block(first, size):
        assert before == mixed.counts(first)[source]
        assert offsets.size
        assert (np.diff(offsets) > 0).all()
        found[offsets] = source
    assert (found >= 0).all()
    return [int(source) for source in found]


def furthest(mixed: Interleave, items: int) -> Fraction:
    """The largest deviation of a source from its share, after any number of items up to `items`."""
    return max(
        abs(count - Fraction(weight * first, mixed.period))
        for first in range(items + 1)
        for count, weight in zip(mixed.counts(first), mixed.weights, strict=True)
    )


@settings(deadline=None)
@given(WEIGHTS)
def test_no_source_is_far_from_its_share(weights: list[int]) -> None:
    """After every item the deviation is at most 1.68 for any weights, 1/2 for two sources, and 1 for three."""
    mixed = Interleave(weights)
    number = len([weight for weight in weights if weight])
    bound = {1: 0, 2: 0.5, 3: 1}.get(number, DEVIATION)
    assert furthest(mixed, 300) <= bound


@pytest.mark.parametrize("weights", [FIBONACCI, [1] * 9, [1000, *[1] * 20], [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]])
def test_whole_periods_of_hard_weights(weights: list[int]) -> None:
    """The bound of 1.68 also holds where the tree is a chain, or one source has nearly all of the weight."""
    mixed = Interleave(weights)
    assert furthest(mixed, mixed.period) <= DEVIATION


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 10**4) | st.integers(0, 10**30), st.integers(0, 200))
def test_blocks_are_what_is_counted(weights: list[int], first: int, size: int) -> None:
    """A block has at each item the source whose count goes up; anywhere, also with numbers beyond 64 bits."""
    mixed = Interleave(weights)
    counts = mixed.counts(first)
    assert sum(counts) == first
    for number, source in enumerate(sources(mixed, first, size), first + 1):
        counts[source] += 1
        assert mixed.counts(number) == counts


@settings(deadline=None)
@given(WEIGHTS, st.data())
def test_the_first_that_reaches_its_amount(weights: list[int], data: st.DataObject) -> None:
    """After the found number of items some source has its amount; one item earlier none had."""
    amounts = [data.draw(st.integers(0, 50)) for _ in weights]
    mixed = Interleave(weights)
    found = mixed.first_reached(amounts)

    def reached(items: int) -> bool:
        pairs = zip(mixed.counts(items), amounts, weights, strict=True)
        return any(count >= amount for count, amount, weight in pairs if weight)

    assert reached(found)
    assert found == 0 or not reached(found - 1)


def test_the_interleaving_is_for_ever() -> None:
    """The order is written down here: a run resumed with a later version must go on with the same mixture."""
    assert sources(Interleave([1, 1]), 0, 6) == [0, 1, 0, 1, 0, 1]
    assert sources(Interleave([7, 2, 1]), 0, 10) == [0, 1, 0, 0, 0, 2, 0, 0, 1, 0]
    assert sources(Interleave([3, 0, 3, 1]), 0, 7) == [0, 2, 0, 2, 3, 2, 0]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([2, 4.0, Fraction(1, 2)], [4, 8, 1]),
        ([np.float64(0.25), np.int64(1)], [1, 4]),
        ([1e-9, 1], [1, 10**9]),
        ([1234567, 7654321], [1234567, 7654321]),
        ([0, 0.0, 3], [0, 0, 1]),
    ],
)
def test_weights_become_integers(weights: list[float], whole: list[int]) -> None:
    """The integers have exactly the proportions that were written."""
    assert whole_weights(weights) == whole


def test_weights_without_a_small_common_denominator_are_rounded() -> None:
    """Weights are rounded to one part in 2**30 of the sum; no weight above 0 becomes 0."""
    weights = [0.123456789012345, 0.98765432109876, 1e-30, 0.0]
    whole = whole_weights(weights)
    assert 0 < sum(whole) <= LARGEST
    for weight, number in zip(weights, whole, strict=True):
        assert abs(number / sum(whole) - weight / sum(weights)) < 2**-29
        assert (number > 0) == (weight > 0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "weight 1 is -0.5"),
        ([float("nan")], "weight 0 is nan"),
        ([1, float("inf")], "weight 1 is inf"),
        ([1, "2"], "weight 1 is '2'"),
        ([0, 0.0], r"at least one weight should be positive, but got weights=\[0, 0.0\]"),
        ([], "at least one weight"),
    ],
)
def test_weights_out_of_range(weights: list[float], message: str) -> None:
    """Bad weights are refused; the error has the index and the value."""
    with pytest.raises(ValueError, match=message):
        whole_weights(weights)
