"""`JoinSequences` makes windows of sequences in the workers; `WindowPacker` packs them as they come.

Data path: worker: dataset -> [windows: `JoinSequences`] -> codec -> ring -> [windows: `WindowPacker`] -> packed_loader.

The rows of a window follow from its sequences, and from the remainder of the window before. So a position is: the
loader's state before the window; how many of its rows were delivered; and which sequences of the window before were
left over, by their numbers. They are found again by reading that window once more. The remainder is therefore
carried to the next window only, and no farther: there it makes a row, however short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncloader.errors import StateError
from asyncloader.packing.bin_packing import NOTHING, STRATEGIES, Slices, Strategy, pack, whole
from asyncloader.packing.collate import PackSequences, described, join, join_fields
from asyncloader.packing.sampler import rule_of
from asyncloader.samplers.argument_checks import check_positive


class Window(NamedTuple):
    """Sequences that are packed together, joined.

    Attributes:
        fields: those with an element for each token, tensors that have the sequences one behind the other; and lists
            with a value of each sequence.
        lengths: tokens of each sequence, positive, int64.
        max_tokens, strategy: see `pack`.
    """

    fields: dict[str, Any]
    lengths: npt.NDArray[np.int64]
    max_tokens: int
    strategy: Strategy


def is_consistent(window: Window) -> bool:
    """Return whether a window is as `JoinSequences` makes it. A service's node may have made it otherwise."""
    fields, lengths, max_tokens, strategy = window
    if not isinstance(lengths, np.ndarray) or lengths.dtype != np.int64 or lengths.ndim != 1:
        return False
    count = len(lengths)
    if not isinstance(fields, dict) or type(max_tokens) is not int or max_tokens < 1 or strategy not in STRATEGIES:
        return False
    # Python's integers: the sum of hostile lengths may not fit into 64 bits.
    total = sum(lengths.tolist())
    if count and (int(lengths.min()) < 1 or not any(isinstance(each, torch.Tensor) for each in fields.values())):
        return False
    return all(
        each.ndim > 0 and len(each) == total
        if isinstance(each, torch.Tensor)
        else type(each) is list and len(each) == count
        for each in fields.values()
    )


class JoinSequences:
    """A `collate_fn` for loaders whose batches `PackedLoader` packs: a batch is a window of sequences.

    Sequences are as `PackSequences` takes them. Those without tokens are left out. A sequence of more than `max_tokens`
    tokens is an error, unless the strategy cuts sequences: shorten or drop it before, by ``decode=`` for example.

    Args:
        max_tokens: most tokens of a row.
        strategy: as of `PackingSampler`. Default ``"best_fit"``.

    Raises:
        TypeError: a sequence has no field of tokens.
        ValueError: an argument is out of range; a sequence is too long; or its fields differ in length, or from those
            of other sequences.
    """

    def __init__(self, max_tokens: int, *, strategy: Strategy = "best_fit", **removed: Any) -> None:
        for name in removed:
            raise TypeError(
                f"JoinSequences has no {name}=: domain= and on_too_long= were removed. Use a loader for each domain, "
                "and shorten or drop long sequences by decode=; PackingSampler has both, for sequences of known lengths"
            )
        self.max_tokens = check_positive("max_tokens", max_tokens)
        self.strategy: Strategy = strategy
        self._splits = rule_of(None, strategy) == "split"

    def __call__(self, samples: Sequence[Any]) -> Window:
        """Return the window of these samples, one or more."""
        joined, lengths = join_fields(samples)
        if not self._splits and int(lengths.max()) > self.max_tokens:
            number = int(lengths.argmax())
            raise ValueError(
                f"sequence {number} of the batch has {lengths[number]} tokens, which is more than "
                f"max_tokens={self.max_tokens}: raise that, choose a strategy that cuts sequences, or shorten or drop "
                f"this one by decode=. It is {samples[number]!r:.200}"
            )
        kept = lengths > 0
        return Window(joined if kept.any() else {}, lengths[kept], self.max_tokens, self.strategy)


Carried = list[list[int]]
"""The remainder of a window: ``[sequence, start, stop]`` of each slice."""

_OTHERS = (
    "the state was saved of other sequences than those that the loader reads now: use the dataset and the options of "
    "then, or begin anew without the state"
)


class RowPosition(NamedTuple):
    """A place between two rows."""

    state: Any
    """The loader's, before the first window that will be added."""
    carried: Carried
    """The remainder of that window, whose rows were delivered; empty: it is packed like the others."""
    delivered: int
    """Rows of the next window that is packed that were delivered."""
    options: dict[str, Any] | None
    """Of the windows when these rows were packed (`options_of`); None: no window was packed."""


