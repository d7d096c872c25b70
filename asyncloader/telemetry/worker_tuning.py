"""Decides how many workers a loader should have, from windows of measured time. Pure: no I/O, no clock.

Data path: statistics -> diagnosis -> [worker_tuning] -> pool.

A change is tried only where `diagnose` proposes one, and kept only if it shows:

    CONTROL   two windows or more with the same number: what they differ by is noise (an A/A comparison)
    TRIAL     two to eight windows with the other number, behind one that is left out while the change takes effect
    accept    more workers: the gain exceeds 5 %, and what the noise within control and trial can explain
              fewer workers: the loss does not
    reject    the number before comes back, and the same change is not tried again for a while: 16 windows, then 32,
              up to 512. So a number that is right is left alone, however the figures vary.

A trial ends with its first window if that is clearly slower. A number that was accepted as a gain is not lowered for as
long as a rejected one is not tried. Where the consumer is the bound, how busy the workers are says how many suffice.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Literal, NamedTuple

WORTH = 0.05
"""The least part by which batches must come faster for more workers to be kept."""

_HEALTHY_WAIT = 0.05  # as in the diagnosis: a consumer that waits for less is the bound itself
_WINDOW_S, _SETTLED_WINDOW_S = 0.5, 2.0
_LEAST_BATCHES = 8
_LEAST, _MOST = 2, 8  # windows of a control or a trial
_CLEARLY = 0.85  # of the control's rate: a trial that is slower in its first window ends with that
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9, 1.86, 1.83, 1.81, 1.8, 1.78)
_BUSY = 0.7  # the share of their time for which fewer workers may be busy
_FIRST_REST, _LAST_REST = 16, 512  # windows for which a rejected change is not tried again


class Measured(NamedTuple):
    """The figures of a stretch of time in which the number of workers did not change.

    Attributes:
        batches: delivered.
        seconds: its length.
        waited: share of it that the consumer waited for batches.
        bound: the verdict on it, `Diagnosis.bound`.
        proposed: the number of workers that the diagnosis proposes; None: it proposes none.
        busy: share of their time that the workers spent on tasks.
        most: workers that there may be: cores, memory and a limit on waiting ones allow no more.
        limit: what sets `most`, in words.
    """

    batches: int
    seconds: float
    waited: float
    bound: str
    proposed: int | None
    busy: float
    most: int
    limit: str = "the cores"

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / max(self.seconds, 1e-9)


class Decision(NamedTuple):
    """A change of the number of workers.

    Attributes:
        workers: the number from now on.
        kept: whether it is decided; False: it is tried.
        reason: why, in a sentence.
    """

    workers: int
    kept: bool
    reason: str


Phase = Literal["control", "trial"]


class WorkerTuner:
    """The decisions for one loader, over all of its epochs.

    Args:
        workers: the number to begin with, at least 1.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        """The number now: of the trial, while one runs."""
        self.settled = False
        """Whether the last control led to no trial."""
        self._before = workers  # the number to which a rejected trial returns
        self._phase: Phase = "control"
        self._skips = True  # the next window is left out: a change, or a start, takes effect in it
        self._control: list[float] = []
        self._trial: list[float] = []
        self._waited: list[float] = []
        self._now = 0  # number of windows seen
        # Numbers from which on (up) or down to which (down) nothing is tried, until that window.
        self._up: tuple[int, int] = (0, 0)
        self._down: tuple[int, int] = (0, 0)
        self._rest = _FIRST_REST

    @property
    def window(self) -> tuple[float, int]:
        """The least seconds and batches of the next window."""
        return _SETTLED_WINDOW_S if self.settled else _WINDOW_S, max(_LEAST_BATCHES, 2 * self.workers)

    @property
    def tries(self) -> bool:
        """Whether a trial runs."""
        return self._phase == "trial"

    def interrupted(self) -> None:
        """The next window is no measure: an epoch begins, or workers are started."""
        self._skips = True

    def may_try(self, workers: int) -> bool:
        """Whether the next window may begin a trial of more workers, up to this number."""
        least, until = self._up
        return not self.tries and (min(workers, 2 * self.workers) < least or self._now + 1 >= until)

    def failed(self, reason: str, workers: int) -> Decision | None:
        """No more than `workers` are to be had: end the trial, or go on with these. Returns the change to make now;
        None: none.
        """
        if self.tries:
            return self._reject(reason)
        if self.workers <= workers:
            return None
        self._up = self.workers, self._now + self._rest
        self._go_to(workers)
        self._before, self._control = workers, []
        return Decision(workers, kept=True, reason=reason)

    def observe(self, window: Measured) -> Decision | None:
        """Take a window into account. Returns the change to make now; None: none."""
        self._now += 1
        if self._skips:
            self._skips = False
            return None
        if self.tries:
            return self._judge(window)
        self._control = [*self._control, window.rate][-_MOST:]
        if self.workers > window.most:
            return self._cut(window)
        if len(self._control) < _LEAST:
            return None
        found = self._try_up_or_down(window)
        self.settled = found is None
        return found

    # ------------------------------------------------------------------------------------------------- trying

    def _cut(self, window: Measured) -> Decision:
        """Fewer workers without a trial: there is no room for these."""
        reason = f"{window.limit} allow {window.most} at most"
        self._go_to(window.most)
        self._before = window.most
        self._control = []
        return Decision(window.most, kept=True, reason=reason)

    def _try_up_or_down(self, window: Measured) -> Decision | None:
        if window.waited < _HEALTHY_WAIT:
            return self._try_fewer(window)
        if window.proposed is None or window.proposed == self.workers:
            return None
        if window.proposed < self.workers:
            target = max(1, window.proposed)
            if target == self.workers or self._rests_down(target):
                return None
            return self._start(target, f"the consumer waits {window.waited:.0%} of the time, bound: {window.bound}")
        target = min(window.proposed, 2 * self.workers, window.most)
        if target <= self.workers or self._rests_up(target):
            return None
        why = f"the consumer waits {window.waited:.0%} of the time, bound: {window.bound}"
        if target == window.most:
            why += f"; {window.limit} allow {window.most}"
        return self._start(target, why)

    def _try_fewer(self, window: Measured) -> Decision | None:
        target = max(1, ceil(self.workers * window.busy / _BUSY))
        if target >= self.workers or self._rests_down(target):
            return None
        return self._start(target, f"the consumer is the bound, and workers are busy {window.busy:.0%} of the time")

    def _rests_up(self, target: int) -> bool:
        least, until = self._up
        return self._now < until and target >= least

    def _rests_down(self, target: int) -> bool:
        most, until = self._down
        return self._now < until and target <= most

    def _start(self, target: int, reason: str) -> Decision:
        self._before = self.workers
        self._go_to(target)
        self._phase = "trial"
        return Decision(target, kept=False, reason=reason)

    def _go_to(self, workers: int) -> None:
        self.workers, self._skips = workers, True
        self._trial, self._waited = [], []

    # ------------------------------------------------------------------------------------------------ judging

    def _judge(self, window: Measured) -> Decision | None:
        self._trial.append(window.rate)
        self._waited.append(window.waited)
        more = self.workers > self._before
        control, trial = _mean(self._control), _mean(self._trial)
        change = trial / max(control, 1e-9) - 1.0
        if change < _CLEARLY - 1.0:
            return self._reject(f"batches came {-change:.0%} slower, with {self.workers}")
        if len(self._trial) < _LEAST:
            return None
        noise = _noise(self._control, self._trial) / max(control, 1e-9)
        needed = max(WORTH, noise)
        words = f"batches came {change:+.1%} faster, where {noise:.1%} is noise"
        if more:
            if change > needed:
                return self._accept(words)
            # Not worth it, or worth it only if more windows lower the noise.
            if change < WORTH or len(self._trial) >= _MOST:
                return self._reject(f"{words}, with {self.workers}")
            return None
        # Fewer are kept unless they cost something: also waiting, where the consumer was the bound before.
        if -change > needed or (_mean(self._waited) > 2 * _HEALTHY_WAIT and -change > WORTH / 2):
            return self._reject(f"{words}, with {self.workers}")
        if noise <= WORTH or len(self._trial) >= _MOST:
            return self._accept(words)
        return None

    def _accept(self, words: str) -> Decision:
        if self.workers > self._before:
            self._down = self._before, self._now + self._rest
        self._phase, self._before = "control", self.workers
        # What the trial has measured is the control of the next one.
        self._control, self._trial = self._trial, []
        return Decision(self.workers, kept=True, reason=words)

    def _reject(self, words: str) -> Decision:
        tried = self.workers
        if tried > self._before:
            self._up = tried, self._now + self._rest
        else:
            self._down = tried, self._now + self._rest
        self._rest = min(2 * self._rest, _LAST_REST)
        self._phase, self._control = "control", []
        self._go_to(self._before)
        return Decision(self._before, kept=True, reason=words)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _noise(control: list[float], trial: list[float]) -> float:
    """The difference of the two means that 19 of 20 comparisons of equal numbers stay below (one-sided t-test)."""
    freedom = len(control) + len(trial) - 2
    variance = sum(_squares(values) for values in (control, trial)) / freedom
    return t95(freedom) * sqrt(variance * (1 / len(control) + 1 / len(trial)))


def t95(freedom: int) -> float:
    """The one-sided 95 % quantile of Student's distribution; from 12 degrees of freedom on, that of 12, which is above
    the true one.

    Args:
        freedom: degrees of freedom, at least 1.
    """
    return _T95[min(freedom, len(_T95)) - 1]


def _squares(values: list[float]) -> float:
    mean = _mean(values)
    return sum((each - mean) ** 2 for each in values)
