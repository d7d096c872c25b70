"""Chooses, of a test's many combinations of parameters, a few in which every value, or every pair of values, occurs.

Most faults need one value or two together. ``pytest`` runs each value, ``pytest --all`` each pair, and
``pytest --combinations`` every combination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Row = tuple[Hashable, ...]


def covering(rows: Sequence[Row], together: int = 2) -> list[int]:
    """The numbers of rows that together have every so many values that any row has, in as many of its columns.

    Greedy, hence not the fewest possible: of pairs about the product of the two largest columns. The same rows always
    give the same choice, and every value of a single column is in it.
    """
    if {len(row) for row in rows} <= {0, 1}:
        return list(range(len(rows)))
    pairs = [set(combinations(enumerate(row), min(together, len(row)))) for row in rows]
    missing: set[tuple[tuple[int, Hashable], ...]] = set().union(*pairs)
    chosen: list[int] = []
    used: Counter[tuple[int, Hashable]] = Counter()
    while missing:
        # Of equally good rows the one whose values were chosen least: the third column is spread, too.
        best = max(
            range(len(rows)),
            key=lambda number: (len(pairs[number] & missing), -sum(used[each] for each in enumerate(rows[number]))),
        )
        chosen.append(best)
        missing -= pairs[best]
        used.update(enumerate(rows[best]))
    return sorted(chosen)


def quickly(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values of a parameter, or tuples of several ones', with all that are not `quick` marked `thorough`."""
    values = list(values)
    assert set(quick) <= set(values)
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [() if value in quick else pytest.mark.thorough for value in values]
    return [pytest.param(*each, marks=mark) for each, mark in zip(tuples, marks, strict=True)]
