"""The position of an iterator as a value: a delivery makes another, which one assignment puts in its place. Pure.

Data path: none; part of progress. Ctrl-C may come between any two calls, and leaves the old position or the new one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asyncloader.base.events import PackedCursor

_START = attrgetter("start")


class Position(NamedTuple):
    """The steps that were delivered, and the states of the dataset there.

    Attributes:
        step: the number of steps without a gap.
        beyond: later steps, as ranges in ascending order, of which none touches another. So a straggler costs one
            range, however many steps came after it.
        delivered: the last task that was delivered.
        failed: the task whose error the user got last, of a map dataset.
        unread: of a stream, the arguments of `Progress.delivered` for the error that the user got last.
        next_worker: the worker whose turn it is.
        given: the number of batches of each copy of the dataset.
        cursors: the last cursor of each copy.
        padding: samples at the end of the last batch that only keep the ranks even.
    """

    step: int
    beyond: tuple[range, ...] = ()
    delivered: int | None = None
    failed: int | None = None
    unread: tuple[int, int, PackedCursor | None] | None = None
    next_worker: int = 0
    given: tuple[int, ...] = ()
    cursors: tuple[PackedCursor | None, ...] = ()
    padding: int = 0

    def with_cursor(self, copy: int, cursor: PackedCursor | None) -> Position:
        """The position with another cursor of a copy."""
        return self._replace(cursors=(*self.cursors[:copy], cursor, *self.cursors[copy + 1 :]))

    def past(self, numbers: Iterable[int]) -> Position:
        """The position with these steps done, too."""
        step, beyond = self.step, self.beyond
        for number in numbers:
            step, beyond = done(step, beyond, number)
        return self._replace(step=step, beyond=beyond)


def done(step: int, beyond: tuple[range, ...], number: int) -> tuple[int, tuple[range, ...]]:
    """`Position.step` and `Position.beyond` after one more step."""
    if number == step:
        joins = bool(beyond) and beyond[0].start == number + 1
        return (beyond[0].stop, beyond[1:]) if joins else (number + 1, beyond)
    first = last = bisect_right(beyond, number, key=_START)
    start, stop = number, number + 1
    if first and beyond[first - 1].stop >= number:
        first -= 1
        start, stop = beyond[first].start, max(stop, beyond[first].stop)
    if last < len(beyond) and beyond[last].start == stop:
        stop = beyond[last].stop
        last += 1
    return step, (*beyond[:first], range(start, stop), *beyond[last:])


def ranges(numbers: Iterable[int]) -> tuple[range, ...]:
    """`Position.beyond` of these steps."""
    found: list[range] = []
    for number in sorted(numbers):
        if found and found[-1].stop >= number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return tuple(found)
