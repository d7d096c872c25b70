"""Keeps batches that several loaders read: each is made once, and kept for a while for slower loaders. Pure.

Data path: worker_host -> [epoch_cache] -> worker connections of the loaders that share.

The first connection that asks for a batch makes it; later ones wait in line until it is made. If making it fails (an
error, a death, a loader that leaves), the next connection in line makes it. When the batches take too many bytes the
oldest are dropped.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple, TypeAlias

from asyncloader.workers.ipc.wire import Result


class MadeBatch(NamedTuple):
    """A batch as a process has made it.

    Attributes:
        result: its description; the task in it is the maker's.
        template: its template.
        payload: its bytes.
        bad: records of samples that raised, packed; empty if none did.
    """

    result: Result
    template: bytes
    payload: bytes
    bad: bytes


Waiter: TypeAlias = Callable[[MadeBatch | None], bool]
"""Called with the batch, or with None, which asks it to make the batch; returns whether it does. It may call `ask`,
`leave` and `failed`, and must not raise."""

_ENTRY_BYTES = 1500  # of a batch's key and Python's objects, besides its own bytes
_MOST_WAITING = 1 << 17


class EpochCache:
    """The batches of one node.

    Args:
        most_bytes: that are kept, at most.
        most_waiting: batches that are being made, and loaders' tasks that wait for them, at most.
    """

    def __init__(self, most_bytes: int, most_waiting: int = _MOST_WAITING) -> None:
        self._most = most_bytes
        self._most_waiting = most_waiting
        self._bytes = 0
        self._users = 0
        self._made: dict[Hashable, MadeBatch] = {}  # the oldest first
        self._waiting: dict[Hashable, OrderedDict[Waiter, None]] = {}  # of batches that are being made
        self._entries = 0  # of the above, with their keys
        self._failures: deque[Hashable] = deque()
        self._failing = False

    @property
    def nbytes(self) -> int:
        """Bytes of the batches."""
        return self._bytes

    def join(self) -> None:
        """Count a worker connection that uses the cache."""
        self._users += 1

    def part(self) -> None:
        """Count a worker connection that no longer uses the cache. The last drops all batches."""
        self._users -= 1
        if not self._users:
            self.clear()

    def ask(self, key: Hashable, waiter: Waiter) -> MadeBatch | Literal["make", "wait"]:
        """Ask for a batch. Returns it, or whether to make it or to wait for it.

        Args:
            key: of all that decides on the batch's content. Its size should not depend on the loader.
            waiter: called later, if the answer is "wait".
        """
        made = self._made.get(key)
        if made is not None:
            return made
        if self._entries >= self._most_waiting:
            # Not noted, so that loaders cannot make the lines grow without end. The batch may be made twice.
            return "make"
        self._entries += 1
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = OrderedDict()
            return "make"
        waiting[waiter] = None
        return "wait"

    def leave(self, key: Hashable, waiter: Waiter) -> None:
        """Take a waiter out of the line for this batch."""
        waiting = self._waiting.get(key)
        if waiting is not None and waiter in waiting:
            del waiting[waiter]
            self._entries -= 1

    def made(self, key: Hashable, batch: MadeBatch) -> None:
        """Store the batch that a process has made, and give it to the worker connections that wait for it."""
        # The line is removed before its waiters are called: they may ask for the same batch again.
        waiting = self._taken(key)
        size = _size(batch)
        if size <= self._most and key not in self._made:  # a larger batch would drop all others, and then itself
            self._made[key] = batch
            self._bytes += size
        # The oldest go first: a loader that is slower than the rest by more than the batches kept makes its own.
        while self._bytes > self._most:
            self._bytes -= _size(self._made.pop(next(iter(self._made))))
        for waiter in waiting:
            waiter(batch)

    def failed(self, key: Hashable) -> None:
        """Have the next worker connection in line make the batch, because the first failed to."""
        # A waiter that cannot make its batch fails in turn, and its connection's other batches with it: this is called
        # from inside itself, once for each. The outermost call carries them out, so that the stack stays short.
        self._failures.append(key)
        if self._failing:
            return
        self._failing = True
        try:
            while self._failures:
                self._pass_on(self._failures.popleft())
        finally:
            self._failing = False

    def _pass_on(self, key: Hashable) -> None:
        waiting = self._waiting.get(key)
        # The line may change in each call: a waiter may leave others, or ask again.
        while waiting:
            waiter, _ = waiting.popitem(last=False)
            self._entries -= 1
            if waiter(None):
                return
        self._taken(key)

    def _taken(self, key: Hashable) -> OrderedDict[Waiter, None]:
        """Remove and return the line for this batch."""
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return OrderedDict()
        self._entries -= 1 + len(waiting)
        return waiting

    def clear(self) -> None:
        """Drop the batches. Lines of waiters stay: their batches are still being made."""
        self._made.clear()
        self._bytes = 0


def _size(batch: MadeBatch) -> int:
    return len(batch.payload) + len(batch.template) + len(batch.bad) + _ENTRY_BYTES
