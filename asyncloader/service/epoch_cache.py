"""Batches that several loaders want: each is made once, and kept for a while for those who come later. Pure.

Data path: lane_host -> [epoch_cache] -> lanes of the loaders that share.

A loader whose task nobody has is told to make the batch; others that want it meanwhile wait for it. If it is not made
(an error, a death, a loader that leaves), the next one in the line makes it. The oldest batches go when there are too
many bytes: a loader that is slower than the rest by more than that makes its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple, TypeAlias

from asyncloader.workers.ipc.wire import Result

__all__ = ["EpochCache", "MadeBatch", "Waiter"]


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


Waiter: TypeAlias = Callable[[MadeBatch | None], None]
"""Called with the batch, or with None: who waits makes it now, or says that it failed."""


class EpochCache:
    """The batches of one node.

    Args:
        most_bytes: of payloads that are kept, at most.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._made: dict[Hashable, MadeBatch] = {}  # the oldest first
        self._waiting: dict[Hashable, deque[Waiter]] = {}  # of batches that are being made

    def ask(self, key: Hashable, waiter: Waiter) -> MadeBatch | Literal["make", "wait"]:
        """Ask for a batch.

        Args:
            key: what makes it what it is.
            waiter: called later, if the answer is "wait".
        """
        made = self._made.get(key)
        if made is not None:
            return made
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = deque()
            return "make"
        waiting.append(waiter)
        return "wait"

    def made(self, key: Hashable, batch: MadeBatch) -> None:
        """Who was told to make the batch has it."""
        waiting = self._waiting.pop(key, deque())
        size = len(batch.payload)
        if size <= self._most:
            self._made[key] = batch
            self._bytes += size
        while self._bytes > self._most:
            self._bytes -= len(self._made.pop(next(iter(self._made))).payload)
        for waiter in waiting:
            waiter(batch)

    def failed(self, key: Hashable) -> None:
        """Who was told to make the batch does not: the next one does."""
        waiting = self._waiting[key]
        if waiting:
            waiting.popleft()(None)
        else:
            del self._waiting[key]

    def clear(self) -> None:
        """Forget the batches that are made."""
        self._made.clear()
        self._bytes = 0
