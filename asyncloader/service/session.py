"""What one loader has at a node: its lanes, and the memory that its batches in work may take."""

from __future__ import annotations

from asyncloader.errors import RingMemoryError

__all__ = ["Session"]

_ADVICE = "Use smaller batches, fewer workers or a smaller prefetch_factor, or give the node more memory."


class Session:
    """One loader at a node.

    Args:
        name: the loader's own for it.
        most_bytes: bytes of rings that it may have, at most; None: no limit.
    """

    def __init__(self, name: str, most_bytes: int | None) -> None:
        self.name = name
        self.lanes = 0
        self._most = most_bytes
        self._bytes = 0

    def hold(self, nbytes: int) -> None:
        """Count a change of its rings' bytes.

        Raises:
            RingMemoryError: there would be more than it may have. Nothing is counted.
        """
        if nbytes > 0 and self._most is not None and self._bytes + nbytes > self._most:
            reason = "half of the memory that the node had when it began, the most for one loader"
            raise RingMemoryError(self._bytes + nbytes, self._most, reason, _ADVICE)
        self._bytes += nbytes
