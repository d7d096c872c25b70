"""Proposes how many samples each worker should have in flight, from windows of measured time. Pure: no I/O, no clock.

Data path: statistics -> diagnosis -> [concurrency_tuning] -> limiter. `trials.py` has the rules by which a number is
kept.

Most stores give no less with more requests at a time, so a loader begins with the most. Some do: those that throttle,
and those whose requests are in each other's way. They show it in the rate of the whole run alone: of several workers
each would be faster with more, at the cost of the others. Hence trials of the whole run, downwards first: a quarter,
which shows a gain also where a half gains little, then a half, then twice the number.

Upwards it never goes beyond the default: a trial must not use up the process's file descriptors, or a server's
connections, and so fail a run that would have succeeded.
"""

from __future__ import annotations

from asyncloader.telemetry.trials import HEALTHY_WAIT, Measured, Proposal, Tuner

_BOUNDS = ("fetch", "store", "order")  # verdicts that the store may be behind


class ConcurrencyTuner(Tuner):
    """The decisions on the number of samples in flight. Its arguments are those of `Tuner`."""

    def _propose(self, window: Measured) -> Proposal | None:
        if window.waited < HEALTHY_WAIT or window.bound not in _BOUNDS:
            return None
        for target in (max(1, self.value // 4), max(1, self.value // 2), min(2 * self.value, window.most)):
            if target != self.value and not self._rests(target):
                why = f"the consumer waits {window.waited:.0%} of the time, bound: {window.bound}"
                return Proposal(target, why)
        return None
