"""The sampler of a mixture of datasets and streams: the order of its samples, by the epoch and its weights.

Data path: mixture_order -> [mixed_positions] -> position_source -> scheduler.

The main process computes the order, and a worker gets the source of each sample, the pass over the source, and the
place in it: so new weights need no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol

from asyncloader.errors import StateError
from asyncloader.samplers.interleave import LARGEST
from asyncloader.samplers.mixture_order import EpochMixture, MixtureOrder, SourceOrder, passes_of
from asyncloader.samplers.positions import PlannedDataset, Positions
from asyncloader.samplers.surviving import Blocks

Place = tuple[int, int, int]
"""A sample: number of the source, of the pass over it, and the place in the pass. A map dataset's place is its index;
its pass is 0."""


Change = tuple[int, list[int]]
"""An epoch, and the whole weights of the sources from there on."""


class MixedDataset(PlannedDataset, Protocol):
    """The part of `remote.mixture.MixedSources` that its order needs."""

    @property
    def weights(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Whole weights of the sources, with the epoch from which they hold."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Samples of each source, once planned."""
        ...

    @property
    def streams(self) -> Sequence[bool]:
        """Of each source, whether it is a stream."""
        ...

    @property
    def shuffle(self) -> bool:
        """Whether map datasets are shuffled."""
        ...

    def whole(self, weights: Sequence[float | Fraction]) -> list[int]:
        """Return checked weights as whole numbers of samples."""
        ...

    def order(self, weights: Sequence[tuple[int, Sequence[int]]]) -> MixtureOrder:
        """Return the mixture with these weights."""
        ...


class MixedPositions(Positions):
    """The sampler of a planned mixture.

    Args:
        dataset: the mixture, as the loader reads it.
    """

    dataset: MixedDataset

    def __init__(self, dataset: MixedDataset) -> None:
        super().__init__(dataset)
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
        whole = self.dataset.whole(weights)
        if self.dataset.samples is not None:  # otherwise the first epoch finds the empty sources
            self.dataset.order([(0, whole)])
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
        return self._mixed(self.epoch).size

    def begin(self, epoch: int) -> None:
        """Note that an epoch begins, whose weights are fixed from now on."""
        self._begun = epoch

    def loaded(self, begun: int | None) -> None:
        """Let the weights that `feedback` gives from now on follow those of the state. See `Positions.loaded`."""
        self._begun, self._since = begun, []

    def resumed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with the weights that `feedback` gave since; a broken state as it is."""
        changes = state.get("feedback")
        number = len(self.dataset.weights[0][1])
        if not isinstance(changes, list) or not all(_is_change(each, number) for each in changes):
            return state
        for change in self._since:
            changes = _changed(changes, change)
        return state | {"feedback": [*map(list, changes)]}

    def sampler(self, epoch: int) -> MixedOrder:
        """Return an epoch's order."""
        return MixedOrder(self._mixed(epoch), self.dataset)

    def _mixed(self, epoch: int) -> EpochMixture:
        given = self.dataset.weights
        # A change stands until a later one, or until the epoch of later weights that the mixture was made with.
        changes = dict(given) | dict(self._changes)
        return self.dataset.order(sorted(changes.items())).epoch(epoch)

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
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    epoch, weights = value
    return (
        type(epoch) is int
        and 0 <= epoch < 1 << 64
        and isinstance(weights, list | tuple)
        and len(weights) == number
        and all(type(weight) is int and weight >= 0 for weight in weights)
        and 0 < sum(weights) <= LARGEST
    )


class MixedOrder:
    """The samples of one epoch, as a sampler that begins anywhere.

    Args:
        mixed: the epoch.
        dataset: the mixture.
    """

    def __init__(self, mixed: EpochMixture, dataset: MixedDataset) -> None:
        self._mixed = mixed
        self._sizes = dataset.sizes
        self._streams = dataset.streams
        seed = dataset.seed if dataset.shuffle else None
        self._orders = [SourceOrder(source, size, seed) for source, size in enumerate(dataset.sizes)]

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
                    for passes, part in passes_of(self._sizes[source], first, len(offsets))
                    for place in part.tolist()
                ]
            else:
                found = [(source, 0, index) for index in self._orders[source].take(first, len(offsets)).tolist()]
            for offset, each in zip(offsets.tolist(), found, strict=True):
                places[offset] = each
        return places
