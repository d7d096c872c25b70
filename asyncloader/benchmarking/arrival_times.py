"""Computes a loader's rate from the times at which its batches came, and says when there are enough. Pure: no clock.

Data path: times -> [arrival_times] -> measuring.

The first batches are not counted: they come while workers start, or were made meanwhile. Where an epoch is shorter than
the run, whole epochs behind the first are counted, with their starts.
"""

from __future__ import annotations

from typing import NamedTuple

_LEAST_BATCHES = 8
_LONGEST = 6  # windows, after which fewer batches must do
_MOST_GAPS = 300  # for the picture of a run


class Rate(NamedTuple):
    """A measured rate.

    Attributes:
        rate: batches per second; 0: too few came.
        batches: that were counted.
        seconds: in which these came.
        first_s: seconds from the beginning to the first batch.
        epochs: whole epochs that were counted; 0: a part of one epoch.
        gaps: seconds between the first of the counted batches.
    """

    rate: float
    batches: int
    seconds: float
    first_s: float
    epochs: int
    gaps: list[float]


class ArrivalTimes:
    """The batches of one run.

    Args:
        began: when the run began.
        window: seconds to measure.
        ahead: batches that may be ready when the first is taken.
        workers: that make batches, which may finish at the same time.
    """

    def __init__(self, began: float, window: float, ahead: int, workers: int) -> None:
        self._began, self._window, self._skipped = began, window, ahead
        self._together = max(1, workers)
        self._least = max(_LEAST_BATCHES, 2 * workers)
        self._stamps: list[float] = []
        self._ends: list[tuple[int, float]] = []  # of epochs: the number of batches until then, and when

    def came(self, now: float) -> bool:
        """Take a batch into account. Returns whether there are enough."""
        self._stamps.append(now)
        if self._ends:
            return False  # whole epochs are counted
        first, passed = self._skipped, now - self._stamps[0]
        counted = len(self._stamps) - 1 - first
        if counted >= self._least and now - self._stamps[first] >= self._window:
            return True
        return (passed > _LONGEST * self._window and counted >= max(2, self._together)) or (
            passed > 2 * _LONGEST * self._window and len(self._stamps) > max(2, self._together)
        )

    def ended(self, now: float) -> bool:
        """Take the end of an epoch into account. Returns whether there are enough batches, or no more come."""
        before = self._ends[-1][0] if self._ends else 0
        self._ends.append((len(self._stamps), now))
        if len(self._stamps) == before:
            return True  # it cannot be read again
        return len(self._ends) > 1 and now - self._ends[0][1] >= self._window

    def result(self) -> Rate | None:
        """Return the rate; None if no batch came."""
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
