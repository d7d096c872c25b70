"""The memory and the files that loaders may take at a node.

Data path: beside worker_connections. Pure.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable

from asyncloader.errors import RingMemoryError

_FREE_FILES = 32  # for handshakes
_REASON = "half of the memory that the node had when it began, the most for one loader"
_ADVICE = "Use smaller batches, fewer workers or a smaller prefetch_factor, or give the node more memory."


class MemoryQuota:
    """The memory of one loader at a node, over all of its worker connections.

    Rings live as long as their connections: a ring that does not fit is refused. *Unsent* bytes (batches that fit no
    slot, descriptions, errors) go as the loader reads. Their number is not known before they are made, so they may
    exceed the limit: then the quota is `full`, and the connections give their processes no tasks until enough was sent.

    Args:
        name: the name that the loader gave itself.
        most_bytes: bytes that it may have, at most; None: no limit.

    Attributes:
        ring_bytes: size of its rings.
        unsent_bytes: bytes of messages that it has not read yet.
    """

    def __init__(self, name: str, most_bytes: int | None) -> None:
        self.name = name
        self.connections = 0
        self.most_bytes = most_bytes
        self.ring_bytes = 0
        self.unsent_bytes = 0
        self._waiting: dict[Callable[[], None], None] = {}

    def room(self, held: int) -> int | None:
        """Return how many bytes a ring may have that replaces one of `held` bytes, so that the rings of all connections
        fit; None: any number.
        """
        if self.most_bytes is None:
            return None
        return min(self.most_bytes // max(1, self.connections), self.most_bytes - self.ring_bytes + held)

    def hold(self, nbytes: int) -> None:
        """Count a change of the rings' bytes.

        Raises:
            RingMemoryError: the rings would take more than the limit. Nothing is counted.
        """
        # Compared without the unsent bytes: rings alone never make the quota full, which therefore ends as the loader
        # reads.
        if nbytes > 0 and self.most_bytes is not None and self.ring_bytes + nbytes > self.most_bytes:
            raise RingMemoryError(self.ring_bytes + nbytes, self.most_bytes, _REASON, _ADVICE)
        self._change(nbytes, 0)

    def check(self, nbytes: int) -> None:
        """Check a batch that is in no ring.

        Raises:
            RingMemoryError: the batch alone takes more than the limit.
        """
        if self.most_bytes is not None and nbytes > self.most_bytes:
            raise RingMemoryError(nbytes, self.most_bytes, _REASON, _ADVICE)

    def count(self, nbytes: int) -> None:
        """Count a change of the unsent bytes. Calls the functions that wait, if the quota is no longer full."""
        self._change(0, nbytes)

    def _change(self, rings: int, unsent: int) -> None:
        was_full = self.full
        self.ring_bytes += rings
        self.unsent_bytes += unsent
        if was_full and not self.full:
            # Replaced before the calls: a function may find the quota full once more, and wait again.
            waiting, self._waiting = self._waiting, {}
            for resume in waiting:
                resume()

    @property
    def full(self) -> bool:
        """Whether the loader has more than the limit."""
        return self.most_bytes is not None and self.ring_bytes + self.unsent_bytes > self.most_bytes

    def wait(self, resume: Callable[[], None]) -> None:
        """Call this, once, when the quota is no longer full. It must not raise."""
        # A dictionary as an ordered set: connections are called in the order in which they began to wait.
        self._waiting[resume] = None

    def leave(self, resume: Callable[[], None]) -> None:
        """Do not call this any more."""
        self._waiting.pop(resume, None)


def check_files(descriptor: int, connections: int) -> None:
    """Check that this process has files for one more connection. Raises OSError as the system does if it has not.

    Args:
        descriptor: of the connection; descriptors are given from the lowest on.
        connections: those that are open: one file is left for a ring of each, which would end without it.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] - descriptor < _FREE_FILES + connections:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
