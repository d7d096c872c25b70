"""Chooses, of a test's many combinations of parameters, a few in which every pair of values occurs.

Most faults need one value or two together. ``pytest --all`` runs every combination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations

__all__ = ["covering"]

Row = tuple[Hashable, ...]


def covering(rows: Sequence[Row]) -> list[int]:
    """The numbers of rows that together have every pair of values that any row has, in two of its columns.

    Greedy, hence not the fewest possible: about the product of the two largest columns. The same rows always give the
    same choice, and every value of a single column is in it.
    """
    if {len(row) for row in rows} <= {0, 1}:
        return list(range(len(rows)))
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
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
