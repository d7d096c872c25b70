"""Packs windows of sequences as they come, and knows from where a row is found again.

Data path: ring -> windows -> [window_packer] -> packed_loader.

The rows of a window follow from its sequences, and from the remainder of the window before. So a position is: the
loader's state before the window; how many of its rows were delivered; and which sequences of the window before were
left over, by their numbers. They are found again by reading that window once more. The remainder is therefore
carried to the next window only, and no farther: there it makes a row, however short.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncloader.errors import StateError
from asyncloader.packing.bin_packing import NOTHING, Slices, pack
from asyncloader.packing.collate import PackSequences
from asyncloader.packing.fields import join
from asyncloader.packing.windows import PackingOptions, Window, is_consistent

Carried = list[list[int]]
"""The remainder of a window: ``[sequence, start, stop]`` of each slice."""

_OTHERS = (
    "the state was saved of other sequences than those that the loader reads now: use the dataset and the options of "
    "then, or begin anew without the state"
)


class WindowPacker:
    """Packs the windows of one epoch.

    Args:
        collate: arranges a row.
        drop_last: leave out the remainder of the last window.
        state: the loader's state before the first window that will be added.
        carried: the remainder of that window, whose rows were delivered; empty: it is packed like the others.
        delivered: rows of the next window that is packed that were delivered.
        options: of the windows when these rows were packed; None: no window was packed.
    """

    def __init__(
        self,
        collate: PackSequences,
        *,
        drop_last: bool,
        state: Any,
        carried: Carried,
        delivered: int,
        options: PackingOptions | None = None,
    ) -> None:
        self._collate = collate
        self._drop_last = drop_last
        self._position: tuple[Any, Carried] = state, carried
        self._sought = carried
        self._skip = delivered
        # Of the window before: the loader's state before it, and the remainder of it.
        self._before: Any = None
        self._carried: Carried = []
        self._carry: Window | None = None
        # Of the present window.
        self._sources: tuple[_Source, _Source] | None = None
        self._rows: list[Slices] = []
        self.delivered = delivered
        """Rows of the window that were delivered. The caller adds 1 when it returns a row."""
        self.over = False
        """Whether the end of the epoch was added."""
        self._options = options
        self.asked = False
        """Whether the first row was asked for. The caller sets it."""

    @property
    def unbegun(self) -> bool:
        """Whether the first row was asked for, and no window was packed."""
        return self.asked and self._sources is None

    @property
    def position(self) -> tuple[Any, Carried, int, PackingOptions | None]:
        """The arguments `state`, `carried`, `delivered` and `options` of a packer that continues with the next row."""
        return *self._position, self.delivered, self._options

    def add(self, state: Any, read: list[Window]) -> None:
        """Pack a window that was read at this state of the loader, and remove it from the list. An empty list: the
        epoch has ended. The rows before must have been delivered. May be called again if it was interrupted.

        Raises:
            StateError: the sequences are not those of the state from which the epoch continues, or are packed by other
                options.
            ValueError: the window's sequences have other fields than those of the window before; or it contradicts
                itself.
            TypeError: the loader's batches are no windows.
        """
        window = read[0] if read else None
        if window is not None and not isinstance(window, Window):
            raise TypeError(
                f"PackedLoader packs windows of sequences, but the loader gave {type(window).__name__}: give the "
                "loader collate_fn=JoinSequences(...)"
            )
        if window is not None and not is_consistent(window):
            raise ValueError("a window contradicts itself: its lengths, fields and options were not made together")
        options = self._options if window is None else PackingOptions.of(window)
        if self._sources is None and self._options is not None and options is not None:
            # Delivered rows are known by their number alone: packed otherwise, sequences would be lost or repeated.
            _check_options(self._options, options)
        if self._sought:
            slices = np.array(self._sought, np.int64)
            lengths = np.zeros(0, np.int64) if window is None else window.lengths
            if slices[:, 0].max() >= len(lengths) or (slices[:, 2] > lengths[slices[:, 0]]).any():
                raise StateError(_OTHERS)
            carry = _take(window, slices)
            self._before, self._carried, self._carry, self._sought = state, self._sought, carry, []
            del read[:]
            return
        sources = _Source(self._carry), _Source(window)
        rows, left = self._pack(self._carry, window)
        carry, numbers = _take(window, left), left.tolist()
        if self._skip > len(rows):
            raise StateError(_OTHERS)
        # No calls from here on: Ctrl-C cannot come between these assignments.
        self._options = options
        self._position = (self._before if self._carried else state), self._carried
        self._sources, self._rows, self.delivered, self._skip = sources, rows, self._skip, 0
        self._before, self._carried, self._carry = state, numbers, carry
        self.over = window is None
        del read[:]

    def row(self) -> dict[str, Any] | None:
        """Return the next row of the window that was added, as `PackSequences` gives it; None: all were delivered."""
        if self.delivered >= len(self._rows) or self._sources is None:
            return None
        slices = self._rows[self.delivered]
        old, new = self._sources
        carried = slices[:, 0] < old.size
        batch: dict[str, Any] = {}
        for name in new.fields or old.fields:
            values = new.cut(name, slices[~carried] - (old.size, 0, 0))
            if carried.any():
                first, second = iter(old.cut(name, slices[carried])), iter(values)
                values = [next(first) if each else next(second) for each in carried.tolist()]
            batch[name] = join(values) if isinstance(values[0], torch.Tensor) else values
        lengths = slices[:, 2] - slices[:, 1]
        return self._collate.arrange(batch, lengths, np.zeros(len(slices), np.int64), 1)

    def _pack(self, carry: Window | None, window: Window | None) -> tuple[list[Slices], Slices]:
        """Return the rows of a window, and the remainder of it. The sequences of `carry` are numbered before it."""
        present = [each for each in (carry, window) if each is not None and len(each.lengths)]
        if not present:
            return [], NOTHING
        before, now = _named(present[0]), _named(present[-1])
        if before != now:
            raise ValueError(
                f"all sequences should have the same fields, but some have {now}, and those before {before}"
            )
        lengths = np.concatenate([each.lengths for each in present])
        slices = np.zeros((len(lengths), 3), np.int64)
        slices[:, 0] = np.arange(len(lengths))
        slices[:, 2] = lengths
        own = 0 if carry is None else len(carry.lengths)
        rows: list[Slices] = []
        kept: list[Slices] = []
        for members in _by_domain(present):
            packed, left = pack(slices[members], present[-1].max_tokens, present[-1].strategy)
            rows += map(packed.row, range(len(packed)))
            if not len(left):
                continue
            if window is not None and (left[:, 0] >= own).all():
                kept.append(left - (own, 0, 0))
            elif window is not None or not self._drop_last:
                rows.append(left)
        return rows, np.concatenate(kept) if kept else NOTHING


def _check_options(saved: PackingOptions, here: PackingOptions) -> None:
    for name, before, now in zip(saved._fields, saved, here, strict=True):
        if before != now:
            given, other = _shown(name, before), _shown(name, now)
            raise StateError(
                f"the state was saved with {given} of JoinSequences, which now has {other}: rows would be others; use "
                f"{given}, or begin anew without the state"
            )


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{name}={'a function' if value else None}"
    return f"{name}={value!r:.100}"


def _named(window: Window) -> list[str]:
    """Return the names of a window's fields; with a note, if they have no element for each token."""
    fields = window.fields.items()
    return sorted(f"{name}" if isinstance(value, torch.Tensor) else f"{name} (one value)" for name, value in fields)


