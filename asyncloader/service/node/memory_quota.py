"""What one loader has at a node: its connections, and the memory that its batches in work may take. Pure."""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.errors import RingMemoryError

_REASON = "half of the memory that the node had when it began, the most for one loader"
_ADVICE = "Use smaller batches, fewer workers or a smaller prefetch_factor, or give the node more memory."


class MemoryQuota:
    """One loader at a node.

    Rings are held as long as their connections: there are never more than fit. What is *unsent* besides (batches that
    fit no slot, copies that are shared, descriptions, errors) goes as the loader reads, and how large it will be is not
    known before it is made. So it may exceed the limit, and the quota is `full` until enough was sent: the connections
    give their processes no tasks meanwhile. The rings alone never make it full, so that this ends if the loader reads.

    Args:
        name: the loader's own for it.
        most_bytes: bytes that it may have, at most; None: no limit.
    """

    def __init__(self, name: str, most_bytes: int | None) -> None:
        self.name = name
        self.connections = 0
        self._most = most_bytes
        self._rings = 0
        self._unsent = 0
        self._waiting: dict[Callable[[], None], None] = {}

    def hold(self, nbytes: int) -> None:
        """Count a change of its rings' bytes.

        Raises:
            RingMemoryError: there would be more than it may have. Nothing is counted.
        """
        if nbytes > 0 and self._most is not None and self._rings + nbytes > self._most:
            raise RingMemoryError(self._rings + nbytes, self._most, _REASON, _ADVICE)
        self._change(nbytes, 0)

    def check(self, nbytes: int) -> None:
        """Check one batch that is in no ring.

        Raises:
            RingMemoryError: it alone takes more than the quota may have.
        """
        if self._most is not None and nbytes > self._most:
            raise RingMemoryError(nbytes, self._most, _REASON, _ADVICE)

    def count(self, nbytes: int) -> None:
        """Count a change of the bytes that are unsent. Those that wait are called if it was full, and is no more."""
        self._change(0, nbytes)

    def _change(self, rings: int, unsent: int) -> None:
        was_full = self.full
        self._rings += rings
        self._unsent += unsent
        if was_full and not self.full:
            waiting, self._waiting = self._waiting, {}
            for resume in waiting:
                resume()

    @property
    def full(self) -> bool:
        """Whether it has more than it may have."""
        return self._most is not None and self._rings + self._unsent > self._most

    def wait(self, resume: Callable[[], None]) -> None:
        """Have this called, once, when the quota is not full any more. It may not raise."""
        self._waiting[resume] = None

    def leave(self, resume: Callable[[], None]) -> None:
        """Do not have this called."""
        self._waiting.pop(resume, None)
