"""Of a test's combinations of parameters `make test-all` leaves out no pair of values, and `make test` no value."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import Row, covering


def tuples(rows: list[Row], together: int) -> set[tuple[tuple[int, object], ...]]:
    return {values for row in rows for values in combinations(enumerate(row), together)}


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 2), st.data())
def test_every_pair_or_value_is_kept(sizes: list[int], together: int, data: st.DataObject) -> None:
    """Of whole products, and of products from which tests have taken combinations that make no sense."""
    rows: list[Row] = [tuple(row) for row in product(*map(range, sizes))]
    rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
    chosen = [rows[number] for number in covering(rows, together)]
    assert tuples(chosen, together) == tuples(rows, together)
    assert chosen == [rows[number] for number in covering(rows, together)]


def test_how_few_are_left() -> None:
    """Of three workers' numbers, four kinds, three modes and two loops, 72 in all: no more than 1.5 times the 12."""
    rows: list[Row] = list(product(range(3), range(4), range(3), range(2)))
    assert 12 <= len(covering(rows)) <= 18
    assert len(covering(rows, 1)) == 4


def test_a_single_parameter_keeps_all_its_values() -> None:
    """There is nothing to combine, and each value is a case of its own."""
    for together in (1, 2):
        assert covering([(1,), (2,), (3,)], together) == [0, 1, 2]
        assert covering([()], together) == [0]