def _by_domain(windows: list[Window]) -> list[list[int]]:
    """Return the numbers of each domain's sequences, counted over all windows."""
    members: dict[Any, list[int]] = {}
    number = 0
    for window in windows:
        for domain in [None] * len(window.lengths) if window.domains is None else window.domains:
            members.setdefault(domain, []).append(number)
            number += 1
    return list(members.values())


class _Source:
    """The sequences of a window, or of none."""

    def __init__(self, window: Window | None) -> None:
        self.fields: dict[str, Any] = {} if window is None else window.fields
        lengths = np.zeros(0, np.int64) if window is None else window.lengths
        self.size = len(lengths)
        self._begins = np.cumsum(lengths) - lengths

    def cut(self, name: str, slices: Slices) -> list[Any]:
        """Return a field of each slice: a view of its tokens, or its sequence's value."""
        if not len(slices):
            return []
        value = self.fields[name]
        if isinstance(value, list):
            return [value[number] for number in slices[:, 0].tolist()]
        bounds = slices[:, 1:] + self._begins[slices[:, 0], None]
        return [value[start:stop] for start, stop in bounds.tolist()]


def _take(window: Window | None, slices: Slices) -> Window | None:
    """Return a window of these slices as its sequences, in memory of its own; None without slices."""
    if window is None or not len(slices):
        return None
    source = _Source(window)
    parts = {name: source.cut(name, slices) for name in window.fields}
    fields = {name: join(values) if isinstance(values[0], torch.Tensor) else values for name, values in parts.items()}
    domains = None if window.domains is None else [window.domains[number] for number in slices[:, 0].tolist()]
    return window._replace(fields=fields, lengths=slices[:, 2] - slices[:, 1], domains=domains)
