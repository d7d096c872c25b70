"""A set of the objects of one kind that exist in this process, for hooks that run at a fork or at exit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """A set that keeps nothing alive. Any thread may add to it while others read it; it must hash by identity."""

    def __init__(self) -> None:
        # Not `weakref.WeakSet`, which is iterated in Python code, and fails if another thread adds an object at the
        # same time. And no lock: in the child of a fork it may be held by a thread that does not exist there.
        self._references: set[weakref.ref[T]] = set()

    def add(self, each: T) -> None:
        """Add an object; it leaves the set when it is freed."""
        self._references.add(weakref.ref(each, self._references.discard))

    def __iter__(self) -> Iterator[T]:
        """Iterate over the objects that exist now; later additions do not come."""
        # The copy is one step of the interpreter, as is each change: no other thread can come in between.
        for reference in self._references.copy():
            each = reference()
            if each is not None:
                yield each
