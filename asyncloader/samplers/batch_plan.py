"""Plans batches from the samples' lengths: windows, cuts, and the position of each batch in the epoch. Pure.

Data path: [batch_plan] -> by_length -> scheduler.

The epoch's shuffled order is cut into windows. A window is sorted by length, longest first, and cut greedily: a batch
takes the following samples as far as the limits allow. The batches are then shuffled among themselves. In a sorted
window the cost of a batch is the length of its first sample times the number of samples, so the last possible end of
every batch takes one array division; only the walk from cut to cut is a loop.

A greedy cut leaves a batch that is not full. If it were always the last batch, it would hold a window's shortest
samples, and `drop_last` would always leave them out. So cuts are made from both ends and meet at the batch that the
shuffle puts last, whatever its lengths. A cut from the right gives the same number of batches as a cut from the left:
any part of an allowed batch is allowed, so both numbers are minimal.

If several ranks take a batch each at a step, the batches of a step are neighbours in the sorted window, and steps are
shuffled instead of batches. The number of a window's batches may not divide by the ranks: its shortest batches are left
over, and the shortest batches of the next window complete that step.

A plan depends on its arguments alone, and will never change between versions, like the permutation.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from asyncloader.samplers.permutation import Permutation

Indices = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Limits:
    """The limits of a batch. At least one of the two maxima is not None.

    Args:
        max_batch_size: most samples.
        max_tokens: highest cost: the longest length times the number of samples, or the sum of the lengths.
        pad_to: each length counts as the next multiple of this.
        padding: whether a sample costs the same as the longest of its batch. Without padding, sorting gains nothing,
            and the window keeps its order.
    """

    max_batch_size: int | None
    max_tokens: int | None = None
    pad_to: int = 1
    padding: bool = True

    def costs(self, lengths: Lengths) -> Indices:
        """Return the cost of each sample by itself."""
        return -(-lengths.astype(np.int64) // self.pad_to) * self.pad_to

    def ends(self, costs: Indices) -> Indices:
        """Return the last possible end of a batch for every start. Never decreases; may be after the window's end.

        With padding, the costs must be in descending order.
        """
        size = len(costs)
        starts = np.arange(size)
        ends = starts + (size if self.max_batch_size is None else min(size, self.max_batch_size))
        if self.max_tokens is None:
            return ends
        most = min(self.max_tokens, 1 << 62)  # sums stay within 63 bits
        if self.padding:
            fitting = starts + most // costs
        else:
            sums = np.cumsum(costs)
            fitting = np.searchsorted(sums, sums - costs + most, "right")
        earlier: Indices = np.minimum(ends, fitting)
        return earlier

    def full(self, costs: Indices) -> bool:
        """Return whether a batch of these costs has no room for another sample like its longest."""
        if self.max_batch_size is not None and len(costs) >= self.max_batch_size:
            return True
        if self.max_tokens is None:
            return False
        longest = int(costs.max())
        return (len(costs) * longest if self.padding else int(costs.sum())) + longest > self.max_tokens


@dataclass(frozen=True, eq=False)
class _Window:
    """One window in its order, with the offsets at which its batches start if cut from the left."""

    indices: Indices
    costs: Indices
    ends: list[int]
    starts: list[int]

    def cut(self, short: int) -> list[int]:
        """Return every batch's start, and the end of the last batch, if batch `short` is the batch that is not full."""
        starts = [*self.starts, len(self.indices)]
        # From the right end, each batch starts at the first sample from which the limits allow it to reach its end.
        for batch in range(len(self.starts) - 1, short, -1):
            starts[batch] = bisect_left(self.ends, starts[batch + 1])
        return starts


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """All batches of one epoch. Takes memory for a window, and an int for each window that was counted.

    Args:
        lengths: of every sample, positive; each alone must be within the limits.
        limits: limits of a batch.
        window: samples that are sorted together.
        drop_last: leave out the last batch of the epoch if it could be fuller.
        ranks: batches of a step.
        seed: None: the order of the lengths, and windows whose batches stay in their order.
        epoch: chooses another shuffle.

    Raises:
        ValueError: seed or epoch is out of range.
    """

    lengths: Lengths
    limits: Limits
    window: int
    drop_last: bool
    seed: int | None
    epoch: int
    ranks: int = 1
    _order: Permutation | None = field(init=False, repr=False)
    _totals: list[int] = field(init=False, repr=False, default_factory=lambda: [0])
    """Batches before each window, as far as counted."""

    def __post_init__(self) -> None:
        order = None if self.seed is None else Permutation(len(self.lengths), self.seed, self.epoch)
        object.__setattr__(self, "_order", order)

    @property
    def windows(self) -> int:
        """The number of windows."""
        return -(-len(self.lengths) // self.window)

    def __len__(self) -> int:
        """The number of batches. Every window is counted, once."""
        return self._totals_beyond(None)[-1]

    def find(self, batch: int) -> tuple[int, int] | None:
        """Return the window of batch number `batch`, and the batch's number in the window; None if `batch` is too
        large.

        The number of batches is a position, too: the position after the last batch. The windows before the batch are
        counted, once.
        """
        totals = self._totals_beyond(batch)
        if batch > totals[-1]:
            return None
        window = bisect_right(totals, batch) - 1
        return window, batch - totals[window]

    def batches(self, window: int) -> Iterator[Indices]:
        """Yield the window's batches, in the order of the epoch."""
        made = self._window(window)
        before = self._before(window)
        order = self._shuffle(window, len(made.starts), before)
        starts = made.cut(order[-1])
        for batch in order[: self._count_of(window, made, before)]:
            yield made.indices[starts[batch] : starts[batch + 1]]

    def _totals_beyond(self, batch: int | None) -> list[int]:
        """Return the totals, up to the first total above this batch (None: all)."""
        # Counted in a copy, which replaces the kept list at the end: so two threads may count at the same time.
        totals = self._totals.copy()
        while len(totals) <= self.windows and (batch is None or totals[-1] <= batch):
            totals.append(totals[-1] + self._count(len(totals) - 1, totals[-1]))
        if len(totals) > len(self._totals):
            object.__setattr__(self, "_totals", totals)
        return totals

    def _before(self, window: int) -> int:
        """Return the number of batches before the window; 0 if the number makes no difference."""
        if self.ranks == 1 or self.seed is None:
            return 0
        while len(self._totals) <= window:
            self._totals_beyond(self._totals[-1])
        return self._totals[window]

    def _count(self, window: int, before: int) -> int:
        """Return the number of the window's batches; `before`: the number of batches before the window."""
        size = self.limits.max_batch_size
        if self.limits.max_tokens is None and size is not None:  # known without sorting the window
            samples = min(self.window, len(self.lengths) - window * self.window)
            dropped = self.drop_last and window == self.windows - 1 and samples % size != 0
            return -(-samples // size) - dropped
        return self._count_of(window, self._window(window), before)

    def _count_of(self, window: int, made: _Window, before: int) -> int:
        batches = len(made.starts)
        if self.drop_last and window == self.windows - 1:
            short = self._shuffle(window, batches, before)[-1]
            start, stop = made.cut(short)[short : short + 2]
            return batches - (not self.limits.full(made.costs[start:stop]))
        return batches

    def _window(self, window: int) -> _Window:
        first = window * self.window
        indices = np.arange(first, min(first + self.window, len(self.lengths)))
        if self._order is not None:
            indices = self._order(indices)
        lengths = self.lengths[indices]
        if self.limits.padding:
            # Stable, so that the order is defined: samples of the same length stay in the shuffled order.
            longest_first = np.argsort(lengths.max() - lengths, kind="stable")
            indices, lengths = indices[longest_first], lengths[longest_first]
        costs = self.limits.costs(lengths)
        latest = self.limits.ends(costs)
        assert (latest > np.arange(len(costs))).all(), "a sample is above the limits by itself"
        ends: list[int] = latest.tolist()
        starts: list[int] = []
        start = 0
        while start < len(ends):
            starts.append(start)
            start = ends[start]
        return _Window(indices, costs, ends, starts)

    def _shuffle(self, window: int, batches: int, before: int) -> list[int]:
        """Return the order of the window's batches, which are numbered from the longest on."""
        if self.seed is None:
            return list(range(batches))
        if self.ranks > 1:
            return self._shuffle_steps(window, batches, before)
        return self._permute(window, batches)

    def _shuffle_steps(self, window: int, batches: int, before: int) -> list[int]:
        # The batches that complete the last step of the window before.
        begun = min(batches, -before % self.ranks)
        whole, _ = divmod(batches - begun, self.ranks)
        steps = [range(step * self.ranks, (step + 1) * self.ranks) for step in self._permute(window, whole)]
        steps.append(range(whole * self.ranks, batches - begun))
        order = list(range(batches - begun, batches))
        # Rotated, so that each rank in turn gets the longest batch of a step.
        for step in steps:
            turn = len(order) // self.ranks % max(1, len(step))
            order += [*step[turn:], *step[:turn]]
        return order

    def _permute(self, window: int, count: int) -> list[int]:
        assert self.seed is not None
        key = b"".join(number.to_bytes(8, "little") for number in (self.seed, self.epoch, window))
        digest = hashlib.shake_256(b"asyncloader batches" + key).digest(8)
        order: list[int] = Permutation(count, int.from_bytes(digest, "little"))(np.arange(count)).tolist()
        return order
