"""Keeps page-locked rings from one epoch's workers for those of the next.

Data path: scheduler -> worker -> ring -> consumer; [kept_rings] holds the rings between two epochs.

Page-locking a ring takes long, and delays other calls of the device meanwhile. So where a loader's workers end with the
epoch, their locked rings are kept for the next workers, with the sizes learned. Everything else is made anew, which is
cheaper than keeping it.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from asyncloader.workers.memory.ring_manager import RingManager


class RingOptions(NamedTuple):
    """The arguments of a `RingManager`; rings are reused only for equal ones."""

    credits: int
    ring_bytes: int | None
    reorder_window: int
    workers: int
    least_credits: int | None


class KeptRings:
    """A cache for the rings of the loader's last pool. It holds no more memory than an epoch uses.

    Without locks, because any thread may end a pool. A dropped ring is page-unlocked once its last view is gone.
    """

    def __init__(self) -> None:
        self._left: deque[tuple[RingOptions, list[RingManager]]] = deque(maxlen=1)
        self._closed = False
        weakref.finalize(self, self._left.clear)  # runs at exit, too, while modules and drivers still work

    def take(self, options: RingOptions) -> list[RingManager] | None:
        """Take the kept managers, one per worker; None if there are none with these options."""
        with suppress(IndexError):
            kept_options, managers = self._left.pop()
            if kept_options == options:
                return managers
        return None

    def keep(self, options: RingOptions, managers: list[RingManager]) -> None:
        """Keep these managers for the next pool."""
        self._left.append((options, managers))
        if self._closed:  # check after appending: `close` clears what was appended before it
            self._left.clear()

    def close(self) -> None:
        """Drop the rings, and keep none from now on."""
        self._closed = True
        self._left.clear()
