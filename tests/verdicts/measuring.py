"""Measures planted runs: what the verdict said, what following that gave, what "auto" reached beside fixed numbers."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncloader import DataLoader
from asyncloader.options.auto import choice_of
from asyncloader.options.objects import grouped
from asyncloader.telemetry.diagnosis import Diagnosis
from tests.verdicts.planted import AsyncPlanted
from tests.verdicts.rows import LADDER, SEEDS, Row

FEWEST = 16
"""Batches that are read at least, so that there is something to judge."""
LEAST = 0.9
"""The share of the best fixed number that "auto" reaches, and of its first number below which it stays only briefly."""


class Times(NamedTuple):
    """Seconds of each kind of run: advice and its following, "auto" with the part that counts, fixed numbers."""

    advice: float = 3.5
    auto: float = 22.0
    settled: float = 20.0
    fixed: float = 2.0


QUICK = Times(1.0, 4.0, 3.0, 0.5)


class Run(NamedTuple):
    """A run.

    Attributes:
        came: when its batches came, in seconds since the first.
        skipped: the number of batches at the beginning that do not count.
        numbers: of workers, with each batch.
        diagnosis: what was said.
    """

    came: list[float]
    skipped: int
    numbers: list[int]
    diagnosis: Diagnosis

    @property
    def rate(self) -> float:
        """Batches per second."""
        return rate(self.came, self.came[self.skipped])


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
        if self.diagnosis.bound not in self.row.bounds.split(" or "):
            found.append(f"the bound is {self.row.bounds}, but it said {self.diagnosis.bound}")
        return found + (too_slow(self.tried) if self.diagnosis.change else [])


class Chosen(NamedTuple):
    """A planted run in which the number of workers was "auto".

    Attributes:
        row, mode: which.
        first, last: the number at the first batch, and at the last.
        rate: batches per second once it had settled.
        best, best_rate: of the fixed numbers.
        below_s: the longest time below `LEAST` of the first number's rate.
        trials: decisions to try a number.
        tried: the measured change of the verdict, and what following it gave; empty: it named none.
    """

    row: Row
    mode: str
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
        return f"{named(self.row, self.mode)}: auto"

    @property
    def cells(self) -> tuple[str, ...]:
        """Of the table: planted, begins, settles, trials, of the best, below 0.9, change, following gave."""
        change = ", ".join(f"`{words(each)}`: {ratio:.2f}" for each, ratio in self.tried)
        best = f"{self.rate / self.best_rate:.0%} of {self.best_rate:.1f}/s with {self.best}"
        numbers = (str(self.first), str(self.last), str(self.trials))
        return (
            named(self.row, self.mode),
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
    options = {"batch_size": row.batch_size, "num_workers": row.num_workers, "seed": SEEDS[mode], **row.options}
    if (options := {**options, **changes})["num_workers"]:
        options["multiprocessing_context"] = "fork"  # datasets with locks and functions that are not pickled
    return DataLoader[Any](row.dataset(place), **grouped(options))


def read(row: Row, loader: DataLoader[Any], seconds: float, *, skip: bool = True) -> Run:
    """Read epochs for so long, and close the loader. The time begins with the first batch, or with `skip` as soon as
    the batches have come that were ahead of it: they were made while workers were starting.
    """
    came: list[float] = []
    numbers: list[int] = []
    skipped = ahead(loader) if skip and not row.starts else 0
    with loader:
        while True:
            for batch in loader:
                row.consume(batch)
                came.append(time.perf_counter())
                numbers.append(int(loader.stats()["data/num_workers"]))
                if len(came) >= skipped + FEWEST and came[-1] - came[skipped] >= seconds:
                    return Run([at - came[0] for at in came], skipped, numbers, loader.diagnose())


def ahead(loader: DataLoader[Any]) -> int:
    """About how many batches are made ahead of the first."""
    flight = int(getattr(loader, "concurrency", None) or 256) if isinstance(loader.dataset, AsyncPlanted) else 0
    return max(1, loader.num_workers) * ((loader.prefetch_factor or 0) + flight // (loader.batch_size or 1))


def rate(came: list[float], begin: float = 0.0) -> float:
    """Batches per second from a time on."""
    late = [at for at in came if at >= begin]
    return (len(late) - 1) / max(1e-9, late[-1] - late[0])


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
        # Until all verdicts have candidates: those without have none.
        named = [found.diagnosis.change] if found.diagnosis.change else getattr(found.diagnosis, "candidates", ())
        changes = [dict(each) for each in named]
        tried = [(change, read(row, loader.clone(**change), times.advice).rate / found.rate) for change in changes]
    return Advised(row, mode, found.diagnosis, tried)


def fact(text: str) -> str:
    """The verdict's sentences about what happened, without the share of waiting and without advice."""
    return re.split(r" (?:Worth trying|auto has)\b", re.sub(r"^Input-bound: [^.]*\. ", "", text))[0]


def choose(row: Row, mode: str, times: Times) -> Chosen:
    """Run a row with num_workers="auto", and with fixed numbers, in turn, twice.

    Raises:
        CannotPlant: this machine does not allow the row's condition.
    """
    with row.beside() as place:
        loader = make(row, mode, place, num_workers="auto")
        found = read(row, loader, times.auto, skip=False)
        choice = choice_of(loader)
        decisions = () if choice is None else choice.decisions
        first, change = found.numbers[0], dict(found.diagnosis.change)
        numbers = sorted({*(row.ladder or LADDER), first})
        settings: list[dict[str, Any]] = [{"num_workers": number} for number in numbers]
        if change and change not in settings:
            settings.append(change)
        rates: list[list[float]] = [[] for _ in settings]
        for _ in range(2):
            for each, into in zip(settings, rates, strict=True):
                into.append(read(row, loader.clone(**each), times.fixed).rate)
    means = [statistics.mean(each) for each in rates]
    best = max(range(len(numbers)), key=means.__getitem__)
    begun = means[numbers.index(first)]
    return Chosen(
        *(row, mode, first, found.numbers[-1], rate(found.came, times.settled), numbers[best], means[best]),
        below_s=longest_below(found.came, LEAST * begun),
        trials=sum("tries" in each for each in decisions),
        tried=[(change, means[settings.index(change)] / begun)] if change else [],
    )
