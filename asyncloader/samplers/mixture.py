"""The samplers of mixtures: of torch's ConcatDataset, and of a planned `Mixture`.

Data path: mixture_order -> [mixture] -> scheduler; of a `Mixture` over async_sampler.

`MixtureSampler` yields indices of a ConcatDataset. `MixedPositions` is the order of a `Mixture`, by the epoch and its
weights: the main process computes it, and a worker gets the source of each sample, the pass over the source, and the
place in it. So new weights need no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from fractions import Fraction
from functools import partial
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from asyncloader.errors import StateError
from asyncloader.samplers.argument_checks import checksum
from asyncloader.samplers.mixture_order import (
    LARGEST,
    EpochMixture,
    MixtureOrder,
    OnExhausted,
    check_mixture,
    passes_of,
    whole_weights,
)
from asyncloader.samplers.positions import PlannedDataset, Positions
from asyncloader.samplers.seeded import EpochSampler
from asyncloader.samplers.surviving import Blocks

Place = tuple[int, int, int]
"""A sample: number of the source, of the pass over it, and the place in the pass. A map dataset's place is its index;
its pass is 0."""

Change = tuple[int, Sequence[int]]
"""An epoch, and the whole weights of the sources from there on."""


class MixtureSampler(EpochSampler[int]):
    """Indices of several datasets, mixed in exact proportions: interleaved evenly, and not drawn.

    After any number of samples, each dataset is within 1.68 samples of its exact share, and with two datasets within
    1/2; random draws deviate by the square root of the number. (`asyncloader/samplers/mixture_order.py` has the proof.)
    Each dataset is shuffled separately, and again for each pass over it, so its samples come once in each pass. The
    order is a function of the arguments and the epoch alone, and any position is found in O(number of datasets),
    without the positions before it.

    Args:
        datasets: torch's ConcatDataset, which the loader reads; or its datasets, in its order. Only their lengths are
            used, once.
        weights: of each dataset, in any unit. 0 leaves a dataset out. `proportions` has the resulting shares: they are
            exact unless their common denominator is above 2**31 (`whole_weights` in
            `asyncloader/samplers/mixture_order.py`).
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
        super().__init__(seed, shuffle)
        ends = datasets.cumulative_sizes if isinstance(datasets, ConcatDataset) else [*accumulate(map(len, datasets))]
        self._offsets = [0, *ends][: len(ends)]
        self._sizes = [end - start for start, end in zip(self._offsets, ends, strict=True)]
        if len(weights) != len(self._sizes):
            raise ValueError(f"there should be one weight a dataset, but got {len(weights)} for {len(self._sizes)}")
        whole = whole_weights(weights)
        number = check_mixture(on_exhausted, num_samples)
        self.on_exhausted = on_exhausted
        self._weights = whole
        self._order = MixtureOrder(self._sizes, [(0, whole)], on_exhausted, number, self.seed if shuffle else None)

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

    def __len__(self) -> int:
        return self._order.epoch(self.epoch).size

    def iter_from(self, start: int) -> Iterator[int]:
        """Return the present epoch's indices from position `start` on, without computing the positions before it.

        Raises:
            ValueError: `start` is not between 0 and the length.
        """
        mixed = self._order.epoch(self.epoch)
        if not 0 <= start <= mixed.size:
            raise ValueError(f"start should be between 0 and {mixed.size}, but got start={start}")
        return Blocks(partial(self._block, mixed), index(start))

    def _block(self, mixed: EpochMixture, position: int) -> list[int]:
        """Return the next indices of the epoch from this position on; an empty list at the end."""
        size, parts = mixed.block(position)
        indices = np.empty(size, np.int64)
        for source, first, offsets in parts:
            indices[offsets] = self._offsets[source] + self._order.take(source, first, len(offsets))
        found: list[int] = indices.tolist()
        return found

    def __repr__(self) -> str:
        shares = ", ".join(map(str, self.proportions))
        return (
            f"<MixtureSampler of {self._sizes} as {shares}, seed={self.seed}, epoch={self.epoch}, "
            f"on_exhausted={self.on_exhausted!r}, {len(self)} samples>"
        )


