"""Changes the number of an epoch's workers while it runs, if it is the loader's to choose: ``num_workers="auto"``.

Data path: beside the pipeline, in its loop's thread.

Time is looked at when a batch is delivered, so nothing ticks while the consumer rests. A window is closed once it is
long enough, and passed to the tuner, which may change the number: `telemetry/tuner.py` has the rules. It
changes neither what is in a batch, nor its place: the scheduler decides on the order.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import NamedTuple

from asyncloader.options.auto import AutoWorkers
from asyncloader.telemetry.statistics import Statistics
from asyncloader.telemetry.tuner import Decision, Measured

_log = logging.getLogger("asyncloader")

_LOOK_S = 0.02  # between two looks at whether a change has taken effect, or at whether a window has enough batches
_REST_S = 2.0  # between two looks at whether another iterator still changes the number


class TunedSetting:
    """A setting of one epoch that its tuner changes.

    Args:
        auto: the loader's choice, which outlives the epoch.
    """

    units: tuple[str, str]
    """Its unit for 1, and for other values, in the log."""

    def __init__(self, auto: AutoWorkers) -> None:
        self.auto = auto

    @property
    def value(self) -> int:
        """The value that is in effect."""
        return self.auto.number

    def resume(self) -> None:
        """This epoch changes the setting from now on: put the value of the tuner into effect."""
        self.apply(self.auto.number)

    def pending(self, now: float) -> bool:
        """Whether a change has yet to take effect."""
        del now
        return False

    def room(self, waits: bool) -> tuple[int, str]:
        """The largest value that the setting may have now, and its reason.

        Args:
            waits: whether the consumer waited in the last window, so that a larger value may be tried.
        """
        raise NotImplementedError

    def carry_out(self, before: int, decision: Decision) -> None:
        """Change the setting as its tuner has decided."""
        self.tell(before, decision)
        self.apply(decision.value)

    def apply(self, value: int) -> None:
        """Put a value into effect."""
        raise NotImplementedError

    def close(self) -> None:
        """The epoch has ended."""

    def tell(self, before: int, decision: Decision) -> None:
        """Log a decision."""
        verb = "tries" if not decision.kept else "keeps" if decision.value == before else "goes to"
        instead = "" if before == decision.value else f" instead of {before}"
        self.note(f"{verb} {decision.value} {self.units[decision.value != 1]}{instead}: {decision.reason}")

    def note(self, words: str) -> None:
        """Keep and log a line about the setting."""
        self.auto.decisions.append(words)
        _log.info('num_workers="auto" %s', words)


class _Figures(NamedTuple):
    """The loader's counts at the beginning of a window."""

    batches: int
    elapsed_s: float
    wait_s: float
    busy_s: float


class EpochTuning:
    """The tuned setting of one epoch.

    Args:
        setting: the number of workers.
        statistics: the loader's counters.
    """

    def __init__(self, setting: TunedSetting, statistics: Statistics) -> None:
        self._setting, self._statistics = setting, statistics
        self._due = 0.0
        self._drives = self._waits = False
        self._begun: _Figures | None = None  # None: no batch was delivered yet

    def start(self) -> None:
        """Begin with the epoch."""
        self._setting.auto.tuner.interrupted()
        self._drives = self._setting.auto.drive(self)
        if self._drives:
            self._setting.resume()

    def delivered(self) -> None:
        """A batch was delivered: see whether a window has ended."""
        now, setting = perf_counter(), self._setting
        if self._begun is None:
            # From here: the time to the first batch is that of starting workers.
            self._begin_window()
            return
        if now < self._due:
            return
        if not setting.auto.drive(self):
            self._due = now + _REST_S
            return
        tuner = setting.auto.tuner
        if not self._drives:
            # The iterator that changed the number has ended.
            self._drives = True
            setting.resume()
            tuner.interrupted()
            self._begin_window()
            return
        if setting.pending(now):
            self._due, self._waits = now + _LOOK_S, True
            return
        if self._waits:
            self._waits = False
            tuner.interrupted()
            self._begin_window()
            return
        if self._statistics.batches - self._begun.batches < tuner.window[1]:
            self._due = now + _LOOK_S
            return
        self._observe(self._begun)
        self._begin_window()

    def close(self) -> None:
        """The epoch has ended: let another iterator change the number."""
        self._setting.auto.release(self)
        self._setting.close()

    def _figures(self) -> _Figures:
        known = self._statistics
        return _Figures(known.batches, known.elapsed_s, known.wait_s, known.busy_s)

    def _begin_window(self) -> None:
        self._begun = self._figures()
        self._due = perf_counter() + self._setting.auto.tuner.window[0]

    def _observe(self, begun: _Figures) -> None:
        setting = self._setting
        batches, seconds, wait_s, busy_s = (one - other for one, other in zip(self._figures(), begun, strict=True))
        seconds = max(seconds, 1e-9)
        before = setting.value
        waited, busy = min(1.0, wait_s / seconds), busy_s / (seconds * before)
        decision = setting.auto.tuner.observe(Measured(int(batches), seconds, waited, busy, *setting.room(wait_s > 0)))
        if decision is not None:
            setting.carry_out(before, decision)
