"""Keeps the bytes that a non-blocking socket has not taken yet, in order, with the descriptors that go with them.

Data path: part of `Channel`, between the main process and a worker, and of `Link`, between a loader and a node.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

_OBJECT_BYTES = 450
"""Memory of the objects that hold an entry, besides its bytes."""

Push: TypeAlias = Callable[[memoryview, Sequence[int]], int]
"""Sends bytes with descriptors; returns the number of bytes that were sent, 0 if the socket is full."""


class Unsent(NamedTuple):
    """Bytes that wait to be sent.

    Attributes:
        data: the bytes.
        fds: duplicates of the descriptors that are sent with the first of them.
        sent: called once all are sent, or the queue is closed.
        owned: whether they are memory of the queue, rather than of a ring.
    """

    data: memoryview
    fds: tuple[int, ...]
    sent: Callable[[], None] | None
    owned: bool


class SendQueue(deque[Unsent]):
    """The bytes that wait to be sent; true while there are any. Not thread-safe."""

    nbytes = 0
    """Bytes that wait, without those of rings."""
    fds = 0
    """Descriptors that wait with them."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the queue takes, about: those of short entries are mostly Python's objects."""
        return self.nbytes + _OBJECT_BYTES * len(self)

    def put(
        self,
        data: memoryview,
        fds: Sequence[int] = (),
        sent: Callable[[], None] | None = None,
        *,
        owned: bool = True,
    ) -> None:
        """Add bytes at the end. Arguments as `Unsent`; the caller still owns `fds`, which are duplicated."""
        # As duplicates: the caller may close its own while the bytes wait.
        self.append(Unsent(data, tuple(os.dup(fd) for fd in fds), sent, owned))
        self.nbytes += owned * data.nbytes
        self.fds += len(fds)

    def flush(self, push: Push) -> bool:
        """Send the bytes; returns whether none are left. Errors are those of `push`."""
        while self:
            data, fds, sent, owned = self[0]
            number = push(data, fds)
            if not number:
                return False
            self.popleft()
            self.nbytes -= owned * number
            # The kernel passes descriptors with the first byte of a send: the rest of the bytes goes without them, or
            # the receiver would get each twice.
            self.fds -= len(fds)
            for fd in fds:
                os.close(fd)
            if number < data.nbytes:
                self.appendleft(Unsent(data[number:], (), sent, owned))
            elif sent is not None:
                sent()
        return True

    def close(self) -> None:
        """Drop the bytes, and close their descriptors. Idempotent."""
        self.nbytes = self.fds = 0
        while self:
            _, fds, sent, _ = self.popleft()
            for fd in fds:
                close_quietly(fd)
            if sent is not None:
                sent()  # the ring's slot is free again, although the bytes were not sent


def close_quietly(fd: int) -> None:
    """Close a descriptor that a forked child may have closed already, with all others."""
    with contextlib.suppress(OSError):
        os.close(fd)
