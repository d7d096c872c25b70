"""Page-locked rings from one epoch's workers to the next one's.

Data path: scheduler -> worker -> ring -> consumer; [kept_rings] is where rings are between two epochs.

To page-lock a ring takes long, and holds up other calls of the device meanwhile. So where a loader's workers end with
the epoch, its locked rings do not: the next workers get them, and what was learned about their size. Everything else is
made anew, which costs less than to keep it.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from asyncloader.workers.memory.ring_manager import RingManager

__all__ = ["KeptRings", "RingOptions"]


class RingOptions(NamedTuple):
    """`RingManager`'s arguments: rings are kept for workers with the same ones."""

    credits: int
    ring_bytes: int | None
    run_ahead: int
    workers: int
    least_credits: int | None


class KeptRings:
    """Those of the loader's workers that ended last, and of no others: no more memory than an epoch has.

    No locks: pools are ended by any thread. What is pushed out, dropped or closed is unlocked when nobody looks into it
    any more.
    """

    def __init__(self) -> None:
        self._left: deque[tuple[RingOptions, list[RingManager]]] = deque(maxlen=1)
        self._closed = False
        weakref.finalize(self, self._left.clear)  # at exit, too, while there are modules and drivers

    def take(self, options: RingOptions) -> list[RingManager] | None:
        """A keeper for each worker; None: there are none on these terms."""
        with suppress(IndexError):
            kept_options, managers = self._left.pop()
            if kept_options == options:
                return managers
        return None

    def leave(self, options: RingOptions, managers: list[RingManager]) -> None:
        """For the next workers."""
        self._left.append((options, managers))
        if self._closed:  # looked at last: `close` clears what came before
            self._left.clear()

    def close(self) -> None:
        """Let go of them, and keep none from now on."""
        self._closed = True
        self._left.clear()
