"""Measures planted runs: what the verdict said, what following it gave, and what "auto" reached beside fixed numbers."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncloader import DataLoader
from asyncloader.options.objects import grouped
from asyncloader.telemetry.diagnosis import Diagnosis
from tests.verdicts.rows import LADDERS, SEEDS, Row

FEWEST = 16
"""Batches that are read at least, so that there is something to judge."""
LEAST = 0.9
"""The share of the best fixed number that "auto" reaches, and of its first number below which it stays only briefly."""


class Times(NamedTuple):
    """Seconds of each kind of run: advice and its following, "auto" with the part that counts, fixed numbers."""

    advice: float = 4.0
    auto: float = 22.0
    settled: float = 20.0
    fixed: float = 2.5


QUICK = Times(1.0, 4.0, 3.0, 0.5)


class Run(NamedTuple):
    """A run: when its batches came, in seconds since the first; numbers of the watched option; what was said."""

    came: list[float]
    numbers: list[int]
    diagnosis: Diagnosis


class Advised(NamedTuple):
    """A planted run, what was said, and its rate with each change that was named, as a multiple."""

    row: Row
    mode: str
    diagnosis: Diagnosis
    tried: list[tuple[dict[str, Any], float]]

    @property
    def name(self) -> str:
        return named(self.row, self.mode)

    @property
    def cells(self) -> tuple[str, ...]:
        """Of the table: planted, said, candidates or change, following gave."""
        said = f"**{self.diagnosis.bound}**: {fact(self.diagnosis.text)}"
        change = "<br>".join(f"`{words(each)}`" for each, _ in self.tried)
        return self.name, said, change or "none", "<br>".join(f"{ratio:.2f}" for _, ratio in self.tried)

    @property
    def failures(self) -> list[str]:
        found = []
        if self.diagnosis.bound not in self.row.bounds:
            found.append(f"the bound is {' or '.join(self.row.bounds)}, but it said {self.diagnosis.bound}")
        return found + (too_slow(self.tried) if self.diagnosis.change else [])


class Chosen(NamedTuple):
    """A planted run in which an option was "auto".

    Attributes:
        row, mode, setting: which.
        first, last: the number at the first batch, and at the last.
        rate: batches per second once it had settled.
        best, best_rate: of the fixed numbers.
        below_s: the longest time below `LEAST` of the first number's rate.
        trials: decisions to try a number.
        tried: the measured change of the verdict, and what following it gave; empty: it named none.
    """

    row: Row
    mode: str
    setting: str
    first: int
    last: int
    rate: float
    best: int
    best_rate: float
    below_s: float
    trials: int
    tried: list[tuple[dict[str, Any], float]]

    @property
    def name(self) -> str:
        return f"{named(self.row, self.mode)}: {self.setting}"

    @property
    def cells(self) -> tuple[str, ...]:
        """Of the table: planted, setting, begins, settles, trials, of the best, below 0.9, change, following gave."""
        change = ", ".join(f"`{words(each)}`: {ratio:.2f}" for each, ratio in self.tried)
        best = f"{self.rate / self.best_rate:.0%} of {self.best_rate:.1f}/s with {self.best}"
        numbers = (str(self.first), str(self.last), str(self.trials))
        return (
            named(self.row, self.mode),
            f"`{self.setting}`",
            *numbers,
            best,
            f"{self.below_s:.0f} s",
            change or "none",
        )

    @property
    def failures(self) -> list[str]:
        found = []
        if self.rate < LEAST * self.best_rate:
            found.append(f"{self.rate:.1f} batches/s with {self.last}, but {self.best_rate:.1f} with {self.best}")
        if self.below_s > 3:
            found.append(f"for {self.below_s:.0f} s below {LEAST} of the rate that {self.first} has")
        return found + too_slow(self.tried)


def named(row: Row, mode: str) -> str:
    """The row's name, with the mode if it has several."""
    return row.name if len(row.modes) == 1 else f"{row.name} ({mode})"


def too_slow(followed: list[tuple[dict[str, Any], float]]) -> list[str]:
    """The changes that were to be followed and made a run slower."""
    return [f"following {words(change)} gave {ratio:.2f}" for change, ratio in followed if ratio < 0.95]