class WindowPacker:
    """Packs the windows of one epoch from a position on. `collate` arranges a row; `drop_last` leaves out the remainder
    of the last window.
    """

    def __init__(self, collate: PackSequences, position: RowPosition, *, drop_last: bool) -> None:
        self._collate = collate
        self._drop_last = drop_last
        self._position = position
        self._sought = position.carried
        # The loader's state before the window before, and the remainder of it: its numbers, and as a window.
        self._before: tuple[Any, Carried, Window | None] = None, [], None
        # Of the present window; None: no window was packed.
        self._rows: list[Slices] | None = None
        self._joined: Window | None = None
        self.delivered = position.delivered
        """Rows of the window that were delivered. The caller adds 1 when it returns a row."""
        self.over = False
        """Whether the end of the epoch was added."""
        self.asked = False
        """Whether the first row was asked for. The caller sets it."""

    @property
    def unbegun(self) -> bool:
        """Whether the first row was asked for, and no window was packed."""
        return self.asked and self._rows is None

    @property
    def position(self) -> RowPosition:
        """The position of a packer that continues with the next row."""
        return self._position._replace(delivered=self.delivered)

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
        window, options = read[0] if read else None, self._position.options
        if window is not None:
            _check(window)
            if self._rows is None and options is not None:
                # Delivered rows are known by their number alone: packed otherwise, sequences would be lost or repeated.
                _check_options(options, options_of(window))
            options = options_of(window)
        if self._sought:
            found = _find(window, np.array(self._sought, np.int64))
            self._before, self._sought = (state, self._sought, found), []
            del read[:]
            return
        before, carried, carry = self._before
        joined = _join(carry, window)
        rows, left = self._pack(joined, window is None)
        following = state, left.tolist(), None if window is None else _take(window, left)
        delivered = self.delivered if self._rows is None else 0
        if delivered > len(rows):
            raise StateError(_OTHERS)
        position = RowPosition(before if carried else state, carried, delivered, options)
        # No calls from here on: Ctrl-C cannot come between these assignments.
        self._position, self._before = position, following
        self._rows, self._joined, self.delivered = rows, joined, delivered
        self.over = window is None
        del read[:]

    def row(self) -> dict[str, Any] | None:
        """Return the next row of the window that was added, as `PackSequences` gives it; None: all were delivered."""
        if self._rows is None or self._joined is None or self.delivered >= len(self._rows):
            return None
        row = _take(self._joined, self._rows[self.delivered])
        return self._collate.arrange(row.fields, row.lengths, np.zeros(len(row.lengths), np.int64), 1)

    def _pack(self, joined: Window | None, last: bool) -> tuple[list[Slices], Slices]:
        """Return the rows of a window behind the carried sequences, and the remainder of it."""
        if joined is None:
            return [], NOTHING
        slices = whole(joined.lengths, np.arange(len(joined.lengths)))
        carry = self._before[2]
        own = 0 if carry is None else len(carry.lengths)
        rows, left = pack(slices, joined.max_tokens, joined.strategy)
        if len(left) and not last and (left[:, 0] >= own).all():
            return rows, left - (own, 0, 0)
        if len(left) and not (last and self._drop_last):
            rows.append(left)
        return rows, NOTHING


def options_of(window: Window) -> dict[str, Any]:
    """Return the options of `JoinSequences` by which a window's sequences are divided among rows."""
    # Earlier versions could pack domains apart.
    return {"max_tokens": window.max_tokens, "strategy": window.strategy, "domain": False}


def _check(window: Any) -> None:
    if not isinstance(window, Window):
        raise TypeError(
            f"PackedLoader packs windows of sequences, but the loader gave {type(window).__name__}: give the loader "
            "collate_fn=JoinSequences(...)"
        )
    if not is_consistent(window):
        raise ValueError("a window contradicts itself: its lengths, fields and options were not made together")


def _check_options(saved: dict[str, Any], here: dict[str, Any]) -> None:
    if saved["domain"] or saved["strategy"] not in STRATEGIES:
        raise StateError("the state is of rows that JoinSequences no longer makes: begin anew without the state")
    for name, before in saved.items():
        if before != here[name]:
            given, other = f"{name}={before!r:.100}", f"{name}={here[name]!r:.100}"
            raise StateError(
                f"the state was saved with {given} of JoinSequences, which now has {other}: rows would be others; use "
                f"{given}, or begin anew without the state"
            )


def _join(carry: Window | None, window: Window | None) -> Window | None:
    """Return a window of the sequences of both; None without sequences."""
    present = [each for each in (carry, window) if each is not None and len(each.lengths)]
    if len(present) < 2:
        return present[0] if present else None
    first, second = present
    here, before = (described(each.fields, _per_token(each)) for each in (second, first))
    if here != before:
        raise ValueError(f"all sequences should have the same fields, but some have {here}, and those before {before}")
    fields = {
        name: join([first.fields[name], value]) if isinstance(value, torch.Tensor) else [*first.fields[name], *value]
        for name, value in second.fields.items()
    }
    return second._replace(fields=fields, lengths=np.concatenate([first.lengths, second.lengths]))


def _per_token(window: Window) -> list[str]:
    return [name for name, value in window.fields.items() if isinstance(value, torch.Tensor)]


def _find(window: Window | None, slices: Slices) -> Window:
    """Return the slices of a window that a saved state names.

    Raises:
        StateError: the window does not have them.
    """
    lengths = np.zeros(0, np.int64) if window is None else window.lengths
    if window is None or slices[:, 0].max() >= len(lengths) or (slices[:, 2] > lengths[slices[:, 0]]).any():
        raise StateError(_OTHERS)
    return _take(window, slices)


def _take(window: Window, slices: Slices) -> Window:
    """Return a window of these slices as its sequences, in memory of its own."""
    numbers = slices[:, 0].tolist()
    begins = (np.cumsum(window.lengths) - window.lengths)[slices[:, 0], None]
    bounds = (slices[:, 1:] + begins).tolist()
    fields: dict[str, Any] = {}
    for name, value in window.fields.items() if numbers else ():
        if isinstance(value, list):
            fields[name] = [value[number] for number in numbers]
        else:
            fields[name] = join([value[start:stop] for start, stop in bounds])
    return window._replace(fields=fields, lengths=slices[:, 2] - slices[:, 1])
