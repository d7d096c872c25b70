"""The division of a global batch by cost: a partition into equal counts, near the best, and equal in all versions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import Balance
from asyncloader.samplers.balance import deal


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int]:
    """Costs of a global batch, and a number of ranks that divides it."""
    ranks, each = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    costs = st.sampled_from([st.integers(0, 3), st.integers(0, 500), st.integers(0, 1 << 50)])
    return draw(st.lists(draw(costs), min_size=ranks * each, max_size=ranks * each)), ranks


@given(cases())
def test_each_sample_goes_to_one_rank(case: tuple[list[int], int]) -> None:
    """Every rank gets the same number of samples, in the order of the global batch; together they are the batch."""
    costs, ranks = case
    dealt = deal(np.array(costs), ranks).tolist()
    assert [len(offsets) for offsets in dealt] == [len(costs) // ranks] * ranks
    assert sorted(itertools.chain.from_iterable(dealt)) == list(range(len(costs)))
    assert dealt == sorted(map(sorted, dealt))


def best(costs: Sequence[int], ranks: int) -> int:
    """The smallest possible largest sum, found by trying every division."""

    def rest(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        first, *others = left
        return min(
            max(
                costs[first] + sum(costs[each] for each in chosen),
                rest(tuple(each for each in others if each not in chosen)),
            )
            for chosen in itertools.combinations(others, len(costs) // ranks - 1)
        )

    return rest(tuple(range(len(costs))))


@settings(deadline=None)
@given(
    st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]).flatmap(
        lambda sizes: st.tuples(
            st.lists(st.integers(1, 10_000), min_size=sizes[0] * sizes[1], max_size=sizes[0] * sizes[1]),
            st.just(sizes[0]),
        )
    )
)
def test_the_division_is_near_the_best(case: tuple[list[int], int]) -> None:
    """No division of a small batch is better by more than a sixth; on average the difference is 0.2 %."""
    costs, ranks = case
    largest = max(sum(costs[each] for each in offsets) for offsets in deal(np.array(costs), ranks).tolist())
    assert largest <= best(costs, ranks) * 7 / 6


def test_divisions_are_for_ever() -> None:
    """They are written down here: ranks with another version of the library must get the same."""
    costs = np.array([9, 1, 400, 16, 25, 25, 100, 4, 81, 36, 49, 64])
    assert deal(costs, 2).tolist() == [[0, 1, 2, 3, 5, 7], [4, 6, 8, 9, 10, 11]]
    assert deal(costs, 3).tolist() == [[0, 1, 2, 7], [3, 4, 8, 11], [5, 6, 9, 10]]
    assert deal(np.zeros(6, np.int64), 3).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_cost_is_the_squared_length_or_as_given() -> None:
    """Squares do not overflow the type of the lengths."""
    balance = Balance(np.array([300, 2, 70_000], np.uint32))
    assert balance.costs([2, 0]).tolist() == [4_900_000_000, 90_000]
    assert Balance([5, 7], lambda lengths: lengths + 100).costs([1, 1, 0]).tolist() == [107, 107, 105]


@pytest.mark.parametrize(
    ("arguments", "indices", "error", "text"),
    [
        (([[1]],), [0], ValueError, "one axis"),
        (([0.5],), [0], TypeError, "integers, but got float64"),
        (([1], 3), [0], TypeError, "cost should be a function"),
        (([1, 2],), [0, 2], IndexError, "has 2 lengths, but the sampler gave index 2"),
        (([1, 2],), ["a"], TypeError, "indices are integers, but got 'a'"),
        (([-1, 2],), [0], ValueError, "one is -1"),
        (([1 << 31],), [0], ValueError, "give balance= a cost function"),
        (([1, 2], lambda lengths: lengths / 2), [0], TypeError, "cost should return integers"),
        (([1, 2], lambda lengths: lengths[:1]), [0, 1], ValueError, "one cost a length"),
        (([1, 2], lambda lengths: -lengths), [0, 1], ValueError, "costs should be between 0 and"),
        (([1, 2], lambda lengths: lengths << 61), [0, 1], ValueError, "costs should be between 0 and"),
        (
            ([1, 2], lambda lengths: lengths.astype(np.uint64) << 63),
            [0],
            ValueError,
            "but they are 9223372036854775808 to",
        ),
    ],
)
def test_wrong_costs_are_refused(arguments: Any, indices: Any, error: type[Exception], text: str) -> None:
    """The error has the value, and says what to do."""
    with pytest.raises(error, match=text):
        Balance(*arguments).costs(indices)
