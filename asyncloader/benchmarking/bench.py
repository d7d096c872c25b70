"""Measures a loader, searches a faster setting, and measures that again beside the user's own and torch's.

Data path: target -> [bench: interpreter, search_settings, comparison] -> findings, a report. User code runs in child
processes only.

The settings are searched in single short runs, of which the best is partly the luckiest. So no figure of the search is
given as a gain: the chosen setting is measured again, in rounds in which each loader has a run, and the user's loader
two. What these two differ by is noise.
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
from asyncloader.benchmarking.search_settings import Setting, best_of, predicted, variants
from asyncloader.commands.findings import Finding
from asyncloader.verification import verdict
from asyncloader.verification.interpreter import Interpreter, ServerEnded
from asyncloader.verification.verify import import_problem

SERVER = "asyncloader.benchmarking.server"

_MOST_S = 86_400
_LEAST_CAP_S = 60.0  # for a run of the user's loader: a busy machine takes its time
_OTHERS_CAP = 20.0, 10  # for runs of others: at least so many seconds, and so many times as long as the user's took
_WINDOWS = 60  # of a run's length in the whole time
_SHORTEST_S, _LONGEST_S = 0.05, 2.0  # of a run's counted part
_SEARCHING = 0.5  # the share of the time until which settings are searched
_FINALISTS, _FINALS = 3, 2  # settings that are measured again before one is chosen, and how often
_ALWAYS = 4  # settings that are tried even when the time is up
_WAITS = 0.6  # the share of computing below which samples rather wait


def bench(target: str, *, seconds: float = 60.0, html: Path | None = None) -> Iterator[Finding]:
    """Yield the findings; the last one is the answer.

    Args:
        target: ``"module:make_loader"`` or ``"file.py:make_loader"``: a function without arguments that returns a
            loader, torch's or asyncloader's. It may be async.
        seconds: no run is begun after these, but for the rounds of comparison that are always made.
        html: a file to which a report is written.

    Raises:
        ValueError: the function does not exist, it makes no loader, or `seconds` is not above 0, or is more than a day.
        OSError: the file cannot be written.
        UnsupportedPlatform: processes cannot be forked here.
    """
    if not 0 < seconds <= _MOST_S:
        raise ValueError(f"seconds should be above 0 and at most {_MOST_S} (a day), but got {seconds!r}")
    if "fork" not in multiprocessing.get_all_start_methods():
        from asyncloader.errors import UnsupportedPlatform

        raise UnsupportedPlatform(f"asyncloader bench forks the processes of its runs, which {sys.platform} cannot do")
    if html is not None:
        html.open("a").close()  # before a minute of measuring
    with Interpreter(target, None, SERVER) as interpreter:
        benchmark = Benchmark(interpreter, seconds)
        findings: list[Finding] = []
        for finding in benchmark.findings():
            findings.append(finding)
            yield finding
    if html is not None:
        html.write_text(as_html(target, benchmark.known, findings), encoding="utf-8")


class Benchmark:
    """One benchmark.

    Attributes:
        known: all that was measured so far; None: nothing yet.
    """

    def __init__(self, interpreter: Interpreter, seconds: float) -> None:
        self._interpreter, self._seconds = interpreter, seconds
        self._cap = max(seconds, _LEAST_CAP_S)
        self._window = min(_LONGEST_S, max(_SHORTEST_S, seconds / _WINDOWS))
        self._began = 0.0
        self.known: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """What was measured, once the loader is known."""
        assert self.known is not None
        return self.known

    def findings(self) -> Iterator[Finding]:
        """Yield the findings."""
        problem = import_problem(self._interpreter, self._cap)
        if problem is not None:
            yield problem
            return
        self._began = time.monotonic()
        try:
            yield from self._benchmarked()
        except ServerEnded as error:
            yield Finding("process", "problem", str(error), "the module's code ended its process, or holds it up")

    def _benchmarked(self) -> Iterator[Finding]:
        facts = self._ask({"do": "look"})
        problem = verdict.broken("make_loader", facts, "making the loader")
        if problem is not None:
            yield problem
            return
        base = Setting.of(facts).normal()
        if facts["auto"]:
            job = {"do": "measure", "loader": "given", "changes": {}, "window": self._seconds / 10}
            found = self._ask(job)
            base = base._replace(workers=found.get("workers", base.workers)).normal()
        self.known = outcome = Outcome(facts, base, Contender("given", base))
        yield words.loader(outcome)
        problem = self._first()
        if problem is not None:
            yield problem
            return
        outcome.best = self._searched()
        others = self._others(outcome.best)
        yield from self._rounds(others)

    # --------------------------------------------------------------------------------------------- single runs

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        answer = self._interpreter.ask(job, self._cap)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer

    def _spent(self, share: float) -> bool:
        return time.monotonic() - self._began > share * self._seconds

    def _ours(self, setting: Setting) -> Contender:
        """asyncloader's loader with a setting; the user's own, if that is the same."""
        given = self.outcome.given
        return given if self.outcome.facts["ours"] and setting == given.setting else Contender("asyncloader", setting)

    def _run(self, contender: Contender, phase: Phase) -> dict[str, Any]:
        """Measure a loader once, and note the rate."""
        outcome = self.outcome
        changes = contender.setting.change_from(outcome.base)
        if outcome.facts["auto"]:
            changes = {"num_workers": contender.setting.workers, **changes}
        found = self._ask({"do": "measure", "loader": contender.kind, "changes": changes, "window": self._window})
        problem = verdict.broken("rate", found, "reading the loader")
        rate = found.get("rate", 0.0)
        error = problem.text if problem is not None else "" if rate else "it gave less than two batches"
        outcome.runs.append(
            MeasuredRun(contender, phase, rate, found.get("batches", 0), found.get("seconds", 0.0), error)
        )
        return found

    def _problem(self, found: dict[str, Any]) -> Finding | None:
        """Why the last run of a loader has no rate."""
        name = self.outcome.name(self.outcome.runs[-1].contender)
        problem = verdict.broken("rate", found, f"reading the loader, {name},")
        if problem is not None or found["rate"]:
            return problem
        text = f"{name}: {self.outcome.runs[-1].error}, of which no rate follows"
        return Finding("rate", "problem", text, "give it a dataset with more samples, or more --seconds")

    def _first(self) -> Finding | None:
        """Measure the user's loader, and ours with its options. Returns why it cannot be measured."""
        outcome = self.outcome
        own = self._ours(outcome.base)
        began = time.monotonic()
        for contender in (outcome.given, outcome.given, *([own] if own != outcome.given else [])):
            began = time.monotonic()
            found = self._run(contender, "first")
            problem = self._problem(found)
            if problem is not None:
                return problem
            outcome.result = found
        least, times = _OTHERS_CAP
        self._cap = min(self._cap, max(least, times * (time.monotonic() - began)))
        return None

    # -------------------------------------------------------------------------------------------------- search

    def _searched(self) -> Contender:
        """Search the best setting for asyncloader's loader."""
        outcome, facts = self.outcome, self.outcome.facts
        own = self._ours(outcome.base)
        self._try(predicted(outcome.base, outcome.result["candidates"]))
        best = self._best()
        self._try(variants(best.setting, facts, waits=outcome.result["computing"] < _WAITS))
        for _ in range(_FINALS):
            for contender in sorted(self._rated(), key=lambda each: -outcome.rate(each))[:_FINALISTS]:
                if not self._spent(_SEARCHING) and contender != own:
                    self._run(contender, "search")
            if not self._spent(_SEARCHING):
                self._run(own, "search")
        return self._best()

    def _try(self, settings: Sequence[Setting]) -> None:
        known = {each.contender for each in self.outcome.runs}
        for number, setting in enumerate(settings):
            if self._spent(_SEARCHING) and len(known) > _ALWAYS:
                self.outcome.left_out += len(settings) - number
                return
            contender = self._ours(setting)
            if contender not in known:
                known.add(contender)
                self._run(contender, "search")

    def _rated(self) -> dict[Contender, float]:
        """The settings of asyncloader's loader that have a rate."""
        found = {each.contender for each in self.outcome.runs if each.rate > 0}
        ours = {self._ours(each.setting) for each in found if each.kind == "asyncloader" or self.outcome.facts["ours"]}
        return {each: self.outcome.rate(each) for each in ours}

    def _best(self) -> Contender:
        rates = {each.setting: rate for each, rate in self._rated().items()}
        return self._ours(best_of(rates, self.outcome.base, self.outcome.facts))

    # ------------------------------------------------------------------------------------------------- compare

    def _others(self, best: Contender) -> list[Contender]:
        """The loaders that are compared with the user's: the best setting, and the other package's loader."""
        outcome = self.outcome
        others = [best] if best != outcome.given else []
        if not outcome.facts["ours"]:
            return list(dict.fromkeys([*others, self._ours(outcome.base)]))
        if not outcome.facts["not_torch"]:
            others.append(Contender("torch", outcome.base._replace(threads=False, concurrency=0)))
        return others

    def _rounds(self, others: list[Contender]) -> Iterator[Finding]:
        """Measure in rounds, and yield what they show."""
        outcome, given = self.outcome, self.outcome.given
        turns: list[tuple[Contender, list[float]]] = [(each, []) for each in (given, given, *others)]
        rounds, longest = 0, 0.0
        while rounds < LEAST_ROUNDS or not self._spent(1.0 - longest / self._seconds):
            began = time.monotonic()
            # Each round begins with another loader, so that none has the same place in all of them.
            for place in range(len(turns)):
                contender, rates = turns[(rounds + place) % len(turns)]
                found = self._run(contender, "rounds")
                problem = self._problem(found)
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
        yield from words.measured(outcome)
        yield from self._answer(failed)

    def _answer(self, failed: Sequence[Contender]) -> Iterator[Finding]:
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
