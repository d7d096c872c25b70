"""`asyncloader try`: runs the user's program with torch's loader and with ours, in turns, and says what is gained.

Data path: command -> [try_command: program_run, faults, summary] -> a table, or JSON.

The first round runs torch's loader twice (their difference is noise), ours, and ours with each setting that its verdict
names. The fastest goes on, in rounds of torch's, ours and that one, until the ratio is known well or the time is up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncloader.commands.findings import Finding, as_lines, document, in_bytes
from asyncloader.commands.terminal import encode_all, print_json, print_line
from asyncloader.comparing.faults import find_faults
from asyncloader.comparing.program_run import ProgramRun, run_program
from asyncloader.comparing.summary import (
    RunSummary,
    first_difference,
    gain_of,
    is_gain,
    judging_place,
    spread_of,
    sum_up,
)

_MOST_S, _LEAST_S = 300.0, 0.5
_ALWAYS_S = 100.0  # for each of the first runs, which are always made
_HARDLY = 0.05  # a program that waits for a smaller share of its time can gain nothing
_NARROW = 1.1  # of an interval that needs no further rounds: its upper bound, as a multiple of the lower
_FAILED, _NO_GAIN = 1, 3
_COLUMNS = ("loader", "batches/s", "waits", "first batch", "memory", "equal batches")


class ProgramFailed(Exception):
    """The program ended with an error. The text has the end of its standard error in its last lines."""


def run(
    target: str | None, command: Sequence[str], *, seconds: float, cwd: Path | None, as_json: bool, markdown: bool
) -> int:
    """Compare a program's loaders, and print the result. Returns the exit code: 0 for a gain, 3 for none, 1 if the
    program failed.

    Args:
        target: ``"module:make_loader"``, in place of a program; or None.
        command: the program and its arguments.
        seconds: of each run, from its first batch on.
        cwd: folder of which each run gets a copy as its working directory; None: all run in the current one.
        as_json, markdown: how it is printed.

    Raises:
        OSError: the program cannot be started.
        ValueError: there is no program, it iterates no loader, or `seconds` is out of range.
    """
    if not _LEAST_S <= seconds <= _MOST_S:
        raise ValueError(f"--seconds should be from {_LEAST_S} to {_MOST_S:g}, but got {seconds}")
    if (target is None) == (not command):
        raise ValueError("give a program, as in: asyncloader try -- python train.py; or module:make_loader")
    if os.name != "posix":
        raise ValueError(f"runs are ended by signals to their session, which {sys.platform} does not have")
    if target is not None:
        command = [sys.executable, "-m", "asyncloader.comparing.target_program", target]
    trial = Trial(command, seconds, cwd)
    try:
        trial.measure()
        code = trial.answer()
    except ProgramFailed as error:
        trial.findings.append(Finding("program", "problem", str(error)))
        code = _FAILED
    if as_json:
        print_json({**document(trial.findings), "ok": code == 0})
        return code
    encode_all(sys.stdout)
    *others, last = trial.findings
    rows = [each for each in others if each.name == "run"]
    for each in others:
        if each not in rows:
            print_line(f"- {each.name}: {each.text}; {each.advice}" if markdown else as_lines(each))
    for line in _table([each.text.split("\t") for each in rows], markdown):
        print_line(line)
    print_line(last.text)
    return code


class Contender:
    """A loader that is compared.

    Args:
        name: for people.
        engine: of the recorder's plan.
        options: of ours.
    """

    def __init__(self, name: str, engine: str = "asyncloader", options: Mapping[str, Any] | None = None) -> None:
        self.name, self.engine, self.options = name, engine, dict(options or {})
        self.runs: list[RunSummary] = []
        self.chosen = False

    @property
    def judged(self) -> list[RunSummary]:
        """The runs that count: the fastest of several is partly the luckiest, so that its first run does not."""
        return self.runs[1:] if self.chosen else self.runs


class Trial:
    """Runs a program in turns.

    Attributes:
        findings: so far; the last is the answer, once `answer` was called.
    """

    def __init__(self, command: Sequence[str], seconds: float, cwd: Path | None) -> None:
        self._command, self._seconds, self._cwd = command, seconds, cwd
        self._began, self._longest, self._place = time.monotonic(), 0.0, ""
        self._base = Contender("torch", "torch")
        self._others: list[Contender] = []
        self.findings: list[Finding] = []

    def measure(self) -> None:
        """Make all runs. Raises ProgramFailed, and as `run`."""
        before = {} if self._cwd else dict(_files())
        last = self._run(self._base)
        self.findings += self._describe(last)
        written = [] if self._cwd else [name for name, changed in _files() if before.get(name) != changed]
        if written:
            text = f"the first run wrote {', '.join(written[:5])}{', ...' * (len(written) > 5)}"
            advice = "if the program goes on from such files, give --cwd FOLDER: each run gets a copy of it"
            self.findings.append(Finding("files", "note", text, advice))
        self._run(self._base)
        if self._base.engine == "torch":
            self._others.append(Contender("asyncloader"))
            last = self._run(self._others[0])
        if self._base.runs[0].wait_frac < _HARDLY:
            return
        for options in _candidates(last, self._place):
            name = "asyncloader, " + ", ".join(f"{key}={value!r}" for key, value in options.items())
            contender = Contender(name, options=options)
            if self._has_time():
                try:
                    self._run(contender)
                    self._others.append(contender)
                except ProgramFailed as error:
                    self.findings.append(Finding("setting", "note", f"{name}: {error}"))
        if not self._others:
            return
        best = max(self._others, key=lambda each: each.runs[0].rate * (self._equal(each)[:2] != "no"))
        best.chosen = bool(best.options)
        while self._has_time() and not self._is_narrow(best):
            for each in dict.fromkeys([self._base, self._others[0], best]):
                if self._has_time():
                    self._run(each)

    def answer(self) -> int:
        """Append the table's rows and the answer to the findings. Returns the exit code."""
        for each in (self._base, *self._others):
            self.findings.append(_row(each, spread_of(each.runs), self._equal(each)))
        text, gains = self._sentence()
        self.findings.append(Finding("answer", "ok" if gains else "note", text))
        return 0 if gains else _NO_GAIN

    def _sentence(self) -> tuple[str, bool]:
        base, spread = self._base, spread_of(self._base.runs)
        waits = sum(each.wait_frac for each in base.runs) / len(base.runs)
        if waits < _HARDLY:
            return f"no gain: training waits {waits:.0%} of the time", False
        known = [(gain, each) for each in self._others if (gain := gain_of(each.judged, base.runs)) is not None]
        if not known:
            return "no gain: no other loader gave two batches in each run", False
        gain, best = max(known, key=lambda pair: (pair[1].chosen or not pair[1].options, pair[0].ratio))
        numbers = f"{gain.low:.2g} to {gain.high:.2g}; two runs of {base.name} differ by {spread:.0%}"
        if best.options:
            numbers = f"{numbers}; with {best.name.partition(', ')[2]}"
        text = f"{gain.ratio:.2g} times ({numbers})"
        if self._equal(best)[:2] == "no":
            return f"no gain: the batches are not those of two runs of {base.name}, which are equal: {text}", False
        return (text, True) if is_gain(gain, spread) else (f"no gain: {text}", False)

    def _equal(self, contender: Contender) -> str:
        """Say whether a loader's batches are equal to those of the program as it is."""
        one, two = self._base.runs[:2]
        if first_difference(one, two) is not None:
            return f"not comparable: two runs of {self._base.name} differ"
        number = first_difference(one, contender.runs[0])
        if number is not None and "num_workers" in contender.options:
            return "other workers draw others"  # as with torch's loader
        return "yes" if number is None else f"no, from batch {number} on"

    def _run(self, contender: Contender) -> ProgramRun:
        left = _MOST_S - (time.monotonic() - self._began)
        plan = {"engine": contender.engine, "options": {self._place: contender.options}}
        most = min(_ALWAYS_S, left) if self._place else _ALWAYS_S
        found = run_program(self._command, plan, seconds=self._seconds, most=most, source=self._cwd)
        self._longest = max(self._longest, found.seconds)
        if found.code:
            text = f"with {contender.name}'s loader the program ended with exit code {found.code}:\n{found.errors}"
            raise ProgramFailed(text.strip())
        if not self._place:
            self._place = _judging_place(found)
        contender.runs.append(sum_up(found.processes, self._place, found.memory))
        return found

    def _has_time(self) -> bool:
        return time.monotonic() - self._began + self._longest < _MOST_S

    def _is_narrow(self, best: Contender) -> bool:
        gain = gain_of(best.judged, self._base.runs)
        return gain is not None and len(self._base.runs) > 2 and gain.high < _NARROW * gain.low

    def _describe(self, first: ProgramRun) -> Iterator[Finding]:
        for place in dict.fromkeys(place for each in first.processes for place in each["loaders"]):
            records = [each["loaders"][place] for each in first.processes if place in each["loaders"]]
            judges = "; it judges" if place == self._place and len(first.processes[0]["loaders"]) > 1 else ""
            if place == self._place and records[0]["ours"]:
                self._base.name, self._base.engine = "asyncloader as it is", "as it is"
            text = f"{place}: {records[0]['kind']} of {'asyncloader' if records[0]['ours'] else 'torch'}, "
            text += f"num_workers={records[0]['workers']}, {sum(each['batches'] for each in records)} batches{judges}"
            yield Finding("loader", "ok", text)
        yield from find_faults(first.processes, first.workers)


