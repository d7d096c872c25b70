"""Says which sample of which source is at each position of a mixture's epochs. Pure.

Data path: interleave -> [mixture_order] -> mixture.

The weights may change at the beginning of an epoch. Between two changes all epochs are mixed in the same way, so the
samples of each source before an epoch are found without the epochs before it, in the time that the changes take.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, TypeAlias

import numpy as np

from asyncloader.samplers.interleave import Interleave, Offsets
from asyncloader.samplers.permutation import Permutation

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
