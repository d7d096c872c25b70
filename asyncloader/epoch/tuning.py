"""Changes the settings of an epoch that are the loader's to choose, while it runs: those given as "auto".

Data path: beside the pipeline, in its loop's thread; without workers in the consumer's.

Time is looked at when a batch is delivered, so nothing ticks while the consumer rests. A window is closed once it is
long enough, judged by `diagnose`, and passed to the tuner of one setting, which may change that: `telemetry/trials.py`
has the rules. The settings take turns: it is the next one's once nothing is left to be tried of this one. So no trial
measures the change of another setting.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from asyncloader.epoch.run_reading import run_of
from asyncloader.options.auto_value import AutoValue
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.telemetry.diagnosis import Diagnosis, diagnose
from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.statistics import Statistics
from asyncloader.telemetry.trials import Decision, Measured, Tuner

_log = logging.getLogger("asyncloader")

_LOOK_S = 0.02  # between two looks at whether a setting has taken effect, or at whether a window has enough batches
_REST_S = 2.0  # between two looks at whether another iterator still changes the settings


class Room(NamedTuple):
    """What a setting may become: the value that the diagnosis proposes (None: none), the largest, and its reason."""

    proposed: int | None
    most: int
    limit: str


class TunedSetting:
    """A setting of one epoch that its tuner changes.

    Args:
        auto: the loader's choice, which outlives the epoch.
    """

    name: str
    """The option."""

    def __init__(self, auto: AutoValue) -> None:
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

    def room(self, verdict: Diagnosis, run: Run, config: EpochConfig) -> Room:
        """What the setting may become now."""
        raise NotImplementedError

    def carry_out(self, before: int, decision: Decision) -> None:
        """Change the setting as its tuner has decided."""
        self.tell(before, decision)
        self.apply(decision.value)

    def apply(self, value: int) -> None:
        """Put a value into effect."""
        raise NotImplementedError

    def words(self, value: int) -> str:
        """A value in words."""
        raise NotImplementedError

    def close(self) -> None:
        """The epoch has ended."""

    def tell(self, before: int, decision: Decision) -> None:
        """Log a decision."""
        verb = "tries" if not decision.kept else "keeps" if decision.value == before else "goes to"
        instead = "" if before == decision.value else f" instead of {before}"
        self.note(f"{verb} {self.words(decision.value)}{instead}: {decision.reason}")

    def note(self, words: str) -> None:
        """Keep and log a line about the setting."""
        self.auto.decisions.append(words)
        _log.info('%s="auto" %s', self.name, words)


class EpochTuning:
    """The tuned settings of one epoch.

    Args:
        settings: at least one.
        config: the epoch's options.
        statistics: the loader's counters.
        workers: returns the number of workers now; None: it is that of the options.
    """

    def __init__(
        self,
        settings: Sequence[TunedSetting],
        config: EpochConfig,
        statistics: Statistics,
        workers: Callable[[], int] | None = None,
    ) -> None:
        self._settings = settings
        # Weak: the loop refers to this, and must not keep the iterator, which the user's dataset and functions may
        # refer to.
        self._config = weakref.ref(config)
        self._statistics = statistics
        self._workers = workers
        tuners = [setting.auto.tuner for setting in settings]
        # An unfinished trial goes on; else short epochs must not always begin with the same setting.
        self._turn = min(range(len(tuners)), key=lambda each: (not tuners[each].tries, tuners[each].seen))
        self._due = 0.0
        self._drives = self._waits = False
        self._begun: Run | None = None  # the figures at the beginning of the window
        self._in_first = True  # no batch was delivered yet

    def start(self) -> None:
        """Begin with the epoch."""
        self._tuner.interrupted()
        self._drives = self._drive()
        if self._drives:
            for setting in self._settings:
                setting.resume()

    def delivered(self) -> None:
        """A batch was delivered: see whether a window has ended."""
        now = perf_counter()
        if now < self._due and not self._in_first:
            return
        config = self._config()
        if config is None:
            return  # the iterator was freed
        if self._in_first:
            # From here: the time to the first batch is that of starting workers.
            self._in_first = False
            self._begin_window(self._run(config))
            return
        if not self._drive():
            self._due = now + _REST_S
            return
        if not self._drives:
            # The iterator that changed the settings has ended.
            self._drives = True
            for setting in self._settings:
                setting.resume()
            self._tuner.interrupted()
            self._begin_window(self._run(config))
            return
        pending = [setting.pending(now) for setting in self._settings]
        if any(pending):
            self._due, self._waits = now + _LOOK_S, True
            return
        if self._waits:
            self._waits = False
            self._tuner.interrupted()
            self._begin_window(self._run(config))
            return
        assert self._begun is not None
        if self._statistics.batches - self._begun.batches < self._tuner.window[1]:
            self._due = now + _LOOK_S
            return
        run = self._run(config)
        self._observe(run.since(self._begun), config)
        self._begin_window(run)

    def close(self) -> None:
        """The epoch has ended: let another iterator change the settings."""
        for setting in self._settings:
            setting.auto.release(self)
            setting.close()

    @property
    def _tuner(self) -> Tuner:
        tuner: Tuner = self._settings[self._turn].auto.tuner
        return tuner

    def _drive(self) -> bool:
        return all(setting.auto.drive(self) for setting in self._settings)

    def _run(self, config: EpochConfig) -> Run:
        return run_of(config, self._statistics, None if self._workers is None else self._workers())

    def _begin_window(self, run: Run) -> None:
        self._begun = run
        self._due = perf_counter() + self._tuner.window[0]

    def _observe(self, run: Run, config: EpochConfig) -> None:
        setting, tuner = self._settings[self._turn], self._tuner
        verdict = diagnose(run)
        proposed, most, limit = setting.room(verdict, run, config)
        seconds = max(run.elapsed_s, 1e-9)
        window = Measured(
            batches=run.batches,
            seconds=seconds,
            waited=min(1.0, run.wait_s / seconds),
            bound=verdict.bound,
            proposed=proposed,
            busy=run.busy_s / (seconds * max(1, run.workers)),
            most=most,
            limit=limit,
        )
        before = setting.value
        decision = tuner.observe(window)
        if decision is not None:
            setting.carry_out(before, decision)
        elif tuner.settled and not tuner.tries and len(self._settings) > 1:
            self._turn = (self._turn + 1) % len(self._settings)
            self._tuner.begin()
