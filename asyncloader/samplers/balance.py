"""Deals the samples of a global batch to the ranks so that each rank's samples cost the same. Pure.

Data path: sampler -> distributed: [balance] -> scheduler.

A rank that has the longest samples of a step makes all other ranks wait. Each rank knows the whole global batch, which
is a function of the seed, and the costs of its samples: so each computes the same division, without a message. Only
integers are compared. Floating-point functions may differ in the last bit from one CPU to another, and two ranks with
different divisions might both take a sample, or neither.

The samples are dealt in rounds of one sample to each rank, the costliest samples first; in each round the costliest
sample goes to the rank that has the least so far (the LPT rule of Graham, "Bounds on multiprocessing timing anomalies",
SIAM J. Appl. Math. 1969, with equal counts). The last rounds cost too little to even out a heavy tail, so samples are
then exchanged: a sample of the rank that has the most for a sample of a rank that has little, the pair that evens out
the two best, until the largest sum is within a thousandth of the mean or no exchange helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncloader.samplers.argument_checks import check_lengths

Costs = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int64]

_CLOSE = 1000
"""The largest sum may be above the mean by this part of the mean."""
_PARTNERS = 4
"""Ranks with the least with which the rank that has the most tries to exchange a sample."""
_EXCHANGES = 4
"""Exchanges per rank, at most: bounds the time."""
_LARGEST = (1 << 62) - 1
"""The largest sum of costs."""


def deal(costs: Costs, ranks: int) -> Offsets:
    """Divide samples evenly among ranks so that the largest sum of costs is small. O(n log n) for n samples.

    Args:
        costs: of each sample, 0 or more, shape ``(n,)``; their sum is below 2**62. `ranks` divides n.
        ranks: number of parts.

    Returns:
        The offsets of each rank's samples, ascending, shape ``(ranks, n // ranks)``. Ranks are in the order of their
        first sample. The same on every machine.
    """
    dealt = np.empty((ranks, len(costs) // ranks), np.int64)
    sums = np.zeros(ranks, np.int64)
    # Stable sorts, so that equal costs leave nothing undefined.
    for turn, row in enumerate(np.argsort(-costs, kind="stable").reshape(-1, ranks)):
        least_first = np.argsort(sums, kind="stable")
        dealt[least_first, turn] = row
        sums[least_first] += costs[row]
    _exchange(costs, dealt, sums)
    dealt.sort(axis=1)
    return dealt[np.argsort(dealt[:, 0])] if dealt.size else dealt


def _exchange(costs: Costs, dealt: Offsets, sums: Costs) -> None:
    """Exchange samples between the rank that has the most and others; changes `dealt` and `sums`."""
    total, ranks = int(sums.sum()), len(sums)
    for _ in range(_EXCHANGES * ranks):
        most = int(np.argmax(sums))
        if (int(sums[most]) * ranks - total) * _CLOSE <= total:
            return
        for other in np.argsort(sums, kind="stable")[:_PARTNERS].tolist():
            gap = int(sums[most] - sums[other])
            found = _best_pair(costs[dealt[most]], costs[dealt[other]], gap)
            if found is not None:
                mine, theirs, moved = found
                dealt[most, mine], dealt[other, theirs] = dealt[other, theirs], dealt[most, mine]
                sums[most] -= moved
                sums[other] += moved
                break
        else:
            return


def _best_pair(mine: Costs, theirs: Costs, gap: int) -> tuple[int, int, int] | None:
    """Return the pair of samples whose exchange moves nearest to half of the gap, and the cost that it moves; None if
    no exchange makes the larger sum smaller.
    """
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    # For each of mine, the neighbours of the cost that would be exact.
    after = np.searchsorted(ordered, mine - gap // 2)
    nearest = np.stack([np.maximum(after - 1, 0), np.minimum(after, len(order) - 1)])
    moved = mine - ordered[nearest]
    left = np.where((moved > 0) & (moved < gap), np.abs(gap - 2 * moved), gap)
    place = int(np.argmin(left))
    if left.flat[place] >= gap:
        return None
    return place % len(mine), int(order[nearest.flat[place]]), int(moved.flat[place])


class Balance:
    """The costs of a dataset's samples, for a loader's ``balance=``, which makes steps of equal cost for all ranks.

    Args:
        lengths: of each sample of the dataset, in its order: integers, 0 or more, shape ``(samples,)``. Not copied, so
            a memory map is read where it is needed.
        cost: a function from the lengths of some samples, an int64 array, to their costs, integers of the same shape,
            0 or more. It must return the same on every rank: round costs that are not whole. Default: the square of the
            length.

    Raises:
        TypeError: lengths are not integers, or `cost` is not callable.
        ValueError: lengths have more than one axis.
    """

    def __init__(self, lengths: npt.ArrayLike, cost: Callable[[Costs], npt.ArrayLike] | None = None) -> None:
        given = check_lengths(lengths, "sample")
        if cost is not None and not callable(cost):
            raise TypeError(f"cost should be a function from lengths to costs, but got {cost!r}")
        self._lengths = given
        self._cost = cost

    def __len__(self) -> int:
        """The number of samples whose lengths are known."""
        return len(self._lengths)

    def __repr__(self) -> str:
        return f"<Balance of {len(self)} lengths>"

    def costs(self, indices: Sequence[Any]) -> Costs:
        """Return the costs of these samples.

        Raises:
            TypeError: an index, or a cost, is not an integer.
            IndexError: a sample has no length.
            ValueError: a length or a cost is negative or too large, or `cost` returned another number of costs.
        """
        wanted = np.asarray(indices)
        if not np.issubdtype(wanted.dtype, np.integer) or wanted.ndim != 1:
            raise TypeError(f"balance= needs samples whose indices are integers, but got {indices[0]!r:.100}")
        if int(wanted.max()) >= len(self) or int(wanted.min()) < -len(self):
            beyond = wanted[(wanted >= len(self)) | (wanted < -len(self))][0]
            raise IndexError(f"balance= has {len(self)} lengths, but the sampler gave index {beyond}")
        lengths: Costs = self._lengths[wanted].astype(np.int64)
        if int(lengths.min()) < 0:
            raise ValueError(f"lengths should be 0 or more, but one is {lengths.min()}")
        if self._cost is None:
            if int(lengths.max()) >= 1 << 31:
                raise ValueError(f"the square of length {lengths.max()} is too large; give balance= a cost function")
            given: npt.NDArray[np.integer] = lengths * lengths
        else:
            given = np.asarray(self._cost(lengths))
            if given.shape != lengths.shape:
                raise ValueError(f"cost should return one cost a length, but got {given.shape} for {lengths.shape}")
            if not np.issubdtype(given.dtype, np.integer):
                raise TypeError(f"cost should return integers, which are the same on every rank, but got {given.dtype}")
        if int(given.min()) < 0 or int(given.max()) * len(given) > _LARGEST:
            raise ValueError(
                f"costs should be between 0 and {_LARGEST // len(given)}, but they are {given.min()} to {given.max()}"
            )
        costs: Costs = given.astype(np.int64)  # after the check: large numbers without a sign would get one
        return costs

    def deal(self, indices: Sequence[Any], ranks: int) -> list[list[int]]:
        """Return, for each rank, the offsets of its samples in a global batch, ascending. Errors as `costs`."""
        dealt: list[list[int]] = deal(self.costs(indices), ranks).tolist()
        return dealt
