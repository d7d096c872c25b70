"""Iterators that survive an exception from outside, as Ctrl-C is: the next call gives what the failed one would have.

Data path: sampler -> [surviving] -> scheduler. Pure.

A generator is over once an exception has left it. If Ctrl-C strikes in a sampler that is one, the epoch ends there, and
looks complete. So the iterators of our samplers are classes, whose `__next__` changes its state last, and all at once:
CPython raises KeyboardInterrupt where a call returns, a function begins or a loop jumps back, so not between plain
assignments and the `return` that follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Restarting(Iterator[T], Generic[T]):
    """What generators yield that can begin at any position; one that failed is replaced by another.

    Args:
        begin: returns the items from a position on.
        position: of the first item.
    """

    def __init__(self, begin: Callable[[int], Iterator[T]], position: int) -> None:
        self._begin = begin
        self._position = position
        self._items: Iterator[T] | None = None

    def __next__(self) -> T:
        try:
            items = self._items
            if items is None:
                items = self._items = self._begin(self._position)
            item = next(items)
        except StopIteration:
            raise
        except BaseException:
            self._items = None
            raise
        self._position += 1
        return item


class Blocks(Iterator[T], Generic[T]):
    """Items that are computed block by block.

    Args:
        block: returns the items from a position on, any number of them: a list of its own; empty at the end.
        position: of the first item.
    """

    def __init__(self, block: Callable[[int], list[T]], position: int) -> None:
        self._make = block
        self._items: Iterator[T] = iter(())
        self._next = position  # of the first item of the next block

    def __next__(self) -> T:
        for item in self._items:  # takes one; of a built-in iterator, so this calls no Python code
            return item
        block = self._make(self._next)
        items, size = iter(block), len(block)
        self._items = items
        self._next += size
        for item in items:
            return item
        raise StopIteration


class Groups(Iterator[T], Generic[T]):
    """Groups of items that follow one another, each turned into something.

    Args:
        begin: returns the iterator of the items, when the first group is asked for. Items that were taken for a group
            that was interrupted stay in it. If `begin` itself fails, there are no groups, as with a generator.
        size: of a group; the last one may have fewer, or none.
        make: returns what a group is turned into, given its number and items; may be called again for the same group.
            None: nothing, so the next group's turn comes.
        number: of the first group.
    """

    def __init__(
        self, begin: Callable[[], Iterator[Any]], size: int, make: Callable[[int, list[Any]], T | None], number: int = 0
    ) -> None:
        self._begin = begin
        self._items: Iterator[Any] | None = None
        self._size = size
        self._make = make
        self._number = number
        self._group: list[Any] = []
        self._over = False

    def __next__(self) -> T:
        while not self._over:
            if self._items is None:
                try:
                    self._items = self._begin()
                except Exception:  # not Ctrl-C
                    self._over = True
                    raise
            group, fresh = self._group, list[Any]()
            # In C: an item that was taken is in the list.
            group.extend(islice(self._items, self._size - len(group)))
            over = len(group) < self._size
            made = self._make(self._number, group)
            self._group, self._over = fresh, over
            self._number += 1
            if made is not None:
                return made
        raise StopIteration
