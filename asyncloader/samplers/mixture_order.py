"""Says which sample of which source is at each position of a mixture's epochs, without random numbers. Pure.

Data path: [mixture_order] -> mixture -> scheduler.

*Interleaving.* The sources are the leaves of a binary tree. The n items that come to a node are shared between its two
sides as evenly as whole items allow: the left side has had ``round(n * left / both)`` of them. This is a line drawn on
a grid (Bresenham, "Algorithm for computer control of a digital plotter", IBM Systems Journal 1965); both sides are
within 1/2 of their share after every item, whatever n. So the count of a source in the first n items takes one division
for each node above it, and no earlier item is computed or stored.

Going down, the deviation from the exact share shrinks by the share of each side and grows by at most 1/2. In a Huffman
tree (Huffman, "A method for the construction of minimum-redundancy codes", Proc. IRE 1952), a node outweighs its child
and grandchild on any path together, so the halves on the way to a leaf sum to less than 1/2 (1 + 1 + 1/2 + 1/3 + 1/5 +
...), the reciprocal Fibonacci numbers: below 1.68 for any number of sources and any weights. For two sources it is 1/2,
and for three below 1. After each period, which is the sum of the weights, every source has come exactly `weight` times.

*Epochs.* The weights may change at the beginning of an epoch. Between two changes all epochs are mixed in the same way,
so the samples of each source before an epoch are found without the epochs before it, in the time that the changes take.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational, Real
from operator import index
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncloader.samplers.permutation import Permutation

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


OnExhausted: TypeAlias = Literal["repeat", "stop", "drop"]
CHOICES = ("repeat", "stop", "drop")

BLOCK = 4096
"""Positions computed at a time."""


def check_mixture(on_exhausted: str, num_samples: int | None) -> int | None:
    """Check arguments of a mixture, and return its number of samples.

    Raises:
        ValueError: one is out of range, or they do not go together.
        TypeError: `num_samples` is no integer.
    """
    if on_exhausted not in CHOICES:
        raise ValueError(f"on_exhausted should be one of {CHOICES}, but got on_exhausted={on_exhausted!r}")
    if num_samples is None:
        return None
    if on_exhausted != "repeat":
        raise ValueError(f'num_samples={num_samples} needs on_exhausted="repeat", but got {on_exhausted!r}')
    if num_samples < 0:
        raise ValueError(f"num_samples should be 0 or more, but got num_samples={num_samples}")
    return index(num_samples)


@dataclass(frozen=True)
class _Phase:
    """A part of the epoch in which the same sources are mixed."""

    start: int
    interleave: Interleave
    used: list[int]
    """Samples of each source in the epoch before this part."""


@dataclass(frozen=True)
class EpochMixture:
    """One epoch of a mixture.

    Attributes:
        size: samples in the epoch.
        each: samples of each source in it; not for ``"repeat"``.
    """

    size: int
    each: list[int]
    _phases: list[_Phase]
    _begun: int
    """Where in its interleaving the first phase begins."""
    _before: list[int]
    """Samples of each source before the epoch; for ``"repeat"``, before its interleaving began."""

    def block(self, position: int) -> tuple[int, Iterator[tuple[int, int, Offsets]]]:
        """Return the number of positions, `BLOCK` at most, that follow `position` and are mixed alike, 0 at the end;
        and their sources, each with the number of its samples that came before, in all epochs and passes, and with the
        offsets of its samples among the positions, ascending.
        """
        if position >= self.size:
            return 0, iter(())
        starts = [*(phase.start for phase in self._phases), self.size]
        number = bisect_right(starts, position) - 1
        phase = self._phases[number]
        size = min(BLOCK, starts[number + 1] - position)
        return size, (
            (source, self._before[source] + phase.used[source] + came, offsets)
            for source, came, offsets in phase.interleave.block(self._begun + position - phase.start, size)
        )


@dataclass(frozen=True)
class _Stretch:
    """Epochs with the same weights, from number `first` on."""

    first: int
    weights: Sequence[int]
    before: list[int]
    size: int
    each: list[int]
    phases: list[_Phase]


class MixtureOrder:
    """All epochs of a mixture.

    Args:
        sizes: samples of each source.
        weights: of each source, whole numbers; with the epoch from which they hold, in ascending order from epoch 0 on.
        on_exhausted: see `MixtureSampler`.
        num_samples: samples of an epoch of ``"repeat"``; None: those of the sources that have a weight.
        seed: of the order of each source; None: none is shuffled.

    Raises:
        ValueError: a source that has a weight is empty, unless `on_exhausted` is ``"drop"``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[tuple[int, Sequence[int]]],
        on_exhausted: OnExhausted,
        num_samples: int | None,
        seed: int | None = None,
    ) -> None:
        self.sizes = sizes
        self._keys = None if seed is None else [_key(seed, source) for source in range(len(sizes))]
        self._repeats = on_exhausted == "repeat"
        self._stretches: list[_Stretch] = []
        for first, present in weights:
            if on_exhausted != "drop" and (empty := [at for at, w in enumerate(present) if w and not sizes[at]]):
                raise ValueError(
                    f"dataset {empty[0]} is empty, so its weight of {present[empty[0]]} cannot be met. "
                    'Give it the weight 0, or on_exhausted="drop".'
                )
            before = self._used(first) if self._stretches else [0] * len(sizes)
            if self._repeats:
                given = sum(size for size, weight in zip(sizes, present, strict=True) if weight)
                size, each = given if num_samples is None else num_samples, [0] * len(sizes)
                phases = [_Phase(0, Interleave(present), each)]
            else:
                phases, each = _phases(sizes, present, stop=on_exhausted == "stop")
                size = sum(each)
            self._stretches.append(_Stretch(first, present, before, size, each, phases))

    def epoch(self, number: int) -> EpochMixture:
        """Return the epoch of this number. O(number of sources)."""
        stretch = self._stretch(number)
        # With "repeat", the interleaving of all epochs with the same weights is a single sequence.
        begun = (number - stretch.first) * stretch.size if self._repeats else 0
        before = stretch.before if self._repeats else self._used(number)
        return EpochMixture(stretch.size, stretch.each, stretch.phases, begun, before)

    def take(self, source: int, first: int, number: int) -> Offsets:
        """Return the places of `number` samples of a source, after its first `first` samples: pass after pass over it,
        each shuffled again.
        """
        size, keys = self.sizes[source], self._keys
        return np.concatenate(
            [
                part if keys is None or size == 1 else Permutation(size, keys[source], passes % 2**64)(part)
                for passes, part in passes_of(size, first, number)
            ]
        )

    def _stretch(self, epoch: int) -> _Stretch:
        return self._stretches[bisect_right(self._stretches, epoch, key=lambda stretch: stretch.first) - 1]

    def _used(self, epoch: int) -> list[int]:
        """Return the samples of each source in the epochs before this."""
        stretch = self._stretch(epoch)
        epochs = epoch - stretch.first
        if self._repeats:
            used = stretch.phases[0].interleave.counts(epochs * stretch.size)
        else:
            used = [epochs * each for each in stretch.each]
        return [before + more for before, more in zip(stretch.before, used, strict=True)]


