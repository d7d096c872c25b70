"""Counts a loader's epochs, and the samples that keep the ranks even.

Data path: none; read when an iterator begins. Pure, except that it calls `set_epoch` of samplers and datasets.

The number is kept where users expect it: in the sampler, if that has `set_epoch` and `epoch` (as ours and torch's
`DistributedSampler`). So ``loader.set_epoch(e)`` and ``loader.sampler.set_epoch(e)`` are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncloader.workers.fetch.dataset_kinds import check_plain
from asyncloader.workers.fetch.dataset_marks import set_dataset_epoch

if TYPE_CHECKING:
    from asyncloader.remote.assignment_state import EpochAssignment
    from asyncloader.samplers.distributed import RankView


class EpochClock:
    """The epoch counter of one loader.

    Args:
        samplers: the loader's sampler and batch sampler; `set_epoch` is called on those that have it, once each.
        dataset: the same, if it has `set_epoch`.
        seeded: whether a completed epoch sets the following epoch everywhere. In torch mode the user calls `set_epoch`.
    """

    def __init__(self, samplers: list[Any], dataset: Any, *, seeded: bool) -> None:
        each = {id(sampler): sampler for sampler in samplers}.values()  # one sampler may have two names
        self._samplers = [sampler for sampler in each if callable(getattr(sampler, "set_epoch", None))]
        self._dataset = dataset if callable(getattr(dataset, "set_epoch", None)) else None
        self._seeded = seeded
        self.counted = 0
        """The number of the next iterator's epoch, where no sampler has one."""
        self.restored = 0
        """How often a state was loaded. An iterator that began before that no longer advances the epoch."""
        self.sets_dataset = seeded
        """Whether `set_epoch` is called on the dataset."""

    @property
    def value(self) -> int:
        """The epoch that the next iterator gets."""
        for sampler in self._samplers:
            epoch = getattr(sampler, "epoch", None)
            if isinstance(epoch, int):
                return epoch
        return self.counted

    def set(self, epoch: int) -> None:
        """Set the next iterator's epoch.

        Raises:
            TypeError: it is no integer, or a `set_epoch` is a coroutine function.
            ValueError: it is negative.
        """
        if not isinstance(epoch, int):
            raise TypeError(f"an epoch should be an integer, but got epoch={epoch!r}")
        if epoch < 0:
            raise ValueError(f"an epoch should not be negative, but got epoch={epoch}")
        for sampler in self._samplers:
            _set_sampler_epoch(sampler, epoch)
        if self._dataset is not None:
            check_plain(f"{type(self._dataset).__name__}.set_epoch", self._dataset.set_epoch)
            set_dataset_epoch(self._dataset, epoch)
        self.sets_dataset = True
        self.counted = epoch

    def restore(self, epoch: int, *, finished: bool) -> Callable[[], None]:
        """Restore the epoch of a loaded state. Returns a function that undoes this if the state is refused. Nothing has
        changed if a `set_epoch` raises.

        In torch mode the user sets the epochs of samplers and datasets, the following epoch's too: `set_epoch` is only
        called on a sampler whose `epoch` differs.
        """
        before, counted = self.value, self.counted
        moved: list[tuple[Any, int]] = []

        def take_back() -> None:
            self.restored -= 1
            self.counted = counted
            for sampler, previous in moved:
                sampler.set_epoch(previous)
            if self._seeded:
                self.set(before)

        self.restored += 1  # an iterator from before, whose end may still come, must not advance the restored epoch
        self.counted = epoch + finished
        try:
            if self._seeded:
                self.set(epoch + finished)
            else:
                for sampler in self._samplers:
                    current = getattr(sampler, "epoch", None)
                    if isinstance(current, int) and current != epoch:
                        _set_sampler_epoch(sampler, epoch)
                        moved.append((sampler, current))
        except BaseException:
            # The samplers have moved if the dataset refuses the epoch. It may refuse the earlier epoch, too: the caller
            # gets the first error.
            with suppress(Exception):
                take_back()
            raise
        return take_back

    def begin(self) -> None:
        """Begin an iterator: in seeded mode, set all samplers and the dataset to the same epoch."""
        if self._seeded:
            # The value may come from a single sampler: the others, and the dataset, get the same.
            self.set(self.value)

    def set_dataset_again(self) -> None:
        """Set the dataset to this loader's epoch, after another loader has set its own."""
        if self._dataset is not None and self.sets_dataset:
            set_dataset_epoch(self._dataset, self.value)

    def completed(self, epoch: int) -> None:
        """Advance after an iterator delivered all of this epoch, unless the user has set another. Idempotent."""
        if self.value != epoch:
            return
        if self._seeded:
            self.set(epoch + 1)
        else:
            self.counted = epoch + 1


def _set_sampler_epoch(sampler: Any, epoch: int) -> None:
    check_plain(f"{type(sampler).__name__}.set_epoch", sampler.set_epoch)
    sampler.set_epoch(epoch)


class Tally:
    """Counts samples that were dropped or repeated to keep the ranks even, over all ranks and completed epochs."""

    def __init__(self) -> None:
        self.dropped = 0
        self.repeated = 0

    def add(self, view: RankView | None, assignment: EpochAssignment | None, steps: int, batch_size: int) -> None:
        """Add a completed epoch.

        Args:
            view: this rank's share of a sampler's order; None for streams, and outside seeded mode.
            assignment: of a stream whose shards are assigned; None for others.
            steps: batches of each rank.
            batch_size: their size.
        """
        if view is not None:
            _, dropped, repeated = view.tail()
            self.dropped += dropped
            self.repeated += repeated
        elif assignment is not None:
            self.dropped += assignment.shares.dropped(steps, batch_size)

    def snapshot(self) -> dict[str, float]:
        """For `stats()`."""
        return {"dropped_samples": self.dropped, "repeated_samples": self.repeated}