class MixedPositions(Positions):
    """The sampler of a planned mixture.

    Args:
        dataset: the mixture, as the loader reads it.
        weights: whole weights of the sources, with the epochs from which they hold.
        whole: returns checked weights as whole numbers of samples.
        order: returns the order with these weights, once the dataset is planned.
        streams: of each source, whether it is a stream.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        weights: Sequence[Change],
        whole: Callable[[Sequence[float | Fraction]], list[int]],
        order: Callable[[Sequence[Change]], MixtureOrder],
        streams: Sequence[bool],
    ) -> None:
        super().__init__(dataset)
        self._weights, self._whole, self._order, self._streams = weights, whole, order, streams
        self._begun: int | None = None  # the epoch that began last
        # By `feedback`; replaced, not changed: another thread reads it.
        self._changes: list[Change] = []
        self._since: list[Change] = []  # of these, those since a state was loaded: they come after the state's

    def feedback(self, weights: Sequence[float | Fraction]) -> None:
        """Mix the epochs that have not begun with these weights. Every rank must give the same weights in the same
        epoch. A state that is loaded afterwards replaces them when the next iterator begins to read.

        Raises:
            ValueError: their number differs from that of the sources, they are out of range, or a source that they
                give a weight is empty.
        """
        whole = self._whole(weights)
        if self.dataset.samples is not None:  # otherwise the first epoch finds the empty sources
            self._order([(0, whole)])
        # After an epoch's last batch, the loader has set the following epoch, which has not begun.
        change = self.epoch + (self._begun == self.epoch), whole
        self._changes, self._since = _changed(self._changes, change), _changed(self._since, change)

    @property
    def changed(self) -> bool:
        """Whether `feedback` has given weights."""
        return bool(self._changes)

    def __len__(self) -> int:
        """Number of samples in the present epoch. TypeError: it is not known yet."""
        super().__len__()
        return self._mixture().epoch(self.epoch).size

    def begin(self, epoch: int) -> None:
        """Note that an epoch begins, whose weights are fixed from now on."""
        self._begun = epoch

    def loaded(self, begun: int | None) -> None:
        """Let the weights that `feedback` gives from now on follow those of the state. See `Positions.loaded`."""
        self._begun, self._since = begun, []

    def resumed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with the weights that `feedback` gave since; a broken state as it is."""
        changes = state.get("feedback")
        number = len(self._weights[0][1])
        if not isinstance(changes, list) or not all(_is_change(each, number) for each in changes):
            return state
        for change in self._since:
            changes = _changed(changes, change)
        return state | {"feedback": [*map(list, changes)]}

    def sampler(self, epoch: int) -> EpochPlaces:
        """Return an epoch's order."""
        return EpochPlaces(self._mixture(), epoch, self._streams)

    def _mixture(self) -> MixtureOrder:
        # A change stands until a later one, or until the epoch of later weights that the mixture was made with.
        return self._order(sorted((dict(self._weights) | dict(self._changes)).items()))

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, and the weights that `feedback` gave."""
        return {**super().state_dict(), "feedback": [[epoch, [*weights]] for epoch, weights in self._changes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the order of a saved state is this one, and take its weights.

        Raises:
            StateError: it is not, or the state is broken.
        """
        super().load_state_dict(state)
        followed = self.resumed(state)
        if followed is state:
            raise StateError("the state is broken: its weights cannot be read")
        self._changes = [(epoch, [*weights]) for epoch, weights in followed["feedback"]]

    def follow(self, state: dict[str, Any]) -> None:
        """Go on after the epoch of a state. Errors as `load_state_dict`."""
        self.load_state_dict(state)


def _changed(changes: Sequence[Change], change: Change) -> list[Change]:
    """Return the changes with a later change, which replaces those of its epoch and of the epochs after it."""
    return [each for each in changes if each[0] < change[0]] + [change]


def _is_change(value: Any, number: int) -> bool:
    match value:
        case [int(epoch), list() | tuple() as weights] if 0 <= epoch < 1 << 64 and len(weights) == number:
            whole = all(type(weight) is int and weight >= 0 for weight in weights)
            return whole and 0 < sum(weights) <= LARGEST
        case _:
            return False


class EpochPlaces:
    """The samples of one epoch, as a sampler that begins anywhere.

    Args:
        order: of the mixture.
        epoch: its number.
        streams: of each source, whether it is a stream: its samples keep their order, and each pass has a number.
    """

    def __init__(self, order: MixtureOrder, epoch: int, streams: Sequence[bool]) -> None:
        self._order = order
        self._mixed = order.epoch(epoch)
        self._streams = streams

    def __len__(self) -> int:
        return self._mixed.size

    def __iter__(self) -> Iterator[Place]:
        return self.iter_from(0)

    def iter_from(self, start: int) -> Iterator[Place]:
        """Return the places from position `start` on, without computing the positions before it."""
        return Blocks(self._block, start)

    def _block(self, position: int) -> list[Place]:
        size, parts = self._mixed.block(position)
        places: list[Any] = [None] * size
        for source, first, offsets in parts:
            if self._streams[source]:
                found = [
                    (source, passes, place)
                    for passes, part in passes_of(self._order.sizes[source], first, len(offsets))
                    for place in part.tolist()
                ]
            else:
                found = [(source, 0, each) for each in self._order.take(source, first, len(offsets)).tolist()]
            for offset, each in zip(offsets.tolist(), found, strict=True):
                places[offset] = each
        return places
