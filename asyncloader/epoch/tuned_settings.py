"""Puts the settings that are just a number into effect while an epoch runs: samples in flight, batches ahead.

Data path: tuning -> [tuned_settings] -> pool, or this process's reader. Neither changes what is in a batch, or its
place: the scheduler decides on the order, and samples of a batch start in theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncloader.epoch.tuning import Room, TunedSetting
from asyncloader.options.auto_concurrency import CONCURRENCY
from asyncloader.options.auto_prefetch import LEAST_PREFETCH, MOST_PREFETCH
from asyncloader.options.auto_value import AutoValue
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.telemetry.diagnosis import Diagnosis
from asyncloader.telemetry.run_figures import Run
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.memory.segment import memory_limit
from asyncloader.workers.pool import WorkerPool

_RESERVE = 0.1  # the share of the memory that is left that no further batch is made into


class Concurrency(TunedSetting):
    """The number of samples of an asynchronous map dataset that each copy awaits at a time.

    Args:
        auto: the loader's choice.
        limit: puts a number into effect.
    """

    name = "concurrency"

    def __init__(self, auto: AutoValue, limit: Callable[[int], None]) -> None:
        super().__init__(auto)
        self._limit = limit

    def room(self, verdict: Diagnosis, run: Run, config: EpochConfig) -> Room:
        """Up to the default, whatever the diagnosis proposes."""
        del verdict, run, config
        return Room(None, CONCURRENCY, "the process's connections")

    def apply(self, value: int) -> None:
        """Tell the workers, or this process's reader."""
        self._limit(value)

    def words(self, value: int) -> str:
        """As in the log."""
        return f"{value} sample{'s'[: value - 1]} in flight"


class Prefetch(TunedSetting):
    """The number of batches that each worker may have ahead.

    Args:
        auto: the loader's choice.
        pool: the workers.
        statistics: the loader's counters, which know how large batches are.
    """

    name = "prefetch_factor"

    def __init__(self, auto: AutoValue, pool: WorkerPool, statistics: Statistics) -> None:
        super().__init__(auto)
        self._pool, self._statistics = pool, statistics

    def room(self, verdict: Diagnosis, run: Run, config: EpochConfig) -> Room:
        """What the diagnosis proposes, within the memory of the rings and of the machine or control group."""
        del config
        most, limit = MOST_PREFETCH, "the indices taken ahead"
        if (rings := self._pool.ring_credits) < most:
            most, limit = rings, "rings of their size"
        figures = self._statistics
        nbytes = run.workers * (figures.bytes + figures.pickled) // max(1, figures.batches)
        # Only where more may be tried: it reads some files.
        if nbytes and run.wait_s and (room := memory_limit()[0]) is not None:
            fits = max(LEAST_PREFETCH, self.value + int(room * (1 - _RESERVE)) // nbytes)
            if fits < most:
                most, limit = fits, f"{room >> 20:,} MiB of free memory"
        return Room(verdict.change.get("prefetch_factor"), most, limit)

    def apply(self, value: int) -> None:
        """Tell the pool, which the scheduler asks."""
        self._pool.ahead = value

    def words(self, value: int) -> str:
        """As in the log."""
        return f"{value} batch{'es' if value > 1 else ''} ahead"
