"""Lets the loops of one process do something together: a graph that several of them share is changed once.

Data path: none; in a process with several loops (`eventloop`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

__all__ = ["Together"]


class Together:
    """A barrier for loops that are generators in one thread.

    Args:
        loops: their number.
    """

    def __init__(self, loops: int) -> None:
        self._loops = loops
        self._arrived: Counter[str] = Counter()
        self.ended = False
        """Whether a loop has ended: the others would wait for it in vain."""

    def meet(self, name: str) -> Generator[bool, None, bool]:
        """Wait until all loops are at the point of this name. Returns whether they are, or one has ended instead.

        Yields:
            True once it has arrived, since another loop may go on then; False while it waits.
        """
        self._arrived[name] += 1
        # A loop can only arrive again after all did, so the count tells how often that was.
        all_there = -(-self._arrived[name] // self._loops) * self._loops
        arrived_now = True
        while self._arrived[name] < all_there:
            if self.ended:
                return False
            yield arrived_now
            arrived_now = False
        return True
