"""Decides which open objects of one worker are used again, and which are closed: the least recently used, first.

Data path: none; behind `worker_resource.py`, which opens and closes. Pure: no locks, no clock, no user code.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Handle(Generic[R]):
    """One open object, or one that is being opened.

    Attributes:
        key: the key that it was opened for.
        value: the object, once it is open.
        users: how many have it now.
        opener: the thread or task that opens it; None once that is over.
        ready: the event that its other users wait for while it is opened.
    """

    __slots__ = ("key", "opener", "ready", "users", "value")

    def __init__(self, key: Hashable, opener: Any, ready: Any) -> None:
        self.key = key
        self.users = 1
        self.value: R | None = None
        self.opener = opener
        self.ready = ready


class HandleTable(Generic[R]):
    """The open objects of one resource in one worker.

    At most ``max(most, in use)`` are open at any time: an object in use is never closed, and an object that is not in
    use is closed before another is opened, or when its user gives it back, where there are too many.

    Args:
        most: objects to keep open, at least 1; 0 once nothing is kept any more.
        shared: whether several users of a key have one object. Otherwise each has its own.
    """

    def __init__(self, most: int, *, shared: bool) -> None:
        self.most = most
        self._shared = shared
        self.every: set[Handle[R]] = set()
        """All that are open, being opened, or in use."""
        self._idle: dict[Handle[R], None] = {}  # the least recently used first
        self._of_key: dict[Hashable, list[Handle[R]]] = {}  # those that the next user of a key may have

    @property
    def idle(self) -> int:
        """Number of objects that are open and not in use."""
        return len(self._idle)

    def take(self, key: Hashable) -> Handle[R] | None:
        """Return the object for this key that was used last, for one user more; None if one has to be opened."""
        found = self._of_key.get(key)
        if not found:
            return None
        handle = found[-1]
        handle.users += 1
        self._idle.pop(handle, None)
        if not self._shared:
            self._forget(handle)
        return handle

    def reserve(self, key: Hashable, opener: Any, ready: Any) -> tuple[Handle[R], list[Handle[R]]]:
        """Return a new entry, which its user opens, and the objects to close before that."""
        handle: Handle[R] = Handle(key, opener, ready)
        self.every.add(handle)
        if self._shared:
            self._of_key[key] = [handle]
        return handle, self.excess()

    def give_back(self, handle: Handle[R]) -> list[Handle[R]]:
        """Note that one user less has it. Returns the objects to close."""
        handle.users -= 1
        # Not of this table: it was opened before a fork. Or opening it failed while another user waited for it.
        if handle.users or handle not in self.every:
            return []
        self._idle[handle] = None
        if not self._shared:
            self._of_key.setdefault(handle.key, []).append(handle)
        return self.excess()

    def remove(self, handle: Handle[R]) -> None:
        """Forget an entry that could not be opened."""
        self.every.discard(handle)
        if self._shared:
            self._forget(handle)

    def excess(self) -> list[Handle[R]]:
        """Take out the objects to close: those not in use, as far as there are too many."""
        expired: list[Handle[R]] = []
        while self._idle and len(self.every) > self.most:
            handle = next(iter(self._idle))
            del self._idle[handle]
            self._forget(handle)
            self.every.discard(handle)
            expired.append(handle)
        return expired

    def _forget(self, handle: Handle[R]) -> None:
        found = self._of_key.get(handle.key, [])
        if handle in found:
            found.remove(handle)
            if not found:
                del self._of_key[handle.key]
