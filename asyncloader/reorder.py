"""Completion order becomes task order. Pure: a cursor and a dictionary.

Data path: worker -> ring -> [reorder] -> pin_memory / device -> consumer.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["ReorderBuffer"]

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Gives items back in the order of their sequence numbers, whatever the order in which they come.

    Every number from 0 on must be either pushed or skipped, once. Nothing is held longer than it must be: `push`
    returns at once what has become deliverable.

    Raises:
        ValueError: a number comes twice.
    """

    __slots__ = ("_held", "_next", "_skipped")

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, T] = {}
        self._skipped: set[int] = set()

    @property
    def next_seq(self) -> int:
        """The number that is waited for."""
        return self._next

    def __len__(self) -> int:
        """Items held back because an earlier one is missing."""
        return len(self._held)

    def push(self, seq: int, item: T) -> list[T]:
        """Take item number `seq`; return the items that are now in order (perhaps none)."""
        if seq == self._next and not self._held and not self._skipped:
            self._next += 1  # the common case: nothing waits, nothing is skipped
            return [item]
        self._check_new(seq)
        self._held[seq] = item
        return self._release()

    def skip(self, seq: int) -> list[T]:
        """Number `seq` will never come; return the items that this sets free."""
        self._check_new(seq)
        self._skipped.add(seq)
        return self._release()

    def drain(self) -> list[T]:
        """Give up: everything that is held back, in order. Nothing is held afterwards."""
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
