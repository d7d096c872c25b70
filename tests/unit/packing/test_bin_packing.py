"""The packing strategies: every token once, no row too long, and rows as full as the strategy says."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.packing.bin_packing import STRATEGIES, Slices, Strategy, pack

LENGTHS = st.lists(st.integers(1, 60), max_size=80)
ANY = pytest.mark.parametrize("strategy", STRATEGIES)


def slices_of(lengths: list[int]) -> Slices:
    return np.array([(index, 0, length) for index, length in enumerate(lengths)], np.int64).reshape(-1, 3)


def packed(lengths: list[int], max_tokens: int, strategy: Strategy) -> tuple[list[list[Any]], list[Any]]:
    rows, left = pack(slices_of(lengths), max_tokens, strategy)
    return [row.tolist() for row in rows], left.tolist()


def size(row: list[Any]) -> int:
    return sum(stop - start for _, start, stop in row)


@ANY
@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 70))
def test_every_token_once(strategy: Strategy, lengths: list[int], max_tokens: int) -> None:
    """Rows and rest have each token of each sequence once; no row is empty or too long, and the rest is not a row."""
    rows, left = packed(lengths, max_tokens, strategy)
    assert all(0 < size(row) <= max_tokens for row in rows)
    assert size(left) < max_tokens
    assert all(size(row) >= size(left) for row in rows)
    found: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(lengths))}
    for index, start, stop in sum(rows, left):
        assert start < stop
        found[index].append((start, stop))
    for index, parts in found.items():
        assert [0, *(stop for _, stop in sorted(parts))] == [*(start for start, _ in sorted(parts)), lengths[index]]


@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 70))
def test_where_sequences_are_cut(lengths: list[int], max_tokens: int) -> None:
    """`wrap` is concatenation, cut at multiples of the row; `best_fit` cuts only what is too long."""
    total = sum(lengths)
    rows, left = packed(lengths, max_tokens, "wrap")
    assert [(index, at) for index, start, stop in [*chain.from_iterable(rows), *left] for at in range(start, stop)] == [
        (index, at) for index, length in enumerate(lengths) for at in range(length)
    ]
    assert [size(row) for row in rows] == [max_tokens] * (total // max_tokens)
    whole = sum(-(-length // max_tokens) for length in lengths)
    rows, left = packed(lengths, max_tokens, "best_fit")
    assert len(sum(rows, left)) == whole


def plainly(lengths: list[int], max_tokens: int) -> list[int]:
    """The row of each length, by the definition."""
    filled: list[int] = []
    row_of = []
    for length in lengths:
        fitting = [row for row, tokens in enumerate(filled) if tokens + length <= max_tokens]
        if not fitting:
            filled.append(0)
            fitting = [len(filled) - 1]
        row = max(fitting, key=lambda row: (filled[row], -row))
        filled[row] += length
        row_of.append(row)
    return row_of


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80))
def test_the_textbook_algorithm(lengths: list[int]) -> None:
    """The rows are those of best fit by decreasing length, in the order in which they were begun."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    expected: dict[int, list[int]] = {}
    for index, row in zip(order, plainly([lengths[index] for index in order], 30), strict=True):
        expected.setdefault(row, []).append(index)
    rows, left = packed(lengths, 30, "best_fit")
    found = [[index for index, _, _ in row] for row in [*rows, left] if row]
    assert sorted(found) == sorted(expected.values())
    assert found[: len(rows)] == [row for row in expected.values() if row in found[: len(rows)]]


def test_examples() -> None:
    """Small cases that can be checked by eye: sequences of 5, 3, 4, 2 and 6 tokens in rows of 7."""
    lengths = [5, 3, 4, 2, 6]
    assert packed(lengths, 7, "best_fit") == ([[[0, 0, 5], [3, 0, 2]], [[2, 0, 4], [1, 0, 3]]], [[4, 0, 6]])
    assert packed(lengths, 7, "wrap") == (
        [[[0, 0, 5], [1, 0, 2]], [[1, 2, 3], [2, 0, 4], [3, 0, 2]]],
        [[4, 0, 6]],
    )
    assert packed([4, 4], 7, "best_fit") == ([[[0, 0, 4]]], [[1, 0, 4]])
    assert packed([20], 7, "best_fit") == ([[[0, 0, 7]], [[0, 7, 14]]], [[0, 14, 20]])
