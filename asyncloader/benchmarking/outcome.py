"""Holds the measurements of a benchmark: runs, comparisons, and the loader's own figures.

Data path: bench -> [outcome] -> words, html_report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from asyncloader.benchmarking.comparison import Judgement, RateRatio
from asyncloader.benchmarking.search_settings import Setting

Phase = Literal["first", "search", "rounds"]
Kind = Literal["given", "asyncloader", "torch"]


class Contender(NamedTuple):
    """A loader that is measured.

    Attributes:
        kind: "given" for the user's loader; else the package whose loader is made with the user's options.
        setting: setting of the loader.
    """

    kind: Kind
    setting: Setting


class MeasuredRun(NamedTuple):
    """A run of a loader.

    Attributes:
        contender: loader that was run.
        phase: part of the benchmark: the "first" runs, the "search" for a setting, or the "rounds" of comparison.
        rate: batches per second; 0 if the run failed or too few batches came.
        batches: number of batches that were counted.
        seconds: time in which the counted batches came.
        error: reason in words if the run has no rate; else empty.
    """

    contender: Contender
    phase: Phase
    rate: float
    batches: int = 0
    seconds: float = 0.0
    error: str = ""


class Compared(NamedTuple):
    """A comparison with the user's loader.

    Attributes:
        contender: loader that was compared.
        found: ratio of its rate to the user's.
        judgement: whether the ratio shows a difference.
    """

    contender: Contender
    found: RateRatio
    judgement: Judgement


@dataclass
class Outcome:
    """The measurements of a benchmark.

    Attributes:
        facts: description of the user's loader.
        base: setting of the user's loader.
        given: the user's loader.
        runs: runs in the order in which they were made.
        result: stages, verdict and rate of the last of the first runs, in which asyncloader's loader has the user's
            options.
        best: loader that the search chose.
        left_out: number of settings that were not measured for lack of time.
        control: comparison of the user's loader with itself.
        compared: comparisons of other loaders with the user's.
    """

    facts: Mapping[str, Any]
    base: Setting
    given: Contender
    runs: list[MeasuredRun] = field(default_factory=list)
    result: Mapping[str, Any] = field(default_factory=dict)
    best: Contender | None = None
    left_out: int = 0
    control: RateRatio | None = None
    compared: list[Compared] = field(default_factory=list)

    def rates(self, contender: Contender, *phases: Phase) -> list[float]:
        """Return the rates of a loader's runs in these phases."""
        return [
            each.rate for each in self.runs if each.contender == contender and each.phase in phases and each.rate > 0
        ]

    def rate(self, contender: Contender) -> float:
        """Return the median rate of a loader: of its rounds, else of its earlier runs, else 0."""
        rates = self.rates(contender, "rounds") or self.rates(contender, "first", "search")
        return median(rates) if rates else 0.0

    def name(self, contender: Contender) -> str:
        """Name a loader by its class and setting."""
        if contender == self.given:
            return f"yours ({contender.setting})"
        kind: Sequence[str] = ("torch's DataLoader",) if contender.kind == "torch" else ()
        if contender.kind != "torch" and not self.facts["ours"]:
            kind = ("asyncloader.DataLoader",)
        return ", ".join((*kind, str(contender.setting)))
