"""Iterators that survive Ctrl-C: the call after a KeyboardInterrupt returns the result that the failed call lost.

Data path: sampler -> [surviving] -> scheduler. Pure.

A generator ends with an exception that leaves it. If Ctrl-C interrupts a sampler that is a generator, it is read anew
up to its position (`IndexStream`). So that this is not needed, the iterators of our samplers are classes whose
`__next__` changes its state last, and all at once: CPython raises KeyboardInterrupt where a call returns, a function
begins or a loop jumps back, and so not between plain assignments and the `return` that follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from asyncloader.errors import interrupts, left_a_generator

T = TypeVar("T")


class Restarting(Iterator[T], Generic[T]):
    """The items of a generator that can begin at any position. A generator that failed is replaced.

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
            # The generator has ended: the next call begins another at the position of the lost item.
            self._items = None
            raise
        self._position += 1
        return item


class Blocks(Iterator[T], Generic[T]):
    """Items that are computed block by block.

    Args:
        block: returns a new list of the items from a position on, of any length; empty at the end.
        position: of the first item.
    """

    def __init__(self, block: Callable[[int], list[T]], position: int) -> None:
        self._make = block
        self._items: Iterator[T] = iter(())
        self._next = position  # of the first item of the next block

    def __next__(self) -> T:
        # Takes one item. A built-in iterator runs no Python code, in which Ctrl-C could lose the item.
        for item in self._items:
            return item
        block = self._make(self._next)
        # The calls come before the assignments: Ctrl-C may come at a call, and the state is then unchanged.
        items, size = iter(block), len(block)
        self._items = items
        self._next += size
        for item in items:
            return item
        raise StopIteration


class Groups(Iterator[T], Generic[T]):
    """Turns groups of consecutive items into other objects.

    Args:
        begin: returns the iterator of the items; called for the first group. Items that were taken for an interrupted
            group stay in the group. If it or `begin` raises, this iterator ends, like a generator; but not if a store
            failed, or with `goes_on`.
        size: of a group; the last group may have fewer items, or none.
        make: returns the object for a group's number and items; may be called again for the same group. None: the group
            is skipped.
        number: of the first group.
        goes_on: the items come on after an error, if their own iterator goes on.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        size: int,
        make: Callable[[int, list[Any]], T | None],
        number: int = 0,
        *,
        goes_on: bool = False,
    ) -> None:
        self._goes_on = goes_on
        self._begin = begin
        self._items: Iterator[Any] | None = None
        self._size = size
        self._make = make
        self._number = number
        self._group: list[Any] = []
        self._over = self._broken = False

    def __next__(self) -> T:
        while not self._over:
            group, fresh, before = self._group, list[Any](), len(self._group)
            try:
                if self._items is None:
                    self._items = self._begin()
                # In C: an item that was taken is in the list, whenever Ctrl-C comes.
                group.extend(islice(self._items, self._size - len(group)))
            except BaseException as error:
                self._over, self._broken = not (self._goes_on or interrupts(error)), left_a_generator(error)
                raise
            over = len(group) < self._size
            if self._broken and len(group) == before:  # its end is no end: the group is read anew elsewhere
                self._over = True
                break
            self._broken = False
            made = self._make(self._number, group)
            self._group, self._over = fresh, over
            self._number += 1
            if made is not None:
                return made
        raise StopIteration
