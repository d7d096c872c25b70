"""Computes a loader's rate from its batches' arrival times, and decides when a run has enough batches. Pure: no clock.

Data path: times -> [arrival_times] -> measuring.

The first batches are not counted, because the workers may have prepared them before the first was taken. If an epoch is
shorter than the run, the rate is that of the whole epochs after the first, including the start of each.
"""

from __future__ import annotations

from typing import NamedTuple

_LEAST_BATCHES = 8
_LONGEST = 6  # windows after which fewer than the least number of batches suffice
_MOST_GAPS = 300  # that the chart of a run shows


class Rate(NamedTuple):
    """The measured rate of a run.

    Attributes:
        rate: batches per second; 0 if too few batches came.
        batches: number of batches that were counted.
        seconds: time in which the counted batches came.
        first_s: seconds from the beginning of the run to its first batch.
        epochs: number of whole epochs that were counted; 0 if a part of a single epoch was.
        gaps: seconds between successive batches, at most the first 300 of the counted part.
    """

    rate: float
    batches: int
    seconds: float
    first_s: float
    epochs: int
    gaps: list[float]


class ArrivalTimes:
    """Collects the arrival times of a run's batches.

    Args:
        began: time at which the run began.
        window: seconds to measure.
        ahead: number of batches that may be ready when the first is taken; they are not counted.
        workers: number of workers, whose batches may arrive at the same time.
    """

    def __init__(self, began: float, window: float, ahead: int, workers: int) -> None:
        self._began, self._window, self._skipped = began, window, ahead
        self._together = max(1, workers)
        self._least = max(_LEAST_BATCHES, 2 * workers)
        self._stamps: list[float] = []
        self._ends: list[tuple[int, float]] = []  # of each epoch: the number of batches so far, the time

    def came(self, now: float) -> bool:
        """Record the arrival of a batch. Returns whether the run has enough batches."""
        self._stamps.append(now)
        if self._ends:
            return False  # a run of several epochs ends at the end of an epoch
        first, passed = self._skipped, now - self._stamps[0]
        counted = len(self._stamps) - 1 - first
        if counted >= self._least and now - self._stamps[first] >= self._window:
            return True
        return (passed > _LONGEST * self._window and counted >= max(2, self._together)) or (
            passed > 2 * _LONGEST * self._window and len(self._stamps) > max(2, self._together)
        )

    def ended(self, now: float) -> bool:
        """Record the end of an epoch. Returns whether the run has enough batches, or the epoch had no batch."""
        before = self._ends[-1][0] if self._ends else 0
        self._ends.append((len(self._stamps), now))
        if len(self._stamps) == before:
            return True  # an exhausted generator, for example, gives nothing more
        return len(self._ends) > 1 and now - self._ends[0][1] >= self._window

    def result(self) -> Rate | None:
        """Compute the rate. Returns None if no batch came."""
        stamps, ends = self._stamps, self._ends
        if not stamps:
            return None
        start, batches, seconds, epochs = 0, 0, 0.0, 0
        if len(ends) > 1 and ends[-1][0] > ends[0][0]:
            start, (batches, seconds) = ends[0][0], (ends[-1][0] - ends[0][0], ends[-1][1] - ends[0][1])
            epochs = len(ends) - 1
        elif len(stamps) > 1:
            start = self._skipped if self._skipped + self._together < len(stamps) else 0
            batches = len(stamps) - 1 - start
            if batches >= self._together:
                batches -= batches % self._together
            seconds = stamps[start + batches] - stamps[start]
        rate = batches / max(seconds, 1e-9) if batches else 0.0
        gaps = [after - before for before, after in zip(stamps[start:], stamps[start + 1 :], strict=False)]
        return Rate(rate, batches, seconds, stamps[0] - self._began, epochs, gaps[:_MOST_GAPS])
