"""The keyed permutation: a bijection for every size, equal in all versions, and as random as `torch.randperm`."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from asyncloader.samplers.permutation import LARGEST, Permutation
from tests.pairwise import quickly


def assert_bijection(n: int, seed: int, epoch: int = 0) -> None:
    positions = np.arange(n)
    permutation = Permutation(n, seed, epoch)
    elements = permutation(positions)
    seen = np.zeros(n, bool)
    seen[elements] = True
    assert elements.dtype == np.int64
    assert seen.all()


@pytest.mark.thorough
@pytest.mark.parametrize("step", quickly([1, 13], 13))
def test_every_small_size(step: int) -> None:
    """Each element occurs once, for every size up to 4,096."""
    for n in range(0, 4097, step):
        assert_bijection(n, seed=n * 7919, epoch=n % 3)


def near_powers(first: int, last: int) -> list[int]:
    return [2**power + delta for power in range(first, last + 1) for delta in range(-2, 3)]


@pytest.mark.thorough
@pytest.mark.parametrize("n", near_powers(12, 20))
def test_sizes_near_powers_of_two(n: int) -> None:
    """At these sizes the rectangle changes its shape, and the number of rounds changes."""
    assert_bijection(n, seed=n)


@pytest.mark.parametrize("n", [*(2**power + delta for power in range(25, 41, 3) for delta in (-1, 0, 1)), LARGEST])
def test_huge_sizes_by_sampling(n: int) -> None:
    """At a thousand positions are different elements."""
    permutation = Permutation(n, seed=n)
    positions = np.unique(np.random.default_rng(n).integers(0, n, 1000))
    elements = permutation(positions)
    assert ((elements >= 0) & (elements < n)).all()
    assert len(np.unique(elements)) == len(positions)


def test_the_order_is_for_ever() -> None:
    """The order is written down here: a run resumed with a later version must go on in the same order."""
    assert Permutation(10, seed=0)(np.arange(10)).tolist() == [4, 7, 8, 6, 3, 0, 5, 2, 1, 9]
    assert Permutation(10, seed=0, epoch=1)(np.arange(10)).tolist() == [5, 0, 9, 2, 7, 1, 4, 6, 3, 8]
    huge = Permutation(10**9, seed=2**64 - 1, epoch=5)
    assert huge(np.arange(4)).tolist() == [525251852, 759860956, 270219860, 82090823]


def test_any_place_is_found_by_itself() -> None:
    """A block, a single position and a shape of two axes give the whole order's elements at these positions."""
    permutation = Permutation(5000, seed=3, epoch=2)
    whole = permutation(np.arange(5000))
    assert np.array_equal(permutation(np.arange(1234, 1300)), whole[1234:1300])
    assert int(permutation(4999)) == whole[4999]
    assert np.array_equal(permutation([[0, 7], [9, 9]]), whole[[[0, 7], [9, 9]]])
    assert permutation(np.array([], np.int64)).shape == (0,)


def test_no_memory_for_a_thousand_million() -> None:
    """The first block of 10**9 elements takes less than 1 MB."""
    tracemalloc.start()
    try:
        Permutation(10**9, seed=1)(np.arange(4096))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("n", "seed", "epoch"), [(-1, 0, 0), (LARGEST + 1, 0, 0), (1, -1, 0), (1, 2**64, 0), (1, 0, -1), (1, 0, 2**64)]
)
def test_arguments_out_of_range(n: int, seed: int, epoch: int) -> None:
    """Bad arguments are refused; the error has the value."""
    value = next(each for each in (n, seed, epoch) if not 0 <= each < 2**62 + 1 or each == 2**64)
    with pytest.raises(ValueError, match=str(value)):
        Permutation(n, seed, epoch)


@pytest.mark.parametrize("positions", [10, -1, [3, 10], [[-5]]])
def test_positions_out_of_range(positions: npt.ArrayLike) -> None:
    """Positions beyond either end are refused."""
    with pytest.raises(IndexError, match="out of range for a permutation of 10"):
        Permutation(10, 1)(positions)


# --------------------------------------------------------------------------------------------- as random as torch's
# Each figure is a mean over KEYS orders; the bounds are five standard errors around the value that theory gives.
KEYS, SIZE = 400, 1000


@pytest.fixture(scope="module")
def orders() -> dict[str, list[npt.NDArray[np.int64]]]:
    """Orders by neighbouring seeds, and by neighbouring epochs."""
    positions = np.arange(SIZE)
    return {
        "seeds": [Permutation(SIZE, seed)(positions) for seed in range(KEYS)],
        "epochs": [Permutation(SIZE, 7, epoch)(positions) for epoch in range(KEYS)],
    }


SOURCES = pytest.mark.parametrize("source", ["seeds", "epochs"])


@pytest.mark.thorough
@SOURCES
def test_position_tells_nothing(source: str, orders: dict[str, list[npt.NDArray[np.int64]]]) -> None:
    """Position and element are uncorrelated: the correlations have mean 0 and variance 1/(n-1)."""
    found = np.array([np.corrcoef(np.arange(SIZE), order)[0, 1] for order in orders[source]])
    assert abs(found.mean()) < 5 / math.sqrt(KEYS * (SIZE - 1))
    assert abs(found.var() * (SIZE - 1) - 1) < 5 * math.sqrt(2 / KEYS)


@SOURCES
def test_neighbours_tell_nothing(source: str, orders: dict[str, list[npt.NDArray[np.int64]]]) -> None:
    """An element is followed by its successor (n-1)/n times per order, and is next to it twice as often."""
    steps = [np.diff(order) for order in orders[source]]
    assert abs(np.mean([(step == 1).sum() for step in steps]) - 1) < 5 / math.sqrt(KEYS)
    assert abs(np.mean([(abs(step) == 1).sum() for step in steps]) - 2) < 5 * math.sqrt(2 / KEYS)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_elements_are_equally_frequent(n: int) -> None:
    """Chi-squared over the n! orders, of 6,000 keys."""
    positions = np.arange(n)
    found = Counter(tuple(Permutation(n, seed)(positions).tolist()) for seed in range(6000))
    kinds = math.factorial(n)
    expected = 6000 / kinds
    squared = sum((count - expected) ** 2 for count in found.values()) / expected + (kinds - len(found)) * expected
    assert squared < kinds - 1 + 5 * math.sqrt(2 * (kinds - 1))
