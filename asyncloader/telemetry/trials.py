"""Decides by trials whether another value of a setting makes a run faster. Pure: no I/O, no clock.

Data path: statistics -> diagnosis -> [trials: proposals of one setting] -> the setting.

Subclasses, one for each setting, propose values to try. A change is kept only if its gain shows:

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

from math import sqrt
from typing import ClassVar, Literal, NamedTuple

WORTH = 0.05
"""The least part by which batches must come faster for a change to be kept."""

HEALTHY_WAIT = 0.05
"""As in the diagnosis: a consumer that waits for a smaller share of the time is the bound itself."""

_SETTLED_WINDOW_S = 2.0
_LEAST_BATCHES = 8
_MOST = 8  # windows of a control or a trial
_CLEARLY = 0.85  # of the control's rate: a trial that is slower in its first window ends with that
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9, 1.86, 1.83, 1.81, 1.8, 1.78)
_FIRST_REST, _LAST_REST = 16, 512  # windows for which a rejected change is not tried again


class Measured(NamedTuple):
    """The figures of a stretch of time in which no setting changed.

    Attributes:
        batches: delivered.
        seconds: its length.
        waited: share of it that the consumer waited for batches.
        bound: the verdict on it, `Diagnosis.bound`.
        proposed: the value that the diagnosis proposes; None: it proposes none.
        busy: share of their time that the workers spent on tasks.
        most: the largest value that there is room for.
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
    """A change of the setting.

    Attributes:
        value: from now on.
        kept: whether it is decided; False: it is tried.
        reason: why, in a sentence.
    """

    value: int
    kept: bool
    reason: str


class Proposal(NamedTuple):
    """A value to try.

    Attributes:
        value: it.
        reason: why, in a sentence.
        saves: whether it is kept if nothing becomes slower; else it must gain.
    """

    value: int
    reason: str
    saves: bool = False


Phase = Literal["control", "trial"]


class Tuner:
    """The decisions about one setting of a loader, over all of its epochs. Subclasses propose what is tried.

    Args:
        value: to begin with, at least 1.
    """

    window_s: ClassVar[float] = 0.5
    """The least seconds of a window, until the value has settled."""
    least: ClassVar[int] = 2
    """The least windows of a control or a trial."""

    def __init__(self, value: int) -> None:
        self.value = value
        """The value now: of the trial, while one runs."""
        self.settled = False
        """Whether the last control led to no trial."""
        self.gain = 1.0
        """The factor by which batches come faster than with the first value: the product of the gains of the trials
        whose values were kept."""
        self._before = value  # to which a rejected trial returns
        self._phase: Phase = "control"
        self._saves = False  # whether the trial is one that need not gain
        self._skips = True  # the next window is left out: a change, or a start, takes effect in it
        self._control: list[float] = []
        self._trial: list[float] = []
        self._waited: list[float] = []
        self._now = 0  # number of windows seen
        # Values from which on (up) or down to which (down) nothing is tried, until that window.
        self._up: tuple[int, int] = (0, 0)
        self._down: tuple[int, int] = (0, 0)
        self._rest = _FIRST_REST

    @property
    def window(self) -> tuple[float, int]:
        """The least seconds and batches of the next window."""
        return max(self.window_s, _SETTLED_WINDOW_S if self.settled else 0.0), _LEAST_BATCHES

    @property
    def seen(self) -> int:
        """Number of windows that were taken into account."""
        return self._now

    @property
    def tries(self) -> bool:
        """Whether a trial runs."""
        return self._phase == "trial"

    @property
    def kept(self) -> int:
        """The value that was kept last: while a trial runs, that before it."""
        return self._before if self.tries else self.value

    def interrupted(self) -> None:
        """The next window is no measure: an epoch begins, or workers are started."""
        self._skips = True

    def begin(self) -> None:
        """Forget the measurements so far, which are no control any more: another setting may have changed since."""
        self._control, self._skips = [], True

    def failed(self, reason: str, most: int) -> Decision | None:
        """No more than `most` is to be had: end the trial, or go on with that. Returns the change to make now; None:
        none.
        """
        if self.tries:
            return self._reject(reason)
        if self.value <= most:
            return None
        self._up = self.value, self._now + self._rest
        self._go_to(most)
        self._before, self._control = most, []
        return Decision(most, kept=True, reason=reason)

    def observe(self, window: Measured) -> Decision | None:
        """Take a window into account. Returns the change to make now; None: none."""
        self._now += 1
        if self._skips:
            self._skips = False
            return None
        if self.tries:
            return self._judge(window)
        self._control = [*self._control, window.rate][-_MOST:]
        if self.value > window.most:
            return self._cut(window)
        if len(self._control) < self.least:
            return None
        proposal = self._propose(window)
        self.settled = proposal is None
        return None if proposal is None else self._start(*proposal)

    # ------------------------------------------------------------------------------------------------- trying

    def _propose(self, window: Measured) -> Proposal | None:
        """The value to try now, which does not rest; None: none."""
        raise NotImplementedError

    def _cut(self, window: Measured) -> Decision:
        """Lower the value without a trial: there is no room for it."""
        reason = f"{window.limit} allow {window.most} at most"
        self._go_to(window.most)
        self._before = window.most
        self._control = []
        return Decision(window.most, kept=True, reason=reason)

    def _rests(self, target: int) -> bool:
        """Whether this value is not tried again yet."""
        if target > self.value:
            least, until = self._up
            return self._now < until and target >= least
        most, until = self._down
        return self._now < until and target <= most

    def _start(self, target: int, reason: str, saves: bool = False) -> Decision:
        self._before, self._saves = self.value, saves
        self._go_to(target)
        self._phase = "trial"
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
        if len(self._trial) < self.least:
            return None
        noise = _noise(self._control, self._trial) / max(control, 1e-9)
        needed = max(WORTH, noise)
        words = f"batches came {change:+.1%} faster, where {noise:.1%} is noise"
        if not self._saves:
            if change > needed:
                return self._accept(words)
            # Not worth it, or worth it only if more windows lower the noise.
            if change < WORTH or len(self._trial) >= _MOST:
                return self._reject(f"{words}, with {self.value}")
            return None
        # Kept unless it costs something: also waiting, where the consumer was the bound before.
        if -change > needed or (_mean(self._waited) > 2 * HEALTHY_WAIT and -change > WORTH / 2):
            return self._reject(f"{words}, with {self.value}")
        if noise <= WORTH or len(self._trial) >= _MOST:
            return self._accept(words)
        return None

    def _accept(self, words: str) -> Decision:
        self.gain *= _mean(self._trial) / max(_mean(self._control), 1e-9)
        if not self._saves:
            rest = self._before, self._now + self._rest
            if self.value > self._before:
                self._down = rest
            else:
                self._up = rest
        self._phase, self._before = "control", self.value
        # The trial's measurements are the control of the next trial.
        self._control, self._trial = self._trial, []
        return Decision(self.value, kept=True, reason=words)

    def _reject(self, words: str) -> Decision:
        tried = self.value
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
    """The difference of the two means that 19 of 20 comparisons of equal values stay below (one-sided t-test)."""
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
