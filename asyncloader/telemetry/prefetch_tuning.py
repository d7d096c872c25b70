"""Proposes how many batches each worker should have ahead, from windows of measured time. Pure: no I/O, no clock.

Data path: statistics -> diagnosis -> [prefetch_tuning] -> credits. `trials.py` has the rules by which a number is kept.

More batches ahead can gain only where both sides wait: the consumer for batches, and workers, at other times, for room.
So it is where the consumer pauses now and then, and where some batches take much longer than others. The most that
there is room for is tried at once: a batch ahead costs nothing but memory, which it takes only once it is made, and
the whole gain stands out from the noise of such runs where a part of it would not. The windows are longer than for
other settings, so that each has some of the pauses.
"""

from __future__ import annotations

from typing import ClassVar

from asyncloader.telemetry.trials import HEALTHY_WAIT, Measured, Proposal, Tuner

_IDLE = 0.1  # the share of their time for which workers must have waited
_ELSEWHERE = ("sampler", "startup", "snapshots", "store", "memory", "ring", "shards", "unknown")
"""Verdicts under which workers wait for something else."""


class PrefetchTuner(Tuner):
    """The decisions on the number of batches ahead. Its arguments are those of `Tuner`."""

    window_s: ClassVar[float] = 1.0
    least: ClassVar[int] = 3

    def _propose(self, window: Measured) -> Proposal | None:
        target, idle = window.most, max(0.0, 1.0 - window.busy)
        if window.waited < HEALTHY_WAIT or window.bound in _ELSEWHERE or target <= self.value or self._rests(target):
            return None
        if idle < _IDLE and (window.proposed is None or window.proposed <= self.value):
            return None
        why = f"the consumer waits {window.waited:.0%} of the time, and workers {idle:.0%} of theirs"
        return Proposal(target, f"{why}; {window.limit} allow {window.most}")
