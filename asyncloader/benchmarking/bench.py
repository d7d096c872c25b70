"""Measures a loader, searches for a faster setting, and compares that setting with the user's loader and torch's.

Data path: target -> [bench: interpreter, search_settings, comparison] -> findings, a report. User code runs in child
processes only.

The search measures each setting in a few short runs, and the fastest of them is partly the luckiest. So no figure of
the search is reported as a gain: the chosen setting is measured again in rounds. Each round runs every loader once and
the user's loader twice; the difference between the user's two runs is noise.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncloader.benchmarking import words
from asyncloader.benchmarking.comparison import LEAST_ROUNDS, compare, judge
from asyncloader.benchmarking.html_report import as_html
from asyncloader.benchmarking.outcome import Compared, Contender, MeasuredRun, Outcome, Phase
from asyncloader.benchmarking.search_settings import Setting, apply_predictions, choose_best, propose_variants
from asyncloader.commands.findings import Finding
from asyncloader.verification import verdict
from asyncloader.verification.interpreter import Interpreter, ServerEnded
from asyncloader.verification.user_code import UserFailure
from asyncloader.verification.verify import import_problem

SERVER = "asyncloader.benchmarking.server"

_MOST_S = 86_400
_LEAST_CAP_S = 60.0  # for a run of the user's loader, which may be slow on a busy machine
_OTHERS_CAP = 20.0, 10  # for runs of other loaders: the least seconds, and the multiple of the user's run
_WINDOWS = 60  # into which the whole time is divided; a run measures about one window
_SHORTEST_S, _LONGEST_S = 0.05, 2.0  # bounds of a window
_SEARCHING = 0.5  # the share of the time that the search may use
_FINALISTS, _FINALS = 3, 2  # settings that are measured again before the choice, and the number of repetitions
_ALWAYS = 4  # loaders that are measured even when the time is up
_WAITS = 0.6  # the share of computing below which samples count as waiting


def bench(target: str, *, seconds: float = 60.0, html: Path | None = None) -> Iterator[Finding]:
    """Benchmark a loader, and yield the findings; the last finding is the answer.

    Args:
        target: ``"module:make_loader"`` or ``"file.py:make_loader"``, which names a function without arguments that
            returns a loader of torch or asyncloader. The function may be async.
        seconds: time after which no run begins, except in the three rounds of comparison that are always made.
        html: path of the file to which the report is written.

    Raises:
        ValueError: the function does not exist or makes no loader, or `seconds` is not above 0, or exceeds a day.
        OSError: the file cannot be written.
        UnsupportedPlatform: the platform cannot fork processes.
    """
    if not 0 < seconds <= _MOST_S:
        raise ValueError(f"seconds should be above 0 and at most {_MOST_S} (a day), but got {seconds!r}")
    if "fork" not in multiprocessing.get_all_start_methods():
        from asyncloader.errors import UnsupportedPlatform

        raise UnsupportedPlatform(f"asyncloader bench forks the processes of its runs, which {sys.platform} cannot do")
    with Interpreter(target, None, SERVER) as interpreter:
        benchmark = Benchmark(interpreter, seconds)
        findings: list[Finding] = []
        for finding in benchmark.findings():
            findings.append(finding)
            yield finding
    if html is not None:
        html.write_text(as_html(target, benchmark.known, findings), encoding="utf-8")


class Benchmark:
    """Runs the benchmark of a loader.

    Attributes:
        known: the measurements so far; None until the loader's options are known.
    """

    def __init__(self, interpreter: Interpreter, seconds: float) -> None:
        self._interpreter, self._seconds = interpreter, seconds
        self._cap = max(seconds, _LEAST_CAP_S)
        self._window = min(_LONGEST_S, max(_SHORTEST_S, seconds / _WINDOWS))
        self._began = 0.0
        self.known: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """Return the measurements; the loader's options must be known."""
        assert self.known is not None
        return self.known

    def findings(self) -> Iterator[Finding]:
        """Run the benchmark, and yield the findings."""
        problem = import_problem(self._interpreter, self._cap)
        if problem is not None:
            yield problem
            return
        self._began = time.monotonic()
        try:
            yield from self._run_benchmark()
        except ServerEnded as error:
            yield Finding("process", "problem", str(error), "the module's code ended its process, or blocks it")

    def _run_benchmark(self) -> Iterator[Finding]:
        """Measure the loader, search for a setting, compare, and yield the findings."""
        facts = self._ask({"do": "look"})
        if isinstance(facts, UserFailure):
            yield verdict.broken("make_loader", facts, "making the loader")
            return
        base = Setting.of(facts).normal()
        if facts["auto"]:
            job = {"do": "measure", "loader": "given", "changes": {}, "window": self._seconds / 10}
            found = self._ask(job)
            if not isinstance(found, UserFailure):
                base = base._replace(workers=found["workers"]).normal()
        self.known = outcome = Outcome(facts, base, Contender("given", base))
        yield words.loader(outcome)
        problem = self._measure_given()
        if problem is not None:
            yield problem
            return
        outcome.best = self._search()
        opponents = self._select_opponents(outcome.best)
        yield from self._compare(opponents)

    # --------------------------------------------------------------------------------------------- single runs

    def _ask(self, job: dict[str, Any]) -> dict[str, Any] | UserFailure:
        """Have a job carried out in a forked process, and return its result."""
        found: dict[str, Any] | UserFailure = self._interpreter.ask(job, self._cap)
        return found

    def _has_used(self, share: float) -> bool:
        """Return whether the benchmark has used more than a share of its time."""
        return time.monotonic() - self._began > share * self._seconds

    def _asyncloader_with(self, setting: Setting) -> Contender:
        """Return asyncloader's loader with a setting, or the user's loader if that is identical."""
        given = self.outcome.given
        return given if self.outcome.facts["ours"] and setting == given.setting else Contender("asyncloader", setting)

    def _run(self, contender: Contender, phase: Phase) -> dict[str, Any]:
        """Measure a loader once, and record the run. The result has a finding as "problem" if there is no rate."""
        outcome = self.outcome
        changes = contender.setting.change_from(outcome.base)
        if outcome.facts["auto"]:
            changes = {"num_workers": contender.setting.workers, **changes}
        found = self._ask({"do": "measure", "loader": contender.kind, "changes": changes, "window": self._window})
        name, problem, error = outcome.name(contender), None, ""
        if isinstance(found, UserFailure):
            problem, error = verdict.broken("rate", found, f"reading the loader, {name},"), f"reading it {found.text}"
            found = {}
        elif not found["rate"]:
            error = "it delivered fewer than two batches"
            text = f"{name}: {error}, too few to compute a rate"
            advice = "use a dataset with more samples, or give more --seconds"
            problem = Finding("rate", "problem", text, advice)
        rate = found.get("rate", 0.0)
        outcome.runs.append(
            MeasuredRun(contender, phase, rate, found.get("batches", 0), found.get("seconds", 0.0), error)
        )
        return {**found, "problem": problem}

    def _measure_given(self) -> Finding | None:
        """Measure the user's loader twice, and asyncloader's with the same options. Returns the problem, if any."""
        outcome = self.outcome
        own = self._asyncloader_with(outcome.base)
        began = time.monotonic()
        for contender in (outcome.given, outcome.given, *([own] if own != outcome.given else [])):
            began = time.monotonic()
            found = self._run(contender, "first")
            problem: Finding | None = found["problem"]
            if problem is not None:
                return problem
            outcome.result = found
        least, times = _OTHERS_CAP
        self._cap = min(self._cap, max(least, times * (time.monotonic() - began)))
        return None

    # -------------------------------------------------------------------------------------------------- search

    def _search(self) -> Contender:
        """SearchJob for the best setting of asyncloader's loader."""
        outcome, facts = self.outcome, self.outcome.facts
        own = self._asyncloader_with(outcome.base)
        self._try(apply_predictions(outcome.base, outcome.result["candidates"]))
        best = self._choose_best()
        self._try(propose_variants(best.setting, facts, waits=outcome.result["computing"] < _WAITS))
        for _ in range(_FINALS):
            for contender in sorted(self._rate_settings(), key=lambda each: -outcome.rate(each))[:_FINALISTS]:
                if not self._has_used(_SEARCHING) and contender != own:
                    self._run(contender, "search")
            if not self._has_used(_SEARCHING):
                self._run(own, "search")
        return self._choose_best()

    def _try(self, settings: Sequence[Setting]) -> None:
        """Measure the settings that have no run yet, until the time of the search is up."""
        known = {each.contender for each in self.outcome.runs}
        for number, setting in enumerate(settings):
            if self._has_used(_SEARCHING) and len(known) > _ALWAYS:
                self.outcome.left_out += len(settings) - number
                return
            contender = self._asyncloader_with(setting)
            if contender not in known:
                known.add(contender)
                self._run(contender, "search")

    def _rate_settings(self) -> dict[Contender, float]:
        """Return the rate of each measured setting of asyncloader's loader."""
        found = {each.contender for each in self.outcome.runs if each.rate > 0}
        given_is_ours = self.outcome.facts["ours"]
        ours = {self._asyncloader_with(each.setting) for each in found if each.kind == "asyncloader" or given_is_ours}
        return {each: self.outcome.rate(each) for each in ours}

    def _choose_best(self) -> Contender:
        """Choose the best of the settings measured so far."""
        rates = {each.setting: rate for each, rate in self._rate_settings().items()}
        return self._asyncloader_with(choose_best(rates, self.outcome.base, self.outcome.facts))

    # ------------------------------------------------------------------------------------------------- compare

    def _select_opponents(self, best: Contender) -> list[Contender]:
        """Return the loaders to compare with the user's: the best setting, and the other package's loader."""
        outcome = self.outcome
        opponents = [best] if best != outcome.given else []
        if not outcome.facts["ours"]:
            return list(dict.fromkeys([*opponents, self._asyncloader_with(outcome.base)]))
        if not outcome.facts["not_torch"]:
            opponents.append(Contender("torch", outcome.base._replace(threads=False, concurrency=0)))
        return opponents

    def _compare(self, opponents: list[Contender]) -> Iterator[Finding]:
        """Measure the loaders in rounds, and yield the findings of the comparison."""
        outcome, given = self.outcome, self.outcome.given
        turns: list[tuple[Contender, list[float]]] = [(each, []) for each in (given, given, *opponents)]
        rounds, longest = 0, 0.0
        while rounds < LEAST_ROUNDS or not self._has_used(1.0 - longest / self._seconds):
            began = time.monotonic()
            # Each round begins with a different loader, so that no loader has the same place in all rounds.
            for place in range(len(turns)):
                contender, rates = turns[(rounds + place) % len(turns)]
                found = self._run(contender, "rounds")
                problem: Finding | None = found["problem"]
                if problem is None:
                    rates.append(found["rate"])
                elif contender == given:
                    yield problem
                    return
            rounds, longest = rounds + 1, max(longest, time.monotonic() - began)
        (_, first), (_, second), *rest = turns
        outcome.control = compare(second, first)
        both = [(one * other) ** 0.5 for one, other in zip(first, second, strict=True)]
        failed = [contender for contender, rates in rest if len(rates) < rounds]
        for contender, rates in rest:
            if contender not in failed:
                ratio = compare(rates, both)
                outcome.compared.append(Compared(contender, ratio, judge(ratio, outcome.control)))
        yield from words.describe(outcome)
        yield from self._report_comparison(failed)

    def _report_comparison(self, failed: Sequence[Contender]) -> Iterator[Finding]:
        """Yield the comparison with the other package's loader, and the answer."""
        outcome = self.outcome
        chosen = next((each for each in outcome.compared if each.contender == outcome.best), None)
        answer = words.setting(outcome, chosen)
        for contender in failed:
            error = next(each.error for each in reversed(outcome.runs) if each.contender == contender and each.error)
            text = f"{outcome.name(contender)} could not be measured in every round: {error}"
            if contender == outcome.best:
                answer = Finding("setting", "note", text)
            else:
                yield Finding("same options", "note", text)
        if outcome.facts["not_torch"]:
            yield words.not_torch(outcome.facts["not_torch"])
        yield from (words.same_options(outcome, each) for each in outcome.compared if each is not chosen)
        yield answer
