"""Measures planted runs: what the verdict said, what following that gave."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncloader import DataLoader
from asyncloader.options.objects import grouped
from asyncloader.telemetry.diagnosis import Diagnosis
from tests.verdicts.planted import AsyncPlanted
from tests.verdicts.rows import SEEDS, Row

FEWEST = 16
"""Batches that are read at least, so that there is something to judge."""
LEAST = 0.9
"""The share of the rate before that a change must reach."""


class Times(NamedTuple):
    """Seconds of each run: advice and its following."""

    advice: float = 3.5


QUICK = Times(1.0)


class Run(NamedTuple):
    """A run.

    Attributes:
        came: when its batches came, in seconds since the first.
        skipped: the number of batches at the beginning that do not count.
        diagnosis: what was said.
    """

    came: list[float]
    skipped: int
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
        """Of the table: planted, said, candidates, following gave."""
        said = f"**{self.diagnosis.bound}**: {fact(self.diagnosis.text)}"
        change = "<br>".join(f"`{words(each)}`" for each, _ in self.tried)
        return self.name, said, change or "none", "<br>".join(f"{ratio:.2f}" for _, ratio in self.tried)

    @property
    def failures(self) -> list[str]:
        if self.diagnosis.bound in self.row.bounds.split(" or "):
            return []
        return [f"the bound is {self.row.bounds}, but it said {self.diagnosis.bound}"]


def named(row: Row, mode: str) -> str:
    """The row's name, with the mode if it has several."""
    return row.name if len(row.modes) == 1 else f"{row.name} ({mode})"


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
    skipped = ahead(loader) if skip and not row.starts else 0
    with loader:
        while True:
            for batch in loader:
                row.consume(batch)
                came.append(time.perf_counter())
                if len(came) >= skipped + FEWEST and came[-1] - came[skipped] >= seconds:
                    return Run([at - came[0] for at in came], skipped, loader.diagnose())


def ahead(loader: DataLoader[Any]) -> int:
    """About how many batches are made ahead of the first."""
    flight = int(getattr(loader, "concurrency", None) or 256) if isinstance(loader.dataset, AsyncPlanted) else 0
    return max(1, loader.num_workers) * ((loader.prefetch_factor or 0) + flight // (loader.batch_size or 1))


def rate(came: list[float], begin: float = 0.0) -> float:
    """Batches per second from a time on."""
    late = [at for at in came if at >= begin]
    return (len(late) - 1) / max(1e-9, late[-1] - late[0])


def advise(row: Row, mode: str, times: Times) -> Advised:
    """Run a row, and follow what its verdict says.

    Raises:
        CannotPlant: this machine does not allow the row's condition.
    """
    with row.beside() as place:
        loader = make(row, mode, place)
        found = read(row, loader, times.advice)
        changes = [dict(each) for each in found.diagnosis.candidates]
        tried = [(change, read(row, loader.clone(**change), times.advice).rate / found.rate) for change in changes]
    return Advised(row, mode, found.diagnosis, tried)


def fact(text: str) -> str:
    """The verdict's sentences about what happened, without the share of waiting and without advice."""
    return re.split(r" Worth trying\b", re.sub(r"^Input-bound: [^.]*\. ", "", text))[0]
