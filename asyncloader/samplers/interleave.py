"""Interleaves several sources evenly in given proportions, from any position on, without random numbers. Pure.

Data path: [interleave] -> mixture sampler -> scheduler.

The sources are the leaves of a binary tree. The n items that come to a node are shared between its two sides as evenly
as whole items allow: the left side has had ``round(n * left / both)`` of them. This is a line drawn on a grid
(Bresenham, "Algorithm for computer control of a digital plotter", IBM Systems Journal 1965); both sides are within 1/2
of their share after every item, whatever n. So the count of a source in the first n items takes one division for each
node above it, and no earlier item is computed or stored.

Going down, the deviation from the exact share shrinks by the share of each side and grows by at most 1/2. In a Huffman
tree (Huffman, "A method for the construction of minimum-redundancy codes", Proc. IRE 1952), a node outweighs its child
and grandchild on any path together, so the halves on the way to a leaf sum to less than 1/2 (1 + 1 + 1/2 + 1/3 + 1/5 +
...), the reciprocal Fibonacci numbers: below 1.68 for any number of sources and any weights. For two sources it is 1/2,
and for three below 1. After each period, which is the sum of the weights, every source has come exactly `weight` times.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational, Real

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]

DEVIATION = 1.68
"""The largest deviation of a source from its exact share, after any number of items."""

LARGEST = (1 << 31) - 1
"""The largest period: the product of two numbers below it fits in 63 bits."""

_NICE = 10**6
_ROUNDED = 1 << 30


@dataclass(frozen=True)
class _TreeNode:
    """A node, with the weights of its left side and of both sides. A leaf is the number of its source."""

    left: _TreeNode | int
    right: _TreeNode | int
    share: int
    both: int

    def lefts(self, items: int) -> int:
        """Return how many of the first `items` items go to the left."""
        return (items * self.share + self.both // 2) // self.both


class Interleave:
    """The endless sequence of sources in these proportions. It never changes between versions.

    Args:
        weights: of each source: integers, 0 or more. A source of weight 0 never comes.

    Raises:
        ValueError: all weights are 0, or their sum is larger than `LARGEST`.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self.period = sum(weights)
        if not 0 < self.period <= LARGEST:
            raise ValueError(f"weights should sum to between 1 and {LARGEST}, but they sum to {self.period}")
        # The second number makes the tree unique, and keeps nodes from being compared.
        heap: list[tuple[int, int, _TreeNode | int]] = [(w, source, source) for source, w in enumerate(weights) if w]
        heapq.heapify(heap)
        for number in range(len(weights), len(weights) + len(heap) - 1):
            light, _, right = heapq.heappop(heap)
            heavy, _, left = heapq.heappop(heap)
            if light == heavy:
                left, right = right, left  # the earlier source comes first
            heapq.heappush(heap, (light + heavy, number, _TreeNode(left, right, heavy, light + heavy)))
        self._root = heap[0][2]

    def counts(self, items: int) -> list[int]:
        """Return how often each source comes in the first `items` items. O(number of sources)."""
        found = [0] * len(self.weights)
        waiting = [(self._root, items)]
        while waiting:
            node, number = waiting.pop()
            if isinstance(node, int):
                found[node] = number
            else:
                lefts = node.lefts(number)
                waiting += [(node.left, lefts), (node.right, number - lefts)]
        return found

    def block(self, first: int, size: int) -> Iterator[tuple[int, int, Offsets]]:
        """Yield the sources of items `first` to ``first + size``.

        Yields:
            A source, how often it came before `first`, and its offsets in the block, ascending. Only sources that
            occur.
        """
        waiting = [(self._root, first, np.arange(size))]
        while waiting:
            node, before, offsets = waiting.pop()
            if not offsets.size:
                continue
            if isinstance(node, int):
                yield node, before, offsets
                continue
            # The line repeats after `both` items, so its offsets are counted from the last repetition: they are small.
            rest = before % node.both
            line = ((rest + np.arange(len(offsets) + 1)) * node.share + node.both // 2) // node.both
            lefts = (before - rest) // node.both * node.share + int(line[0])
            to_left = np.diff(line).astype(bool)
            waiting += [(node.left, lefts, offsets[to_left]), (node.right, before - lefts, offsets[~to_left])]

    def first_reached(self, amounts: Sequence[int]) -> int:
        """Return the fewest items after which a source has come `amounts` times; a source of weight 0 never has."""
        sources = [(amount, weight) for amount, weight in zip(amounts, self.weights, strict=True) if weight]
        # The counts are within `DEVIATION` of the exact shares, which bounds the search.
        margin = math.ceil(DEVIATION)
        low = max(0, min((amount - margin) * self.period // weight for amount, weight in sources))
        high = min((amount + margin) * self.period // weight + 1 for amount, weight in sources)

        def reached(items: int) -> bool:
            pairs = zip(self.counts(items), amounts, self.weights, strict=True)
            return any(count >= amount for count, amount, weight in pairs if weight)

        return low + bisect_left(range(low, high), True, key=reached)


def whole_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """Return integers in the proportions of these weights, with no common factor.

    Integers and Fractions are exact. A float counts as the fraction with a denominator of up to a million to which it
    is the nearest float, if such a fraction exists (1/3 is a third), and otherwise as its decimal text. If the integers
    sum to more than `LARGEST`, each share is rounded to a multiple of 2**-30, and to no less than one.

    Raises:
        ValueError: `weights` is empty, a weight is negative, infinite or no number, or all are 0.
    """
    exact = [_fraction(source, weight) for source, weight in enumerate(weights)]
    total = sum(exact)
    if not total:
        raise ValueError(f"at least one weight should be positive, but got weights={list(weights)}")
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor > LARGEST:
        whole = [max(1, round(weight / total * _ROUNDED)) if weight else 0 for weight in exact]
        divisor = math.gcd(*whole)
    return [number // divisor for number in whole]


def _fraction(source: int, weight: Real | float) -> Fraction:
    if not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
        raise ValueError(f"a weight should be a number, 0 or more, but weight {source} is {weight!r}")
    if isinstance(weight, Integral):
        return Fraction(int(weight))
    if isinstance(weight, Rational):
        return Fraction(weight)
    number = float(weight)
    nice = Fraction(number).limit_denominator(_NICE)
    return nice if float(nice) == number else Fraction(repr(number))
