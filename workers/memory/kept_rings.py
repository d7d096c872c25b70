"""Keeps page-locked rings from one epoch's workers for those of the next.

Data path: scheduler -> worker -> ring -> consumer; [kept_rings] holds the rings between two epochs.

Page-locking a ring takes long, and delays other calls of the device. So where a loader's workers end with the epoch,
their locked rings are kept for the next workers, with the sizes learned. Rings that are not locked are not kept: a new
one costs less than the memory that the old one would hold between two epochs.
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

    Any thread may call it. A dropped ring is page-unlocked once its last view has died.
    """

    def __init__(self) -> None:
        # No lock: a pool may end in any thread, also inside a finalizer that interrupts a holder of the lock.
        # `append`, `pop` and `clear` of a deque are atomic.
        self._left: deque[tuple[RingOptions, list[RingManager]]] = deque(maxlen=1)
        self._closed = False
        weakref.finalize(self, self._left.clear)  # runs at exit, too, while modules and drivers still work

    def take(self, options: RingOptions) -> list[RingManager] | None:
        """Take the kept managers, one per worker; None if none was kept with these options."""
        # Another thread may take them between a test and `pop`.
        with suppress(IndexError):
            # Rings for other options are dropped here: the next pool would never take them.
            kept_options, managers = self._left.pop()
            if kept_options == options:
                return managers
        return None

    def keep(self, options: RingOptions, managers: list[RingManager]) -> None:
        """Keep these managers for the next pool."""
        self._left.append((options, managers))
        if self._closed:  # checked after appending: `close` has cleared only the rings that were appended before it
            self._left.clear()

    def close(self) -> None:
        """Drop the rings, and keep none from now on."""
        self._closed = True
        self._left.clear()
