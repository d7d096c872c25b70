"""Proposes how many workers a loader should have, from windows of measured time. Pure: no I/O, no clock.

Data path: statistics -> diagnosis -> [worker_tuning] -> pool. `trials.py` has the rules by which a number is kept.

More workers are tried only where `diagnose` proposes them, and at most twice as many. Where the consumer is the bound,
how busy the workers are says how many suffice.
"""

from __future__ import annotations

from math import ceil

from asyncloader.telemetry.trials import HEALTHY_WAIT, Measured, Proposal, Tuner

MOST_WAITING_WORKERS = 64
"""Workers that are proposed for a blocking dataset that waits, whatever the number of CPUs. Memory may allow fewer
processes; from 2 workers on, five trials of twice as many reach it.
"""

_BUSY = 0.7  # the share of their time for which fewer workers may be busy
_MEMORY = 0.5  # the share of the memory that workers may take: files that they read, and the consumer, need some, too


def most_in_memory(workers: int, largest: int, free: int) -> int:
    """Return how many workers there may be: more than now only within half of the memory that is free without them.

    Args:
        workers: number of them now.
        largest: bytes that one takes.
        free: bytes that are left beside them.
    """
    return max(workers, int(_MEMORY * (free + workers * largest)) // largest)


class WorkerTuner(Tuner):
    """The decisions on the number of workers. Its arguments are those of `Tuner`."""

    @property
    def window(self) -> tuple[float, int]:
        """The least seconds and batches of the next window."""
        seconds, batches = super().window
        return seconds, max(batches, 2 * self.value)

    def may_try(self, workers: int) -> bool:
        """Whether the next window may begin a trial of more workers, up to this number."""
        least, until = self._up
        return not self.tries and (min(workers, 2 * self.value) < least or self._now + 1 >= until)

    def _propose(self, window: Measured) -> Proposal | None:
        if window.waited < HEALTHY_WAIT:
            target = max(1, ceil(self.value * window.busy / _BUSY))
            if target >= self.value or self._rests(target):
                return None
            reason = f"the consumer is the bound, and workers are busy {window.busy:.0%} of the time"
            return Proposal(target, reason, saves=True)
        if window.proposed is None:
            return None
        target = max(1, min(window.proposed, 2 * self.value, window.most))
        if target == self.value or self._rests(target):
            return None
        why = f"the consumer waits {window.waited:.0%} of the time, bound: {window.bound}"
        if target == window.most and target > self.value:
            why += f"; {window.limit} allow {window.most}"
        return Proposal(target, why, saves=target < self.value)
