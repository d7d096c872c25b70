"""Which epoch a loader is in. Pure, but for telling samplers and datasets.

Data path: none; read when an iterator begins.

The number lives where users expect it: in the sampler, if that has `set_epoch` and `epoch` (ours does, and torch's
`DistributedSampler`). So ``loader.set_epoch(e)`` and ``loader.sampler.set_epoch(e)`` are the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["EpochClock"]


class EpochClock:
    """Counts epochs.

    Args:
        samplers: the loader's sampler and batch sampler. Those with `set_epoch` are told, each once.
        dataset: is told too, if it has `set_epoch`.
        seeded: whether a completed epoch sets the next one. In torch mode samplers are the user's to set.
    """

    def __init__(self, samplers: list[Any], dataset: Any, *, seeded: bool) -> None:
        each = {id(sampler): sampler for sampler in samplers}.values()  # one sampler may come under two names
        self._samplers = [sampler for sampler in each if callable(getattr(sampler, "set_epoch", None))]
        self._dataset = dataset if callable(getattr(dataset, "set_epoch", None)) else None
        self._seeded = seeded
        self._count = 0
        self.restored = 0
        """How often a state was loaded: an iterator that began before has no say any more."""
        self.told = seeded
        """Whether the dataset hears of epochs from here."""

    @property
    def value(self) -> int:
        """The epoch that the next iterator gets."""
        for sampler in self._samplers:
            epoch = getattr(sampler, "epoch", None)
            if isinstance(epoch, int):
                return epoch
        return self._count

    def set(self, epoch: int) -> None:
        """The next iterator's epoch is this one.

        Raises:
            TypeError: it is no integer.
            ValueError: it is negative.
        """
        if not isinstance(epoch, int):
            raise TypeError(f"an epoch should be an integer, but got epoch={epoch!r}")
        if epoch < 0:
            raise ValueError(f"an epoch should not be negative, but got epoch={epoch}")
        for told in (*self._samplers, self._dataset):
            if told is not None:
                told.set_epoch(epoch)
        self.told = True
        self._count = epoch

    def restore(self, epoch: int, *, finished: bool) -> Callable[[], None]:
        """A state was loaded that is of this epoch, or of its end. Returns what takes that back, should it be refused.

        In torch mode the epochs of samplers and datasets are the user's to set, and so is the one after this: only a
        sampler that says to be in another epoch is told.
        """
        before, count = self.value, self._count
        moved: list[tuple[Any, int]] = []
        self.restored += 1
        self._count = epoch + finished
        if self._seeded:
            self.set(epoch + finished)
        else:
            for sampler in self._samplers:
                told = getattr(sampler, "epoch", None)
                if isinstance(told, int) and told != epoch:
                    sampler.set_epoch(epoch)
                    moved.append((sampler, told))

        def take_back() -> None:
            self.restored -= 1
            if self._seeded:
                self.set(before)
            self._count = count
            for sampler, told in moved:
                sampler.set_epoch(told)

        return take_back

    def begin(self) -> None:
        """An iterator begins: in seeded mode all parts are in the same epoch."""
        if self._seeded:
            self.set(self.value)

    def completed(self, epoch: int) -> None:
        """An iterator has delivered all of this epoch. Whatever was set meanwhile stays; twice is once."""
        if self.value != epoch:
            return
        if self._seeded:
            self.set(epoch + 1)
        else:
            self._count = epoch + 1
