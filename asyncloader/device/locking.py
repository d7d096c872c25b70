"""Rings are page-locked, each when the first batch comes in it.

Data path: reorder -> delivery -> [locking] -> stage -> consumer.

A whole ring at a time: it costs about 0.1 s for a GB, and several times as much to get the pages of slots that were
never used. The locks go with the ring's memory, when nobody looks into it any more.
"""

from __future__ import annotations

import warnings
from functools import partial
from time import perf_counter

from asyncloader.device.accelerator import Accelerator
from asyncloader.device.driver import LockingUnsupported
from asyncloader.device.numa import prefer_node
from asyncloader.statistics import Statistics
from asyncloader.workers.ring import Ring

__all__ = ["RingLocker"]


class RingLocker:
    """Locks rings for one device.

    Args:
        accelerator: the device.
        statistics: where bytes and seconds are counted.
    """

    def __init__(self, accelerator: Accelerator, statistics: Statistics) -> None:
        self._accelerator = accelerator
        self._statistics = statistics

    def lock(self, ring: Ring | None) -> bool:
        """Whether a batch in this ring lies in page-locked memory, which this call sees to.

        Raises:
            PageLockError: the device's driver refuses this ring. (Where it would refuse any, a warning says so, and
                batches are copied to page-locked memory of torch's from then on.)
            RingMemoryError: there is no memory for all of the ring's pages.
        """
        lock = self._accelerator.lock
        if ring is None or lock is None:
            return False
        if not ring.locked:
            began = perf_counter()
            try:
                ring.lock_pages(lock, partial(prefer_node, node=self._accelerator.node))
            except LockingUnsupported as error:
                self._do_without(str(error))
                return False
            self._statistics.locked_bytes += ring.nbytes
            self._statistics.lock_s += perf_counter() - began
        return True

    def _do_without(self, reason: str) -> None:
        accelerator = self._accelerator
        accelerator.lock, accelerator.unlocked_because = None, reason
        warnings.warn(
            f"{accelerator.device} cannot copy straight from the workers' rings, as they cannot be page-locked here: "
            f"{reason}. Each batch is copied to page-locked memory first, by a thread of this process.",
            RuntimeWarning,
            stacklevel=2,
        )
