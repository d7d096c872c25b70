"""Holds what a benchmark has measured: runs, comparisons, and the loader's own figures.

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
        kind: "given": the user's own; else a loader of that package with the user's options.
        setting: with these options changed.
    """

    kind: Kind
    setting: Setting


class MeasuredRun(NamedTuple):
    """One run of a loader.

    Attributes:
        contender: the loader.
        phase: "first": to know the loader; "search": to choose a setting; "rounds": to compare.
        rate: batches per second; 0: too few batches came.
        batches: that were counted.
        seconds: in which these came.
        error: why there is no rate, in words.
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
        contender: the loader that was compared.
        found: how many times as fast it is.
        judgement: what that shows.
    """

    contender: Contender
    found: RateRatio
    judgement: Judgement


@dataclass
class Outcome:
    """All that was measured.

    Attributes:
        facts: about the user's loader.
        base: its setting.
        given: itself.
        runs: in the order in which they were made.
        result: of the last run of asyncloader's loader with the user's options: stages, verdict.
        best: the loader that the search chose.
        left_out: settings for which there was no time.
        control: the user's loader compared with itself.
        compared: others compared with it.
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
        """The rates of a loader's runs, in these phases."""
        return [
            each.rate for each in self.runs if each.contender == contender and each.phase in phases and each.rate > 0
        ]

    def rate(self, contender: Contender) -> float:
        """The median rate of a loader in the last phase in which it was measured; 0: it was not."""
        rates = self.rates(contender, "rounds") or self.rates(contender, "first", "search")
        return median(rates) if rates else 0.0

    def name(self, contender: Contender) -> str:
        """Call a loader by its class and setting."""
        if contender == self.given:
            return f"yours ({contender.setting})"
        kind: Sequence[str] = ("torch's DataLoader",) if contender.kind == "torch" else ()
        if contender.kind != "torch" and not self.facts["ours"]:
            kind = ("asyncloader.DataLoader",)
        return ", ".join((*kind, str(contender.setting)))
