"""Mixes several datasets in given proportions, by a sampler.

Data path: [mixture] -> scheduler -> pool -> worker. It yields indices of torch's ConcatDataset of the datasets.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from operator import index
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Sampler

from asyncloader.samplers.interleave import Interleave, whole_weights
from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.surviving import Blocks

_BLOCK = 4096
"""Indices computed at a time."""

_CHOICES = ("repeat", "stop", "drop")


@dataclass(frozen=True)
class _Phase:
    """A part of the epoch in which the same sources are mixed."""

    start: int
    interleave: Interleave
    used: list[int]
    """Samples of each source in the epoch before this part."""


class MixtureSampler(Sampler[int]):
    """Indices of several datasets, mixed in exact proportions: interleaved evenly, and not drawn.

    After any number of samples, each dataset is within 1.68 samples of its exact share, and with two datasets within
    1/2; random draws deviate by the square root of the number. (`asyncloader/samplers/interleave.py` has the proof.)
    Each dataset is shuffled separately, and again for each pass over it, so its samples come once in each pass. The
    order is a function of the arguments and the epoch alone, and any position is found in O(number of datasets),
    without the positions before it.

    Args:
        datasets: torch's ConcatDataset, which the loader reads; or its datasets, in its order. Only their lengths are
            used, once.
        weights: of each dataset, in any unit. 0 leaves a dataset out. `proportions` has the resulting shares: they are
            exact unless their common denominator is above 2**31 (`whole_weights` in
            `asyncloader/samplers/interleave.py`).
        seed: 0 to 2**64 - 1.
        num_samples: samples of an epoch; for ``on_exhausted="repeat"`` only. Default: the sum of the lengths of the
            datasets that have a weight.
        on_exhausted: the rule for a dataset that is used up:
            ``"repeat"`` (default) begins another pass over it. An epoch continues at the end of the epoch before, in
            its passes and its proportions: the bound counts from the beginning of epoch 0, and is doubled within an
            epoch. ``"stop"`` ends the epoch. The other datasets continue their pass in the next epoch.
            ``"drop"`` continues with the other datasets, in their proportions, until all are used up: every sample
            comes once. The bound counts from the end of the dataset that was used up last.
        shuffle: False takes each dataset in its order. Default True.

    Raises:
        ValueError: the numbers of weights and datasets differ; a weight, the seed or `num_samples` is out of range; or
            a dataset with a weight is empty, unless `on_exhausted` is ``"drop"``.
    """

    def __init__(
        self,
        datasets: ConcatDataset[Any] | Sequence[Sized],
        weights: Sequence[float | Fraction],
        seed: int,
        *,
        num_samples: int | None = None,
        on_exhausted: Literal["repeat", "stop", "drop"] = "repeat",
        shuffle: bool = True,
    ) -> None:
        Permutation(0, seed)  # checks the seed
        if on_exhausted not in _CHOICES:
            raise ValueError(f"on_exhausted should be one of {_CHOICES}, but got on_exhausted={on_exhausted!r}")
        ends = datasets.cumulative_sizes if isinstance(datasets, ConcatDataset) else [*accumulate(map(len, datasets))]
        self._offsets = [0, *ends][: len(ends)]
        self._sizes = [end - start for start, end in zip(self._offsets, ends, strict=True)]
        if len(weights) != len(self._sizes):
            raise ValueError(f"there should be one weight a dataset, but got {len(weights)} for {len(self._sizes)}")
        whole = whole_weights(weights)
        if num_samples is not None and on_exhausted != "repeat":
            raise ValueError(f'num_samples={num_samples} needs on_exhausted="repeat", but got {on_exhausted!r}')
        if num_samples is not None and num_samples < 0:
            raise ValueError(f"num_samples should be 0 or more, but got num_samples={num_samples}")
        empty = [source for source, size in enumerate(self._sizes) if whole[source] and not size]
        if empty and on_exhausted != "drop":
            raise ValueError(
                f"dataset {empty[0]} is empty, so its weight of {weights[empty[0]]} cannot be met. "
                'Give it the weight 0, or on_exhausted="drop".'
            )
        self.seed = index(seed)
        self.on_exhausted = on_exhausted
        self.shuffle = shuffle
        self.epoch = 0
        self._weights = whole
        if on_exhausted == "repeat":
            used = sum(size for size, weight in zip(self._sizes, whole, strict=True) if weight)
            self._size = used if num_samples is None else index(num_samples)  # numpy's integers overflow
            self._phases = [_Phase(0, Interleave(whole), [0] * len(whole))]
            self._each_epoch = [0] * len(whole)  # the interleaving continues instead
        else:
            self._phases, self._each_epoch = _phases(self._sizes, whole, stop=on_exhausted == "stop")
            self._size = sum(self._each_epoch)

    @property
    def proportions(self) -> tuple[Fraction, ...]:
        """The share of each dataset, exactly."""
        total = sum(self._weights)
        return tuple(Fraction(weight, total) for weight in self._weights)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, 0 to 2**64 - 1. Nothing else changes the epoch.

        Raises:
            ValueError: the epoch is out of range.
        """
        Permutation(0, self.seed, epoch)
        self.epoch = index(epoch)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[int]:
        """Return the present epoch's indices from position `start` on, without computing the positions before it.

        Raises:
            ValueError: `start` is not between 0 and the length.
        """
        if not 0 <= start <= self._size:
            raise ValueError(f"start should be between 0 and {self._size}, but got start={start}")
        epoch, orders = self.epoch, _Orders(self._sizes, self.seed if self.shuffle else None)
        return Blocks(lambda position: self._block(position, epoch, orders), index(start))

    def _block(self, position: int, epoch: int, orders: _Orders) -> list[int]:
        """Return the next indices of the epoch from this position on; an empty list at the end."""
        if position >= self._size:
            return []
        # With "repeat", the interleaving of all epochs is a single sequence.
        begun = epoch * self._size if self.on_exhausted == "repeat" else 0
        starts = [*(phase.start for phase in self._phases), self._size]
        number = bisect_right(starts, position) - 1
        phase = self._phases[number]
        size = min(_BLOCK, starts[number + 1] - position)
        indices = np.empty(size, np.int64)
        for source, before, offsets in phase.interleave.block(begun + position - phase.start, size):
            given = epoch * self._each_epoch[source] + phase.used[source] + before
            indices[offsets] = self._offsets[source] + orders.take(source, given, len(offsets))
        found: list[int] = indices.tolist()
        return found

    def __repr__(self) -> str:
        shares = ", ".join(map(str, self.proportions))
        return (
            f"<MixtureSampler of {self._sizes} as {shares}, seed={self.seed}, epoch={self.epoch}, "
            f"on_exhausted={self.on_exhausted!r}, {self._size} samples>"
        )


class _Orders:
    """The endless order of each source: pass after pass over it, each shuffled again. `seed` None: not shuffled."""

    def __init__(self, sizes: list[int], seed: int | None) -> None:
        self._sizes = sizes
        self._seed = seed

    def take(self, source: int, first: int, number: int) -> npt.NDArray[np.int64]:
        """Return `number` of the source's samples, after its first `first` samples."""
        size = self._sizes[source]
        parts: list[npt.NDArray[np.int64]] = []
        while number:
            passes, offset = divmod(first, size)
            part = np.arange(offset, min(size, offset + number))
            parts.append(part if self._seed is None or size == 1 else self._permutation(source, passes)(part))
            first += len(part)
            number -= len(part)
        return np.concatenate(parts)

    def _permutation(self, source: int, passes: int) -> Permutation:
        assert self._seed is not None
        key = self._seed.to_bytes(8, "little") + source.to_bytes(8, "little")
        digest = hashlib.shake_256(b"asyncloader mixture" + key).digest(8)
        return Permutation(self._sizes[source], int.from_bytes(digest, "little"), passes % 2**64)


def _phases(sizes: list[int], weights: list[int], *, stop: bool) -> tuple[list[_Phase], list[int]]:
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
