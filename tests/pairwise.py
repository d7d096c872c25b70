"""Chooses, from a test's many combinations of parameters, a few in which every value, or every pair of values, occurs.

Most faults need one value or two together. ``pytest`` runs each value, ``pytest --all`` each pair, and ``pytest
--combinations`` every combination. tests/conftest.py has the values of which ``--all`` keeps no pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Row = tuple[Hashable, ...]


def covering(rows: Sequence[Row], *, in_pairs: bool = True, alone: Collection[Hashable] = ()) -> list[int]:
    """Return the numbers of rows that together have every value of each column, and every pair of values that any row
    has.

    The choice is greedy, hence not the fewest possible rows: for pairs about the product of the two largest columns.
    The same rows always give the same choice, and every value of a single column is in it.

    Args:
        rows: the values, one per column.
        in_pairs: whether pairs are kept, or values only.
        alone: values of which no pairs are kept.
    """
    if {len(row) for row in rows} <= {0, 1}:
        return list(range(len(rows)))
    wanted: list[set[tuple[tuple[int, Hashable], ...]]] = [{(each,) for each in enumerate(row)} for row in rows]
    if in_pairs:
        for row, found in zip(rows, wanted, strict=True):
            found.update(combinations([each for each in enumerate(row) if each[1] not in alone], 2))
    missing = set().union(*wanted)
    chosen: list[int] = []
    used: Counter[tuple[int, Hashable]] = Counter()
    while missing:
        # Of equally good rows take the row whose values were chosen least: this spreads the third column, too.
        best = max(
            range(len(rows)),
            key=lambda number: (len(wanted[number] & missing), -sum(used[each] for each in enumerate(rows[number]))),
        )
        chosen.append(best)
        missing -= wanted[best]
        used.update(enumerate(rows[best]))
    return sorted(chosen)


def quickly(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return a parameter's values, or tuples of several parameters', of which all that are not `quick` are marked
    `thorough`.
    """
    values = list(values)
    assert set(quick) <= set(values)
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [() if value in quick else pytest.mark.thorough for value in values]
    return [pytest.param(*each, marks=mark) for each, mark in zip(tuples, marks, strict=True)]
