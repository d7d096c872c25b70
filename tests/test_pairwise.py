"""Of a test's combinations of parameters `make test-all` leaves out no pair of values, and `make test` no value."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import Row, covering


def tuples(rows: list[Row], together: int) -> set[tuple[tuple[int, object], ...]]:
    return {values for row in rows for values in combinations(enumerate(row), together)}


def without(values: set[tuple[tuple[int, object], ...]], alone: int) -> set[tuple[tuple[int, object], ...]]:
    return {each for each in values if alone not in [value for _, value in each]}


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.booleans(), st.integers(0, 4), st.data())
def test_every_pair_or_value_is_kept(sizes: list[int], in_pairs: bool, alone: int, data: st.DataObject) -> None:
    """This holds for whole products, and for products from which tests have removed senseless combinations."""
    rows: list[Row] = [tuple(row) for row in product(*map(range, sizes))]
    rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
    chosen = [rows[number] for number in covering(rows, in_pairs=in_pairs, alone={alone})]
    assert tuples(chosen, 1) == tuples(rows, 1)
    if in_pairs:
        assert without(tuples(chosen, 2), alone) == without(tuples(rows, 2), alone)
    assert chosen == [rows[number] for number in covering(rows, in_pairs=in_pairs, alone={alone})]


def test_how_few_are_left() -> None:
    """Of 72 combinations (three numbers of workers, four kinds, three modes, two loops), at most 1.5 times 12 are
    left.
    """
    rows: list[Row] = list(product(range(3), range(4), range(3), range(2)))
    assert 12 <= len(covering(rows)) <= 18
    assert len(covering(rows, in_pairs=False)) == 4
    assert len(covering(list(product(["fork", "spawn"], range(9))), alone={"spawn"})) == 10


def test_a_single_parameter_keeps_all_its_values() -> None:
    """It cannot be combined, and each value is a case of its own."""
    for in_pairs in (False, True):
        assert covering([(1,), (2,), (3,)], in_pairs=in_pairs, alone={2}) == [0, 1, 2]
        assert covering([()], in_pairs=in_pairs) == [0]
