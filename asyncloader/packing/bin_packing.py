"""The packing strategies: divides sequences among rows of at most `max_tokens` tokens. Pure.

Data path: [bin_packing] -> sampler; or [bin_packing] -> windows.

Sequences are given as slices, an int64 array of shape ``(n, 3)`` with a row ``(index, start, stop)`` for each: tokens
`start` to `stop` of sequence `index`. No slice is empty. Python code runs once per sequence for ``"best_fit"``, and
once per row for ``"wrap"``.

The row with the most room is not returned with the others. Its slices are left over, for the caller to pack with the
sequences that come next: so that few rows are short, however few sequences are packed at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Slices = npt.NDArray[np.int64]
Strategy = Literal["best_fit", "wrap"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

NOTHING: Slices = np.zeros((0, 3), np.int64)
NOTHING.flags.writeable = False


def whole(lengths: npt.NDArray[np.integer], indices: npt.NDArray[np.int64]) -> Slices:
    """Return the slices of whole sequences of these lengths."""
    slices = np.zeros((len(indices), 3), np.int64)
    slices[:, 0], slices[:, 2] = indices, lengths
    return slices


def pack(slices: Slices, max_tokens: int, strategy: Strategy) -> tuple[list[Slices], Slices]:
    """Pack slices. Slices that are longer than a row are cut, by every strategy.

    Args:
        slices: the slices to pack, shape ``(n, 3)``.
        max_tokens: most tokens of a row.
        strategy:
            ``"best_fit"``: the longest slices first, each to the fullest row that has room for it.
            ``"wrap"``: the slices in a row, one after the other, cut where a row is full.

    Returns:
        The rows, and the slices that are left over: those of the row with the most room, unless it is full.
    """
    if not len(slices):
        return [], NOTHING
    if strategy == "wrap":
        return _wrap(slices, max_tokens)
    slices = split_long(slices, max_tokens)
    # Stable, so that the result is defined: slices of the same length stay in their order.
    slices = slices[np.argsort(slices[:, 1] - slices[:, 2], kind="stable")]
    lengths = slices[:, 2] - slices[:, 1]
    row_of = np.array(_best_fit(lengths.tolist(), max_tokens))
    filled = np.zeros(int(row_of.max()) + 1, np.int64)
    np.add.at(filled, row_of, lengths)
    last = len(filled) - 1
    emptiest = last - int(np.argmin(filled[::-1]))  # the last of several
    if filled[emptiest] == max_tokens:
        return _rows(slices, row_of, last + 1)
    # Numbered behind the others: so it is the remainder.
    return _rows(slices, np.where(row_of == emptiest, last, row_of - (row_of > emptiest)), last)


def split_long(slices: Slices, max_tokens: int) -> Slices:
    """Cut slices that are longer than a row into slices of a row's length, and a shorter one."""
    parts = -(-(slices[:, 2] - slices[:, 1]) // max_tokens)
    if parts.max() == 1:
        return slices
    cut = np.repeat(slices, parts, axis=0)
    number = np.arange(len(cut)) - np.repeat(np.cumsum(parts) - parts, parts)
    cut[:, 1] += number * max_tokens
    cut[:, 2] = np.minimum(cut[:, 2], cut[:, 1] + max_tokens)
    return cut


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


def _wrap(slices: Slices, max_tokens: int) -> tuple[list[Slices], Slices]:
    """Cut slices that lie one behind the other where a row is full."""
    lengths = slices[:, 2] - slices[:, 1]
    ends = np.cumsum(lengths)
    full = int(ends[-1]) // max_tokens
    bounds = np.unique(np.concatenate([[0], ends, np.arange(1, full + 1) * max_tokens]))
    begins = bounds[:-1]
    source = np.searchsorted(ends, begins, "right")
    cut = slices[source]
    cut[:, 1] += begins - (ends - lengths)[source]
    cut[:, 2] = cut[:, 1] + np.diff(bounds)
    return _rows(cut, begins // max_tokens, full)


def _rows(slices: Slices, row_of: npt.NDArray[np.int64], rows: int) -> tuple[list[Slices], Slices]:
    """Sort slices by their rows. Those of row number `rows` are left over."""
    ends = np.cumsum(np.bincount(row_of, minlength=rows)[:rows])
    *found, left = np.split(slices[np.argsort(row_of, kind="stable")], ends)
    return found, left
