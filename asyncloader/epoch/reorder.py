"""Turns completion order into task order. Pure.

Data path: worker -> scheduler -> [reorder] -> delivery -> consumer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Returns items in the order of their sequence numbers, whatever the order in which they arrive.

    Every number from 0 on must be either pushed or skipped, once. `push` and `skip` return at once the items that have
    become deliverable.

    Raises:
        ValueError: a number was passed twice.
    """

    __slots__ = ("_held", "_next", "_skipped")

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}
        self._skipped: set[int] = set()

    @property
    def next_seq(self) -> int:
        """The number of the next item to be returned."""
        return self._next

    def __len__(self) -> int:
        """Number of items held back because an earlier item is missing."""
        return len(self._held)

    def push(self, seq: int, item: T) -> list[T]:
        """Add item number `seq`. Returns the items that are now in order (perhaps none)."""
        if seq == self._next and not self._held and not self._skipped:
            self._next += 1  # the common case: nothing waits, nothing is skipped
            return [item]
        self._check_new(seq)
        self._held[seq] = item
        return self._release()

    def skip(self, seq: int) -> list[T]:
        """Skip number `seq`, which will never come. Returns the items that are now in order."""
        self._check_new(seq)
        self._skipped.add(seq)
        return self._release()

    def drain(self) -> list[T]:
        """Remove and return everything that is held back, in order."""
        held = [self._held[seq] for seq in sorted(self._held)]
        self._held.clear()
        return held

    def _check_new(self, seq: int) -> None:
        if seq < self._next or seq in self._held or seq in self._skipped:
            raise ValueError(f"sequence number {seq} came twice (waiting for {self._next})")

    def _release(self) -> list[T]:
        out: list[T] = []
        while True:
            if self._next in self._held:
                out.append(self._held.pop(self._next))
            elif self._next in self._skipped:
                self._skipped.remove(self._next)
            else:
                return out
            self._next += 1
