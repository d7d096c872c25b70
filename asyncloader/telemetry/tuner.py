"""Decides by trials whether another value of a setting makes a run faster. Pure: no I/O, no clock.

Data path: windows of measured time -> [tuner] -> the setting.

Another value is tried because the consumer waits, whatever it waits for: no model knows the locks, stores, caches and
neighbours of a run. A change is kept only if its gain shows:

    CONTROL   two windows or more with the same value: their differences are noise (an A/A comparison)
    TRIAL     two to eight windows with the other value, behind one that is left out while the change takes effect
    accept    a change that must gain: the gain exceeds 5 %, and what the noise within control and trial can explain
              a change that saves something: the loss does not
    reject    the value before comes back, and the same change is not tried again for a while: 16 windows, then 32,
              up to 512. So a value that is right is left alone, however the figures vary.

A trial ends with its first window if that is clearly slower. A value that was accepted as a gain is not taken back for
as long as a rejected one is not tried.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple

WORTH = 0.05
"""The least part by which batches must come faster for a change to be kept."""

HEALTHY_WAIT = 0.05
"""A consumer that waits for a smaller share of the time is the bound itself."""

MOST_WAITING_WORKERS = 64
"""Workers that may be tried, whatever the number of CPUs, where samples may wait. Memory may allow fewer processes."""

CONCURRENCY = 256
"""Samples that a copy of the dataset awaits at a time, unless the user says otherwise."""

_WINDOW_S, _SETTLED_WINDOW_S = 0.5, 2.0  # the least seconds of a window, until the value has settled, and then
_QUICK_WINDOW_S, _QUICK_SKIP_S = 0.15, 0.05  # of a quick trial: a window that decides, and any other
_LEAST_BATCHES = 8
_MOST = 8  # windows of a control or a trial
_AFTER_LOSS = 4  # the least windows of a control behind a trial that was slower
_CLEARLY = 0.85  # of the control's rate: a trial that is slower in its first window ends with that
_CLEAR_GAIN = 0.5  # a gain that no noise explains
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9, 1.86, 1.83, 1.81, 1.8, 1.78)
_FIRST_REST, _LAST_REST = 16, 512  # windows for which a rejected change is not tried again
_AT_ITS_END = 0.15  # the gain that an unfinished trial must show to be kept
_NEARLY = 0.8  # the share of what a step adds that it must gain, for the next one to be larger
_BUSY = 0.7  # the share of their time for which fewer workers may be busy, where they suffice


class Measured(NamedTuple):
    """The figures of a stretch of time in which no setting changed.

    Attributes:
        batches: delivered.
        seconds: its length.
        waited: share of it that the consumer waited for batches.
        busy: share of their time that the workers spent on tasks.
        most: the largest value that there is room for.
        limit: the reason of `most`, in words.
    """

    batches: int
    seconds: float
    waited: float
    busy: float
    most: int
    limit: str = "the cores"

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / max(self.seconds, 1e-9)


class Decision(NamedTuple):
    """A change of the setting.

    Attributes:
        value: from now on.
        kept: whether it is decided; False: it is tried.
        reason: why, in a sentence.
    """

    value: int
    kept: bool
    reason: str


class WorkerTuner:
    """The decisions about a loader's number of workers, over all of its epochs: twice as many are tried, or four times
    as many where the last step has gained nearly as much as it added; then half as many. Where the consumer is the
    bound, as many as would be busy.

    Args:
        value: to begin with, at least 1.
        quick: whether the trials have a few seconds in all: the windows are short, and steps go up to eight times the
            number.
    """

    def __init__(self, value: int, *, quick: bool = False) -> None:
        self.value = value
        """The value now: of the trial, while one runs."""
        self.settled = False
        """Whether the last control led to no trial."""
        self.tries = False
        """Whether a trial runs."""
        self.gain = 1.0
        """The factor by which batches come faster than with the first value: the product of the gains of the trials
        whose values were kept."""
        self.seen = 0
        """Number of windows that were taken into account."""
        self._quick = self._leaps = quick
        self._least = 1 if quick else 2  # windows of a control, or of a trial whose gain is large
        self._before = value  # to which a rejected trial returns
        self._saves = False  # whether the trial is one that need not gain
        self._skips = True  # the next window is left out: a change, or a start, takes effect in it
        self._lost = False  # whether the newest trial was slower
        self._control: list[float] = []
        self._trial: list[float] = []
        self._waited: list[float] = []
        # Values from which on (up) or down to which (down) nothing is tried, until that window.
        self._up: tuple[int, int] = (0, 0)
        self._down: tuple[int, int] = (0, 0)
        self._rest = _FIRST_REST

    @property
    def window(self) -> tuple[float, int]:
        """The least seconds and batches of the next window: each worker's batches come together."""
        seconds = _SETTLED_WINDOW_S if self.settled else _WINDOW_S
        if self._quick:
            measures = not self._skips and (self.tries or not self._control)
            seconds = _QUICK_WINDOW_S if measures else _QUICK_SKIP_S
        elif self._skips:
            seconds /= 2
        return seconds, max(_LEAST_BATCHES, 2 * self.value)

    def largest(self, most: int) -> int:
        """The largest number that the next trial may have, where there is room for `most`."""
        return min((2 if not self._leaps else 8 if self._quick else 4) * self.value, most)

    @property
    def kept(self) -> int:
        """The value that was kept last: while a trial runs, that before it."""
        return self._before if self.tries else self.value

    def interrupted(self) -> None:
        """The next window is no measure: an epoch begins, or workers are started."""
        self._skips = True

    def may_try(self, value: int) -> bool:
        """Whether the next window may begin a trial of this larger value."""
        least, until = self._up
        return not self.tries and (value < least or self.seen + 1 >= until)

    def failed(self, reason: str, most: int) -> Decision | None:
        """End the trial, or go on with `most`: there is no room for more. Returns the change to make now, if any."""
        if self.tries:
            return self._reject(reason)
        if self.value <= most:
            return None
        self._up = self.value, self.seen + self._rest
        self._go_to(most)
        self._before, self._control = most, []
        return Decision(most, kept=True, reason=reason)

    def finish(self) -> Decision | None:
        """The time for trials is over: keep what is tried only if it is clearly faster so far."""
        if not self.tries:
            return None
        if self._trial and _mean(self._trial) > (1 + _AT_ITS_END) * _mean(self._control) > 0:
            return self._accept(f"batches came {_mean(self._trial) / _mean(self._control) - 1:+.1%} faster")
        return self._reject(f"the trial's time was over, with {self.value}")

    def observe(self, window: Measured) -> Decision | None:
        """Take a window into account. Returns the change to make now; None: none."""
        self.seen += 1
        if self._skips:
            self._skips = False
            return None
        if self.tries:
            return self._judge(window)
        self._control = [*self._control, window.rate][-_MOST:]
        if self.value > window.most:
            return self._cut(window)
        # Behind a trial that was slower a longer control, so that losses do not follow one another.
        if len(self._control) < (_AFTER_LOSS if self._lost and not self._quick else self._least):
            return None
        started = self._saving(window) if window.waited < HEALTHY_WAIT else self._exploring(window)
        self.settled = started is None
        return started

    # ------------------------------------------------------------------------------------------ values to try

    def _exploring(self, window: Measured) -> Decision | None:
        """Try another number while the consumer waits."""
        for target in (self.largest(window.most), min(2 * self.value, window.most), max(1, self.value // 2)):
            if target != self.value and not self._rests(target):
                why = f"the consumer waits {window.waited:.0%} of the time"
                if target == window.most and target > self.value:
                    why += f"; {window.limit} allow {window.most}"
                return self._start(target, why)
        return None

    def _saving(self, window: Measured) -> Decision | None:
        """Try the number that suffices, for all that was seen, where the consumer is the bound."""
        target = max(1, ceil(self.value * window.busy / _BUSY))
        if target >= self.value or self._rests(target):
            return None
        why = f"the consumer is the bound, and workers are busy {window.busy:.0%} of the time"
        return self._start(target, why, saves=True)

    def _cut(self, window: Measured) -> Decision:
        """Lower the value without a trial: there is no room for it."""
        self._go_to(window.most)
        self._before, self._control = window.most, []
        return Decision(window.most, kept=True, reason=f"{window.limit} allow {window.most} at most")

    def _rests(self, target: int) -> bool:
        """Whether this value is not tried again yet."""
        if target > self.value:
            least, until = self._up
            return self.seen < until and target >= least
        most, until = self._down
        return self.seen < until and target <= most

    def _start(self, target: int, reason: str, *, saves: bool = False) -> Decision:
        self._before, self._saves = self.value, saves
        self._go_to(target)
        self.tries = True
        return Decision(target, kept=False, reason=reason)

    def _go_to(self, value: int) -> None:
        self.value, self._skips = value, True
        self._trial, self._waited = [], []

    # ------------------------------------------------------------------------------------------------ judging

    def _judge(self, window: Measured) -> Decision | None:
        self._trial.append(window.rate)
        self._waited.append(window.waited)
        control, trial = _mean(self._control), _mean(self._trial)
        change = trial / max(control, 1e-9) - 1.0
        if change < _CLEARLY - 1.0:
            return self._reject(f"batches came {-change:.0%} slower, with {self.value}")
        if change > _CLEAR_GAIN and len(self._trial) >= self._least:
            return self._accept(f"batches came {change:+.1%} faster")
        if len(self._trial) < max(2, self._least):
            return None
        noise = _noise(self._control, self._trial) / max(control, 1e-9)
        needed = max(WORTH, noise)
        words = f"batches came {change:+.1%} faster, where {noise:.1%} is noise"
        if not self._saves:
            if change > needed:
                return self._accept(words)
            # Not worth it, as far as is known; or worth it only if more windows lower the noise.
            few = noise > 2 * WORTH and len(self._trial) < _MOST // 2
            if (change < WORTH and not few) or len(self._trial) >= _MOST:
                return self._reject(f"{words}, with {self.value}")
            return None
        # Kept unless it costs something: also waiting, where the consumer was the bound before.
        if -change > needed or (_mean(self._waited) > 2 * HEALTHY_WAIT and -change > WORTH / 2):
            return self._reject(f"{words}, with {self.value}")
        if noise <= WORTH or len(self._trial) >= _MOST:
            return self._accept(words)
        return None

    def _accept(self, words: str) -> Decision:
        gain, added = _mean(self._trial) / max(_mean(self._control), 1e-9), self.value / self._before
        self.gain *= gain
        self._leaps = gain > _NEARLY * added > _NEARLY
        self._lost = False
        if not self._saves:
            rest = self._before, self.seen + self._rest
            if self.value > self._before:
                self._down = rest
            else:
                self._up = rest
        self.tries, self._before = False, self.value
        # The trial's measurements are the control of the next trial.
        self._control, self._trial = self._trial, []
        return Decision(self.value, kept=True, reason=words)

    def _reject(self, words: str) -> Decision:
        tried, self._lost = self.value, _mean(self._trial) < (1 - WORTH) * _mean(self._control)
        if tried > self._before:
            self._up = tried, self.seen + self._rest
        else:
            self._down = tried, self.seen + self._rest
        self._rest = min(2 * self._rest, _LAST_REST)
        self.tries, self._control = False, []
        self._go_to(self._before)
        return Decision(self._before, kept=True, reason=words)


def most_in_memory(workers: int, largest: int, free: int) -> int:
    """Return how many workers there may be: more than now only within half of the memory that is free without them,
    as files that they read, and the consumer, need some, too.

    Args:
        workers: number of them now.
        largest: bytes that one takes.
        free: bytes that are left beside them.
    """
    return max(workers, (free + workers * largest) // 2 // largest)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _noise(control: list[float], trial: list[float]) -> float:
    """The difference of the two means that 19 of 20 comparisons of equal values stay below (one-sided t-test)."""
    freedom = len(control) + len(trial) - 2
    variance = sum((each - _mean(values)) ** 2 for values in (control, trial) for each in values) / freedom
    return t95(freedom) * sqrt(variance * (1 / len(control) + 1 / len(trial)))


def t95(freedom: int) -> float:
    """The one-sided 95 % quantile of Student's distribution; from 12 degrees of freedom on, that of 12, which is above
    the true one.

    Args:
        freedom: degrees of freedom, at least 1.
    """
    return _T95[min(freedom, len(_T95)) - 1]