def _key(seed: int, source: int) -> int:
    key = seed.to_bytes(8, "little") + source.to_bytes(8, "little")
    return int.from_bytes(hashlib.shake_256(b"asyncloader mixture" + key).digest(8), "little")


def _phases(sizes: Sequence[int], weights: Sequence[int], *, stop: bool) -> tuple[list[_Phase], list[int]]:
    """Return the parts of an epoch, and the samples of each source in it. The epoch ends when all sources are used up;
    with `stop`, when the first is.
    """
    phases: list[_Phase] = []
    used = [0] * len(sizes)
    while True:
        left = [size - gone for size, gone in zip(sizes, used, strict=True)]
        present = [weight if rest else 0 for weight, rest in zip(weights, left, strict=True)]
        if not any(present) or (stop and phases):
            return phases, used
        interleave = Interleave(present)
        phases.append(_Phase(sum(used), interleave, used))
        counts = interleave.counts(interleave.first_reached(left))
        used = [gone + count for gone, count in zip(used, counts, strict=True)]


def passes_of(size: int, first: int, number: int) -> Iterator[tuple[int, Offsets]]:
    """Yield the passes over a source of this size that `number` samples after its first `first` are of, and their
    places in each pass.
    """
    while number:
        passes, offset = divmod(first, size)
        part = np.arange(offset, min(size, offset + number))
        yield passes, part
        first += len(part)
        number -= len(part)
