"""EpochTuning: windows begin once a change has taken effect, and one iterator at a time changes the number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncloader.epoch.tuning import EpochTuning, TunedSetting
from asyncloader.options.auto import AutoWorkers
from asyncloader.telemetry.statistics import Statistics
from asyncloader.telemetry.tuner import Measured, Tuner


class Doubling(Tuner):
    """Tries twice the value, once."""

    @property
    def window(self) -> tuple[float, int]:
        return 0.0, 1

    def _steps(self, window: Measured) -> Iterable[int]:
        return () if self.value > 1 else (2,)


def choice() -> AutoWorkers:
    auto = AutoWorkers()
    auto.tuner = Doubling(1)
    return auto


class Setting(TunedSetting):
    """Writes down what becomes of it."""

    units = "of them", "of them"

    def __init__(self, name: str, applied: list[tuple[str, int]], auto: AutoWorkers | None = None) -> None:
        super().__init__(auto or choice())
        self.name, self._applied, self.waits, self.closed = name, applied, False, False

    def pending(self, now: float) -> bool:
        return self.waits

    def room(self, waits: bool) -> tuple[int, str]:
        return 8, "the test"

    def apply(self, value: int) -> None:
        self._applied.append((self.name, value))

    def close(self) -> None:
        self.closed = True


def delivered(tuning: EpochTuning, statistics: Statistics, batches: int) -> None:
    """Deliver so many batches, each a millisecond after the one before."""
    for _ in range(batches):
        statistics.batches += 1
        statistics.elapsed_s += 1e-3
        statistics.wait_s += 1e-3
        tuning._due = 0.0
        tuning.delivered()


def test_a_trial_that_gains_nothing() -> None:
    """Batches come no faster, so that it is rejected, behind two windows of it."""
    statistics, applied = Statistics(), list[Any]()
    setting = Setting("a", applied)
    tuning = EpochTuning(setting, statistics)
    tuning.start()
    delivered(tuning, statistics, 40)
    assert applied[:3] == [("a", 1), ("a", 2), ("a", 1)]
    assert list(setting.auto.decisions)[:2] == [
        "tries 2 of them instead of 1: the consumer waits 100% of the time",
        "goes to 1 of them instead of 2: batches came +0.0% faster, where 0.0% is noise, with 2",
    ]


def test_a_change_that_has_not_taken_effect_is_not_measured() -> None:
    """Windows begin once nothing is pending."""
    statistics, applied = Statistics(), list[Any]()
    setting = Setting("a", applied)
    tuning = EpochTuning(setting, statistics)
    tuning.start()
    delivered(tuning, statistics, 2)
    setting.waits = True
    seen = setting.auto.tuner.seen
    delivered(tuning, statistics, 20)
    assert setting.auto.tuner.seen == seen
    setting.waits = False
    delivered(tuning, statistics, 20)
    assert ("a", 2) in applied


def test_one_iterator_changes_the_settings() -> None:
    """The next one goes on when the first has ended, with the number that it has left."""
    statistics, applied = Statistics(), list[Any]()
    first = Setting("first", applied)
    second = Setting("second", applied, first.auto)
    one, two = (EpochTuning(each, statistics) for each in (first, second))
    one.start()
    two.start()
    delivered(two, statistics, 10)
    delivered(one, statistics, 4)
    assert applied == [("first", 1), ("first", 2)]
    one.close()
    assert first.closed
    delivered(two, statistics, 2)
    assert applied[2:] == [("second", 2)]