def _judging_place(found: ProgramRun) -> str:
    """Return the place of the loader that judges. Raises ValueError: there is none."""
    place = judging_place(found.processes)
    if place is not None:
        return place
    if "No module named 'asyncloader'" in found.errors:
        raise ValueError("the Python that runs the program has no asyncloader: install it there")
    if not found.began:
        raise ValueError("no Python process with asyncloader's hook ran: python -I, -S and -E leave sitecustomize out")
    raise ValueError(f"no DataLoader gave two batches in {found.seconds:.0f} s; give more --seconds, if it needs them")


def _candidates(found: ProgramRun, place: str) -> list[dict[str, Any]]:
    records = [each["loaders"][place] for each in found.processes if place in each["loaders"]]
    candidates: list[dict[str, Any]] = records[0]["candidates"][:3] if records else []
    return candidates


def _files() -> Iterator[tuple[str, int]]:
    """Yield the files in the working directory, the first 20,000, and when they were changed."""
    number = 0
    for folder, folders, names in os.walk("."):
        folders[:] = [each for each in folders if not each.startswith((".", "__pycache__"))]
        for each in names:
            number += 1
            if number > 20_000:
                return
            file = Path(folder, each)
            if file.is_file():
                yield str(file), file.stat().st_mtime_ns


def _row(contender: Contender, spread: float, equal: str) -> Finding:
    """Return a row of the table as a finding: its cells are separated by tabs."""
    runs = contender.runs
    rate, waits = (sum(each) / len(runs) for each in zip(*((one.rate, one.wait_frac) for one in runs), strict=True))
    first = min((each.first_s for each in runs if each.first_s is not None), default=None)
    memory = max((each.memory for each in runs if each.memory is not None), default=None)
    between = f" (±{spread:.0%} in {len(runs)} runs)" if len(runs) > 1 else ""
    texts = f"{rate:.3g}{between}", f"{waits:.0%}", "" if first is None else f"{first:.2g} s"
    text = "\t".join((contender.name, *texts, "" if memory is None else in_bytes(memory), equal))
    figures = {"rate": rate, "spread": spread, "wait_frac": waits, "first_s": first, "memory": memory, "equal": equal}
    return Finding("run", "ok", text, figures={"options": contender.options, "runs": len(runs), **figures})


def _table(rows: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    """Return the lines of the table."""
    if not rows:
        return []
    if markdown:
        return [f"| {' | '.join(each)} |" for each in (_COLUMNS, ["---"] * len(_COLUMNS), *rows)] + [""]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    return ["  ".join(map(str.ljust, each, widths)).rstrip() for each in (_COLUMNS, *rows)]