def words(change: Mapping[str, Any]) -> str:
    """Options and values, as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in change.items())


def make(row: Row, mode: str, place: Any, **changes: Any) -> DataLoader[Any]:
    """Make the row's loader."""
    options = {"seed": SEEDS[mode], **row.options, **changes}
    if options["num_workers"]:
        options["multiprocessing_context"] = "fork"  # datasets with locks and functions that are not pickled
    return DataLoader[Any](row.dataset(place), **grouped(options))


def read(row: Row, loader: DataLoader[Any], seconds: float, watched: str = "num_workers") -> Run:
    """Read epochs, for so long since the first batch, and close the loader."""
    came: list[float] = []
    numbers: list[int] = []
    with loader:
        while not came or came[-1] - came[0] < seconds or len(came) < FEWEST:
            for batch in loader:
                row.consume(batch)
                came.append(time.perf_counter())
                numbers.append(int(getattr(loader, watched) or 0))
                if came[-1] - came[0] >= seconds and len(came) >= FEWEST:
                    break
        return Run([at - came[0] for at in came], numbers, loader.diagnose())


def rate(came: list[float], begin: float = 0.0) -> float:
    """Batches per second from a time on."""
    late = [at for at in came if at >= begin]
    return (len(late) - 1) / max(1e-9, late[-1] - late[0])


def steady(row: Row, came: list[float]) -> float:
    """Batches per second: from the second batch on if starts count, else without the first quarter of the time, in which
    workers start.
    """
    return rate(came, 0.0 if row.starts else came[-1] / 4)


def longest_below(came: list[float], least: float) -> float:
    """The longest time, in whole seconds, in which each second had fewer batches than `least`."""
    bins = [0] * int(came[-1])
    for at in came:
        if at < len(bins):
            bins[int(at)] += 1
    longest = here = 0
    for number in bins:
        here = here + 1 if number < least else 0
        longest = max(longest, here)
    return float(longest)


def advise(row: Row, mode: str, times: Times) -> Advised:
    """Run a row, and follow what its verdict says.

    Raises:
        CannotPlant: this machine does not allow the row's condition.
    """
    with row.beside() as place:
        loader = make(row, mode, place)
        found = read(row, loader, times.advice)
        before = steady(row, found.came)
        changes = [dict(found.diagnosis.change)] if found.diagnosis.change else candidates(found.diagnosis)
        tried = [
            (change, steady(row, read(row, loader.clone(**change), times.advice).came) / before) for change in changes
        ]
    return Advised(row, mode, found.diagnosis, tried)


def candidates(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """What a verdict names as worth trying."""
    return [dict(each) for each in getattr(diagnosis, "candidates", ())]


def fact(text: str) -> str:
    """The verdict's sentences about what happened, without the share of waiting and without advice."""
    return re.split(r" (?:Worth trying|auto has|Try|Set)\b", re.sub(r"^Input-bound: [^.]*\. ", "", text))[0]


def choose(row: Row, mode: str, setting: str, times: Times) -> Chosen:
    """Run a row with an option that is "auto", and with fixed numbers, in turn, twice.

    Raises:
        CannotPlant: this machine does not allow the row's condition.
    """
    with row.beside() as place:
        loader = make(row, mode, place, **{setting: "auto"})
        found = read(row, loader, times.auto, setting)
        first, change = found.numbers[0], dict(found.diagnosis.change)
        numbers = sorted({*(row.ladder or LADDERS[setting]), first})
        settings: list[dict[str, Any]] = [{setting: number} for number in numbers]
        if change and change not in settings:
            settings.append(change)
        rates: list[list[float]] = [[] for _ in settings]
        for _ in range(2):
            for each, into in zip(settings, rates, strict=True):
                into.append(steady(row, read(row, loader.clone(**each), times.fixed).came))
    means = [statistics.mean(each) for each in rates]
    best = max(range(len(numbers)), key=means.__getitem__)
    begun = means[numbers.index(first)]
    return Chosen(
        *(row, mode, setting, first, found.numbers[-1], rate(found.came, times.settled), numbers[best], means[best]),
        below_s=longest_below(found.came, LEAST * begun),
        trials=sum("tries" in each for each in getattr(getattr(loader, setting), "decisions", ())),
        tried=[(change, means[settings.index(change)] / begun)] if change else [],
    )
