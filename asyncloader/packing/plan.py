"""Plans an epoch's rows of packed sequences from their lengths: windows, and the position of each row. Pure.

Data path: bin_packing -> [plan] -> sampler.

The epoch's shuffled order is cut into windows. The sequences of a window are packed, those of each domain apart, and
the window's rows are shuffled among themselves. The remainder, less than a row of each domain, is packed with the
next window; after the last window it makes rows that are short.

So a window depends on the windows before it: to find a row, the windows before it are packed once, and what was left
over is remembered at some of them, from which any row is found again.

A plan depends on its arguments alone, and will never change between versions, like the permutation.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncloader.packing.bin_packing import NO_ROWS, NOTHING, PackedRows, Slices, Strategy, pack
from asyncloader.samplers.permutation import Permutation

_REMEMBERED = 64
"""Windows of an epoch at which the remainder is remembered."""

LeftOver = Mapping[int, Slices]
"""The remainder of each domain."""


class _Counts(NamedTuple):
    """The windows that were packed, as far as they are remembered.

    Attributes:
        totals: rows before each window.
        left: the remainder before the windows 0, `every`, 2 * `every`, ...
        next: the remainder after the last of them.
    """

    totals: list[int]
    left: list[LeftOver]
    next: LeftOver


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """All rows of one epoch.

    Args:
        lengths: of every sequence, positive.
        domains: number of each sequence's domain, below 2**31; None: all are of one.
        max_tokens: most tokens of a row. Longer sequences are cut.
        strategy: see `pack`.
        window: sequences that are packed together.
        drop_last: leave out the remainder after the last window.
        seed: None: the order of the lengths, and the rows of a window in theirs.
        epoch: chooses another shuffle.

    Raises:
        ValueError: seed or epoch is out of range.
    """

    lengths: npt.NDArray[np.integer]
    domains: npt.NDArray[np.integer] | None
    max_tokens: int
    strategy: Strategy
    window: int
    drop_last: bool
    seed: int | None
    epoch: int
    _order: Permutation | None = field(init=False, repr=False)
    _counts: _Counts = field(init=False, repr=False, default_factory=lambda: _Counts([0], [{}], {}))

    def __post_init__(self) -> None:
        order = None if self.seed is None else Permutation(len(self.lengths), self.seed, self.epoch)
        object.__setattr__(self, "_order", order)

    @property
    def windows(self) -> int:
        """The number of windows."""
        return -(-len(self.lengths) // self.window)

    def __len__(self) -> int:
        """The number of rows. Packs every window, once."""
        return self._count(None).totals[-1]

    def has(self, row: int) -> bool:
        """Whether `row` is a position in the epoch: the number of a row, or the number of rows. Packs the windows
        before it, once.
        """
        return 0 <= row <= self._count(row).totals[-1]

    def rows_from(self, row: int) -> Iterator[Slices]:
        """Yield the epoch's rows from number `row` on, each as its slices, ``(n, 3)``."""
        counts = self._count(row)
        window = min(bisect_right(counts.totals, row) - 1, self.windows)
        skipped = row - counts.totals[window]
        remembered = window // self._every
        left = counts.left[remembered]
        for before in range(remembered * self._every, window):
            _, left = self._pack(before, left)
        for number in range(window, self.windows):
            rows, left = self._pack(number, left)
            for each in self._shuffle(number, len(rows))[skipped:]:
                yield rows.row(each)
            skipped = 0

    @property
    def _every(self) -> int:
        return -(-self.windows // _REMEMBERED) or 1

    def _count(self, row: int | None) -> _Counts:
        """Pack windows up to the first that ends behind this row (None: all), unless they were packed before."""
        totals, lefts, left = self._counts
        if len(totals) > self.windows or (row is not None and totals[-1] > row):
            return self._counts
        # In copies, which replace the others at once: so two threads may count at the same time.
        totals, lefts = totals.copy(), lefts.copy()
        while len(totals) <= self.windows and (row is None or totals[-1] <= row):
            rows, left = self._pack(len(totals) - 1, left)
            totals.append(totals[-1] + len(rows))
            if (len(totals) - 1) % self._every == 0:
                lefts.append(left)
        counts = _Counts(totals, lefts, left)
        object.__setattr__(self, "_counts", counts)
        return counts

    def _pack(self, window: int, left: LeftOver) -> tuple[PackedRows, LeftOver]:
        """Return the rows of a window, in the order of their domains, and the remainder then."""
        first = window * self.window
        indices = np.arange(first, min(first + self.window, len(self.lengths)))
        if self._order is not None:
            indices = self._order(indices)
        slices = np.zeros((len(indices), 3), np.int64)
        slices[:, 0] = indices
        slices[:, 2] = self.lengths[indices]
        rest = dict(left)
        packed: list[PackedRows] = []
        for domain, own in self._by_domain(slices):
            rows, rest[domain] = pack(np.concatenate([rest.get(domain, NOTHING), own]), self.max_tokens, self.strategy)
            packed.append(rows)
        if window == self.windows - 1:
            if not self.drop_last:
                ends = [slices for _, slices in sorted(rest.items()) if len(slices)]
                packed += [PackedRows(slices, np.array([len(slices)])) for slices in ends]
            rest = {}
        return _joined(packed), rest

    def _by_domain(self, slices: Slices) -> Iterator[tuple[int, Slices]]:
        if self.domains is None:
            yield 0, slices
            return
        domains = self.domains[slices[:, 0]]
        order = np.argsort(domains, kind="stable")
        names, starts = np.unique(domains[order], return_index=True)
        yield from zip(names.tolist(), np.split(slices[order], starts[1:]), strict=True)

    def _shuffle(self, window: int, rows: int) -> list[int]:
        """Return the order of the window's rows."""
        if self.seed is None:
            return list(range(rows))
        key = b"".join(number.to_bytes(8, "little") for number in (self.seed, self.epoch, window))
        digest = hashlib.shake_256(b"asyncloader packing" + key).digest(8)
        order: list[int] = Permutation(rows, int.from_bytes(digest, "little"))(np.arange(rows)).tolist()
        return order


def _joined(parts: list[PackedRows]) -> PackedRows:
    if len(parts) < 2:
        return parts[0] if parts else NO_ROWS
    before = np.cumsum([0, *(len(part.slices) for part in parts[:-1])])
    return PackedRows(
        np.concatenate([part.slices for part in parts]),
        np.concatenate([part.ends + start for part, start in zip(parts, before, strict=True)]),
    )
