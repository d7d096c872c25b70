"""Changes the settings of an epoch that are the loader's to choose, while it runs: those given as "auto".

Data path: beside the pipeline, in its loop's thread; without workers in the consumer's.

Time is looked at when a batch is delivered, so nothing ticks while the consumer rests. A window is closed once it is
long enough, and passed to the tuner of one setting, which may change that: `telemetry/tuner.py` has the rules. The
settings take turns: it is the next one's once nothing is left to be tried of this one. So no trial measures the change
of another setting. None of them changes what is in a batch, or its place: the scheduler decides on the order, and
samples of a batch start in theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from asyncloader.options.auto import AutoValue
from asyncloader.telemetry.statistics import Statistics
from asyncloader.telemetry.tuner import CONCURRENCY, LEAST_PREFETCH, MOST_PREFETCH, Decision, Measured
from asyncloader.workers.memory.segment import memory_limit
from asyncloader.workers.pool import WorkerPool

_log = logging.getLogger("asyncloader")

_LOOK_S = 0.02  # between two looks at whether a setting has taken effect, or at whether a window has enough batches
_REST_S = 2.0  # between two looks at whether another iterator still changes the settings
_RESERVE = 0.1  # the share of the memory that is left that no further batch is made into


class TunedSetting:
    """A setting of one epoch that its tuner changes.

    Args:
        auto: the loader's choice, which outlives the epoch.
    """

    units: tuple[str, str]
    """Its unit for 1, and for other values, in the log."""

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
        _log.info('%s="auto" %s', self.auto.option, words)


class Concurrency(TunedSetting):
    """The number of samples of an asynchronous map dataset that each copy awaits at a time.

    Args:
        auto: the loader's choice.
        limit: puts a number into effect, at the workers or this process's reader.
    """

    units = "sample in flight", "samples in flight"

    def __init__(self, auto: AutoValue, limit: Callable[[int], None]) -> None:
        super().__init__(auto)
        self._limit = limit

    def room(self, waits: bool) -> tuple[int, str]:
        """Up to the default."""
        del waits
        return CONCURRENCY, "the process's connections"

    def apply(self, value: int) -> None:
        """Tell the workers, or this process's reader."""
        self._limit(value)


class Prefetch(TunedSetting):
    """The number of batches that each worker may have ahead.

    Args:
        auto: the loader's choice.
        pool: the workers.
        statistics: the loader's counters, which know how large batches are.
    """

    units = "batch ahead", "batches ahead"

    def __init__(self, auto: AutoValue, pool: WorkerPool, statistics: Statistics) -> None:
        super().__init__(auto)
        self._pool, self._statistics = pool, statistics

    def room(self, waits: bool) -> tuple[int, str]:
        """Within the memory of the rings, and of the machine or control group."""
        most, limit = MOST_PREFETCH, "the indices taken ahead"
        if (rings := self._pool.ring_credits) < most:
            most, limit = rings, "rings of their size"
        figures = self._statistics
        nbytes = len(self._pool.processes) * (figures.bytes + figures.pickled) // max(1, figures.batches)
        # Only where more may be tried: it reads some files.
        if nbytes and waits and (room := memory_limit()[0]) is not None:
            fits = max(LEAST_PREFETCH, self.value + int(room * (1 - _RESERVE)) // nbytes)
            if fits < most:
                most, limit = fits, f"{room >> 20:,} MiB of free memory"
        return most, limit

    def apply(self, value: int) -> None:
        """Tell the pool, which the scheduler asks."""
        self._pool.ahead = value


class _Figures(NamedTuple):
    """The loader's counts at the beginning of a window."""

    batches: int
    elapsed_s: float
    wait_s: float
    busy_s: float


class EpochTuning:
    """The tuned settings of one epoch.

    Args:
        settings: at least one.
        statistics: the loader's counters.
        workers: returns the number of workers now, at least 1.
    """

    def __init__(self, settings: Sequence[TunedSetting], statistics: Statistics, workers: Callable[[], int]) -> None:
        self._settings, self._statistics, self._workers = settings, statistics, workers
        tuners = [setting.auto.tuner for setting in settings]
        # An unfinished trial goes on; else short epochs must not always begin with the same setting.
        self._turn = min(range(len(tuners)), key=lambda each: (not tuners[each].tries, tuners[each].seen))
        self._due = 0.0
        self._drives = self._waits = False
        self._begun: _Figures | None = None  # None: no batch was delivered yet

    def start(self) -> None:
        """Begin with the epoch."""
        self._settings[self._turn].auto.tuner.interrupted()
        self._drives = self._drive()
        if self._drives:
            for setting in self._settings:
                setting.resume()

    def delivered(self) -> None:
        """A batch was delivered: see whether a window has ended."""
        now = perf_counter()
        if self._begun is None:
            # From here: the time to the first batch is that of starting workers.
            self._begin_window()
            return
        if now < self._due:
            return
        if not self._drive():
            self._due = now + _REST_S
            return
        tuner = self._settings[self._turn].auto.tuner
        if not self._drives:
            # The iterator that changed the settings has ended.
            self._drives = True
            for setting in self._settings:
                setting.resume()
            tuner.interrupted()
            self._begin_window()
            return
        pending = [setting.pending(now) for setting in self._settings]
        if any(pending):
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
        """The epoch has ended: let another iterator change the settings."""
        for setting in self._settings:
            setting.auto.release(self)
            setting.close()

    def _drive(self) -> bool:
        return all(setting.auto.drive(self) for setting in self._settings)

    def _figures(self) -> _Figures:
        known = self._statistics
        return _Figures(known.batches, known.elapsed_s, known.wait_s, known.busy_s)

    def _begin_window(self) -> None:
        self._begun = self._figures()
        self._due = perf_counter() + self._settings[self._turn].auto.tuner.window[0]

    def _observe(self, begun: _Figures) -> None:
        setting = self._settings[self._turn]
        tuner = setting.auto.tuner
        batches, seconds, wait_s, busy_s = (one - other for one, other in zip(self._figures(), begun, strict=True))
        seconds = max(seconds, 1e-9)
        waited, busy = min(1.0, wait_s / seconds), busy_s / (seconds * self._workers())
        before = setting.value
        window = Measured(int(batches), seconds, waited, busy, *setting.room(wait_s > 0))
        decision = tuner.observe(window)
        if decision is not None:
            setting.carry_out(before, decision)
        elif tuner.settled and not tuner.tries and len(self._settings) > 1:
            self._turn = (self._turn + 1) % len(self._settings)
            self._settings[self._turn].auto.tuner.begin()
