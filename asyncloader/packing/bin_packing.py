"""The packing strategies: divides sequences among rows of at most `max_tokens` tokens. Pure.

Data path: [bin_packing] -> plan -> sampler; or [bin_packing] -> packed_loader.

Sequences are given as slices, an int64 array of shape ``(n, 3)`` with a row ``(index, start, stop)`` for each: tokens
`start` to `stop` of sequence `index`. No slice is empty. Python code runs once per sequence for the two strategies that
fit whole sequences, and never for `wrap`.

The row with the most room is not returned with the others. Its slices are left over, for the caller to pack with the
sequences that come next: so that few rows are short, however few sequences are packed at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Slices = npt.NDArray[np.int64]
Strategy = Literal["first_fit", "best_fit", "wrap", "best_fit_wrap"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

NOTHING: Slices = np.zeros((0, 3), np.int64)
NOTHING.flags.writeable = False


class PackedRows(NamedTuple):
    """Packed rows: row r consists of the slices ``slices[ends[r - 1]:ends[r]]``.

    Attributes:
        slices: of all rows, shape ``(n, 3)``.
        ends: the number of slices up to the end of each row, shape ``(rows,)``.
    """

    slices: Slices
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, number: int) -> Slices:
        """Return the slices of a row."""
        return self.slices[self.ends[number - 1] if number else 0 : self.ends[number]]


NO_ROWS = PackedRows(NOTHING, np.zeros(0, np.int64))


def pack(slices: Slices, max_tokens: int, strategy: Strategy) -> tuple[PackedRows, Slices]:
    """Pack slices. Slices that are longer than a row are cut, by every strategy.

    Args:
        slices: the slices to pack, shape ``(n, 3)``.
        max_tokens: most tokens of a row.
        strategy:
            ``"first_fit"``: each slice in turn goes to the first row that has room for it.
            ``"best_fit"``: the longest slices first, each to the fullest row that has room for it.
            ``"wrap"``: the slices in a row, one after the other, cut where a row is full.
            ``"best_fit_wrap"``: as ``"best_fit"``; then the slices of the emptiest rows fill the others, cut where a
            row is full.

    Returns:
        The rows, and the slices that are left over: those of the row with the most room, unless it is full.
    """
    if not len(slices):
        return NO_ROWS, NOTHING
    if strategy == "wrap":
        total = int((slices[:, 2] - slices[:, 1]).sum())
        cut, row_of = _cut(slices, np.arange(max_tokens, total + 1, max_tokens))
        return _rows(cut, row_of, total // max_tokens)
    slices = split_long(slices, max_tokens)
    lengths = slices[:, 2] - slices[:, 1]
    if strategy == "first_fit":
        row_of = np.array(_first_fit(lengths.tolist(), max_tokens, int(lengths.sum())))
    else:
        # Stable, so that the result is defined: slices of the same length stay in their order.
        longest_first = np.argsort(-lengths, kind="stable")
        slices, lengths = slices[longest_first], lengths[longest_first]
        row_of = np.array(_best_fit(lengths.tolist(), max_tokens))
    filled = np.zeros(int(row_of.max()) + 1, np.int64)
    np.add.at(filled, row_of, lengths)
    if strategy == "best_fit_wrap":
        return _fill_up(slices, row_of, filled, max_tokens)
    last = len(filled) - 1
    emptiest = last - int(np.argmin(filled[::-1]))  # the last of several
    if filled[emptiest] == max_tokens:
        return _rows(slices, row_of, last + 1)
    # Numbered behind the others: so it is the remainder.
    moved = np.where(row_of == emptiest, last, row_of - (row_of > emptiest))
    return _rows(slices, moved, last)


def split_long(slices: Slices, max_tokens: int) -> Slices:
    """Cut slices that are longer than a row into slices of a row's length, and a shorter one."""
    parts = -(-(slices[:, 2] - slices[:, 1]) // max_tokens)
    if not len(parts) or parts.max() == 1:
        return slices
    cut = np.repeat(slices, parts, axis=0)
    number = np.arange(len(cut)) - np.repeat(np.cumsum(parts) - parts, parts)
    cut[:, 1] += number * max_tokens
    cut[:, 2] = np.minimum(cut[:, 2], cut[:, 1] + max_tokens)
    return cut


def _first_fit(lengths: list[int], max_tokens: int, total: int) -> list[int]:
    """Return the row of each length."""
    # At most one row is filled to a half or less: the first slice of a second would have fitted in the first.
    most_rows = min(len(lengths), 2 * total // max_tokens + 1)
    leaves = 1 << (most_rows - 1).bit_length()
    # A tree: the node of each row has its room, each node above the larger of its two children's.
    room = [max_tokens] * (2 * leaves)
    row_of: list[int] = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row_of.append(node - leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            larger = max(room[2 * node], room[2 * node + 1])
            if room[node] == larger:
                break
            room[node] = larger
    return row_of


def _best_fit(lengths: list[int], max_tokens: int) -> list[int]:
    """Return the row of each length; the lengths are in descending order."""
    shift = len(lengths).bit_length()
    number = (1 << shift) - 1
    rows = 0
    # Sorted: the room of each row that is not full, and in the lower bits its number.
    rooms: list[int] = []
    row_of: list[int] = []
    for length in lengths:
        at = bisect_left(rooms, length << shift)
        if at < len(rooms):
            room = rooms.pop(at)
        else:
            room = max_tokens << shift | rows
            rows += 1
        row_of.append(room & number)
        room -= length << shift
        if room > number:
            insort(rooms, room)
    return row_of


def _fill_up(
    slices: Slices, row_of: npt.NDArray[np.int64], filled: npt.NDArray[np.int64], max_tokens: int
) -> tuple[PackedRows, Slices]:
    """Take the emptiest rows apart to fill the others."""
    full = int(filled.sum()) // max_tokens
    fullest_first = np.argsort(-filled, kind="stable")
    rank = np.empty_like(fullest_first)
    rank[fullest_first] = np.arange(len(filled))
    new_row = rank[row_of]
    staying = new_row < full
    room = max_tokens - filled[fullest_first[:full]]
    cut, filling = _cut(slices[~staying], np.cumsum(room))
    return _rows(np.concatenate([slices[staying], cut]), np.concatenate([new_row[staying], filling]), full)


def _cut(slices: Slices, points: npt.NDArray[np.int64]) -> tuple[Slices, npt.NDArray[np.int64]]:
    """Cut slices that lie one behind the other at these numbers of tokens, in ascending order.

    Returns:
        The slices, and for each the number of points at or before its beginning.
    """
    lengths = slices[:, 2] - slices[:, 1]
    ends = np.cumsum(lengths)
    total = ends[-1] if len(ends) else 0
    bounds = np.unique(np.concatenate([np.zeros(1, np.int64), ends, points[points < total]]))
    begins = bounds[:-1]
    source = np.searchsorted(ends, begins, "right")
    cut = slices[source]
    cut[:, 1] += begins - (ends - lengths)[source]
    cut[:, 2] = cut[:, 1] + np.diff(bounds)
    return cut, np.searchsorted(points, begins, "right")


def _rows(slices: Slices, row_of: npt.NDArray[np.int64], rows: int) -> tuple[PackedRows, Slices]:
    """Sort slices by their rows. Those of row number `rows` are left over."""
    by_row = np.argsort(row_of, kind="stable")
    slices = slices[by_row]
    ends = np.cumsum(np.bincount(row_of, minlength=rows)[:rows])
    kept = int(ends[-1]) if rows else 0
    return PackedRows(slices[:kept], ends), slices[kept:]
