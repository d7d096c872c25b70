"""Mixes several datasets in given proportions, by a sampler.

Data path: [mixture] -> scheduler -> pool -> worker. It yields indices of torch's ConcatDataset of the datasets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from fractions import Fraction
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Sampler

from asyncloader.samplers.argument_checks import checksum
from asyncloader.samplers.interleave import whole_weights
from asyncloader.samplers.mixture_order import CHOICES, EpochMixture, MixtureOrder, OnExhausted, SourceOrder
from asyncloader.samplers.permutation import Permutation
from asyncloader.samplers.surviving import Blocks


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
        on_exhausted: OnExhausted = "repeat",
        shuffle: bool = True,
    ) -> None:
        Permutation(0, seed)  # checks the seed
        if on_exhausted not in CHOICES:
            raise ValueError(f"on_exhausted should be one of {CHOICES}, but got on_exhausted={on_exhausted!r}")
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
        self.seed = index(seed)
        self.on_exhausted = on_exhausted
        self.shuffle = shuffle
        self.epoch = 0
        self._weights = whole
        number = None if num_samples is None else index(num_samples)
        self._order = MixtureOrder(self._sizes, [(0, whole)], on_exhausted, number)

    @property
    def order_arguments(self) -> dict[str, Any]:
        """The arguments from which the order of an epoch follows, as plain values, for a loader's state."""
        return {
            "lengths of datasets": checksum(self._sizes),
            "weights": ":".join(map(str, self._weights)),
            "on_exhausted": self.on_exhausted,
            "num_samples": len(self) if self.on_exhausted == "repeat" else None,
            "shuffle": bool(self.shuffle),
            "seed": self.seed if self.shuffle else None,
        }

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
        return self._order.epoch(self.epoch).size

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[int]:
        """Return the present epoch's indices from position `start` on, without computing the positions before it.

        Raises:
            ValueError: `start` is not between 0 and the length.
        """
        mixed = self._order.epoch(self.epoch)
        if not 0 <= start <= mixed.size:
            raise ValueError(f"start should be between 0 and {mixed.size}, but got start={start}")
        seed = self.seed if self.shuffle else None
        orders = [SourceOrder(source, size, seed) for source, size in enumerate(self._sizes)]
        return Blocks(lambda position: self._block(position, mixed, orders), index(start))

    def _block(self, position: int, mixed: EpochMixture, orders: list[SourceOrder]) -> list[int]:
        """Return the next indices of the epoch from this position on; an empty list at the end."""
        size, parts = mixed.block(position)
        indices = np.empty(size, np.int64)
        for source, first, offsets in parts:
            indices[offsets] = self._offsets[source] + orders[source].take(first, len(offsets))
        found: list[int] = indices.tolist()
        return found

    def __repr__(self) -> str:
        shares = ", ".join(map(str, self.proportions))
        return (
            f"<MixtureSampler of {self._sizes} as {shares}, seed={self.seed}, epoch={self.epoch}, "
            f"on_exhausted={self.on_exhausted!r}, {len(self)} samples>"
        )
