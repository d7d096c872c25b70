"""`asyncloader try`: runs the user's program with torch's loader and with ours, in turns, and prints the gain.

Data path: command -> [try_command: program -> recorder -> records -> summary] -> a table, or JSON.

The first round runs torch's loader twice (their difference is noise), ours, and ours with each setting that its verdict
names. The fastest goes on, in rounds of torch's, ours and the fastest, until the ratio is known well or the time is up.

The program is a session of its own. A run is ended by SIGTERM to its process group, and after 5 s by SIGKILL to each
process that is in the session, or has the run's folder in its environment, as the workers of torchrun have.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from asyncloader.commands import summary
from asyncloader.commands.recorder import PLAN
from asyncloader.commands.terminal import encode_all, print_json, print_line
from asyncloader.verification.findings import Finding, as_lines, document, in_bytes, printable

_GRACE_S, _POLL_S, _MEMORY_S = 5.0, 0.05, 1.0
_TAIL = 4096  # bytes of standard error that are kept

_HOOK = """\
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import dirname
spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if each != dirname(__file__)])
if spec is not None and spec.loader is not None:  # the file that this one stands before
    spec.loader.exec_module(module_from_spec(spec))
from asyncloader.commands.recorder import begin
begin()
"""


class ProgramRun(NamedTuple):
    """The result of a run: records of its processes and reports of its workers; whether a Python process had the
    recorder; the exit code (None: the run was ended by us); the bytes that its processes used at most (PSS; None:
    unknown); the end of its standard error; and the seconds that it took.
    """

    processes: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    began: bool
    code: int | None
    memory: int | None
    errors: str
    seconds: float


def run_program(
    command: Sequence[str], plan: Mapping[str, Any], *, seconds: float, most: float, source: Path | None
) -> ProgramRun:
    """Run a program, in a copy of the folder `source` (None: in the current folder), for some
    seconds from its first batch on, but no longer than `most`. `plan` has the arguments of `ProgramRecorder`.

    Raises:
        OSError: the program cannot be started, or the folder not be copied.
    """
    with tempfile.TemporaryDirectory(prefix="asyncloader-try-", ignore_cleanup_errors=True) as made:
        folder, began, memory, due = Path(made), time.monotonic(), 0, 0.0
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(_HOOK)
        (folder / "plan.json").write_text(json.dumps(plan))
        if source is not None:
            shutil.copytree(source, folder / "cwd", symlinks=True)
        paths = [str(folder / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (folder / "stderr").open("wb") as errors:
            program = subprocess.Popen(
                command,
                cwd=None if source is None else folder / "cwd",
                env={**os.environ, PLAN: made, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        until = inf
        try:
            while (code := program.poll()) is None and (now := time.monotonic()) < min(until, began + most):
                if until == inf and any(folder.glob("process-*.json")):
                    until = now + seconds
                if now > due:
                    memory, due = max(memory, _memory(_members(program.pid, made))), now + _MEMORY_S
                time.sleep(_POLL_S)
        finally:
            _end(program, made)
        processes, workers = (
            [json.loads(each.read_text()) for each in sorted(folder.glob(f"{kind}-*.json"))]
            for kind in ("process", "worker")
        )
        tail = (folder / "stderr").read_bytes()[-_TAIL:].decode(errors="replace")
        seconds, seen = time.monotonic() - began, any(folder.glob("began-*"))
        return ProgramRun(processes, workers, seen, code, memory or None, tail, seconds)


def _end(program: subprocess.Popen[bytes], folder: str) -> None:
    """End a run, and wait until no process of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    # One that a driver holds cannot be killed, and is left.
    while (program.poll() is None or _members(program.pid, folder)) and time.monotonic() < until + _GRACE_S:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                program.kill()
                for each in _members(program.pid, folder):
                    os.kill(each, signal.SIGKILL)
        time.sleep(_POLL_S)


def _members(session: int, folder: str) -> list[int]:
    """Return the processes of a run that still run; where there is no /proc, none."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of_session = (each / "stat").read_text().rpartition(") ")[2].split()[:4]
            if state not in "ZX" and (int(of_session) == session or folder.encode() in (each / "environ").read_bytes()):
                found.append(int(each.name))
    return found


def _memory(processes: Sequence[int]) -> int:
    """Return the bytes that some processes use, with their part of shared memory."""
    total = 0
    for each in processes:
        with suppress(OSError, IndexError):
            total += 1024 * int(Path(f"/proc/{each}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
    return total


_MOST_S, _ALWAYS_S = 300.0, 100.0  # for all runs; for each of the first three, which are always made
_HARDLY = 0.05  # a program that waits for a smaller share of its time can gain nothing
_NARROW = 1.1  # of an interval that needs no further rounds: its upper bound, as a multiple of the lower
_FILES = 20_000  # that are looked at
_FAILED, _NO_GAIN = 1, 3
_COLUMNS = ["loader", "batches/s", "waits", "first batch", "memory", "equal batches"]
_TARGET = """import sys
from asyncloader.verification.runs import import_target, make_loader
loader = make_loader(import_target(sys.argv[1]), 0)
while any([True for _ in loader]): pass"""


def run(target: str | None, command: Sequence[str], seconds: float, cwd: Path | None, output: str) -> int:
    """Compare a program's loaders, and print the result as `output` says ("text", "json" or "markdown"). Returns the
    exit code. The other arguments are those of the command line.

    Raises:
        OSError: the program cannot be started.
        ValueError: there is no program, it iterates no loader, or `seconds` is out of range.
    """
    if not 0 < seconds <= _MOST_S:
        raise ValueError(f"--seconds should be above 0 and at most {_MOST_S:g}, but got {seconds:g}")
    if (target is None) == (not command):
        raise ValueError("give a program, as in: asyncloader try -- python train.py; or else module:make_loader")
    if os.name != "posix":
        raise ValueError(f"runs are ended by signals to their session, which {sys.platform} does not have")
    trial = Trial(command if target is None else [sys.executable, "-c", _TARGET, target], seconds, cwd)
    code = trial.measure()
    if output == "json":
        print_json({**document(trial.findings), "ok": code == 0})
        return code
    encode_all(sys.stdout)
    *others, last = trial.findings
    rows = [_COLUMNS, *(each.text.split("\t") for each in others if each.name == "run")]
    notes = [each for each in others if each.name != "run"]
    if output == "markdown":
        lines = [f"- {each.name}: {'. '.join(filter(None, (each.text, each.advice)))}" for each in notes]
        lines += ["", *(f"| {' | '.join(each)} |" for each in (_COLUMNS, ["---"] * len(_COLUMNS), *rows[1:])), ""]
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [*map(as_lines, notes), *("  ".join(map(str.ljust, each, widths)).rstrip() for each in rows)]
    for line in [*(lines if len(rows) > 1 else map(as_lines, notes)), *map(printable, last.text.split("\n"))]:
        print_line(line)
    return code


class ProgramFailed(Exception):
    """The program ended with an error. The last lines of the text are the end of its standard error."""


class Contender:
    """A loader that is compared: its name, whether it is installed in torch's place, its options, and its runs."""

    def __init__(self, name: str, install: bool, options: Mapping[str, Any]) -> None:
        self.name, self.install, self.options = name, install, options
        self.runs: list[summary.RunSummary] = []
        self.skipped = 0  # 1: the fastest of several is partly the luckiest, so that its first run does not count


class Trial:
    """Runs a program in turns. `findings` are those so far; once `measure` has returned, the last is the answer."""

    def __init__(self, command: Sequence[str], seconds: float, cwd: Path | None) -> None:
        self._command, self._seconds, self._cwd = command, seconds, cwd
        self._began, self._longest, self._place = time.monotonic(), 0.0, ""
        self._base, self._others = Contender("torch", False, {}), list[Contender]()
        self.findings: list[Finding] = []

    def measure(self) -> int:
        """Make all runs. Returns the exit code."""
        try:
            self._compare()
        except ProgramFailed as error:
            self.findings.append(Finding("program", "problem", str(error)))
            return _FAILED
        for each in (self._base, *self._others):
            self.findings.append(_row(each, self._equal(each)))
        text = self._sentence()
        self.findings.append(Finding("answer", "note" if text.startswith("no gain") else "ok", text))
        return _NO_GAIN if text.startswith("no gain") else 0

    def _compare(self) -> None:
        before = dict(_files())
        last = self._run(self._base)
        self._describe(last)
        written = [] if self._cwd else [name for name, changed in _files() if before.get(name) != changed]
        if written:
            text = f"the first run wrote {', '.join(written[:5])}{', ...' * (len(written) > 5)}"
            advice = "if the program goes on from such files, give --cwd FOLDER: each run gets a copy of it"
            self.findings.append(Finding("files", "note", text, advice))
        self._run(self._base)
        if self._base.name == "torch":
            self._others.append(Contender("asyncloader", True, {}))
            last = self._run(self._others[0])
        if self._base.runs[0].wait_frac < _HARDLY:
            return
        records = [each[self._place] for each in last.processes if self._place in each]
        if not all(each["ours"] for each in records):
            self._others = []  # as torchdata's StatefulDataLoader
            return
        for options in records[0]["candidates"][:3] if records else ():
            setting = ", ".join(f"{name}={value!r}" for name, value in options.items())
            self._others.append(Contender(f"asyncloader, {setting}", self._base.name == "torch", options))
            try:
                if self._has_time():
                    self._run(self._others[-1])
            except ProgramFailed as error:
                self.findings.append(Finding("setting", "note", str(error)))
        self._others = [each for each in self._others if each.runs]
        rates = [each.runs[0].rate * (not self._equal(each).startswith("no:")) for each in self._others] or [0.0]
        best = [*self._others, self._base][rates.index(max(rates))]
        best.skipped = int(bool(best.options))
        while self._has_time() and best is not self._base and not self._is_known(best):
            for each in dict.fromkeys([self._base, self._others[0], best]):
                if self._has_time():
                    self._run(each)

    def _run(self, contender: Contender) -> ProgramRun:
        left = _MOST_S - (time.monotonic() - self._began)
        most = left if len(self._base.runs) > 1 and self._others and self._others[0].runs else _ALWAYS_S
        if sys.stderr is not None and sys.stderr.isatty():
            print(f"running with {contender.name}'s loader ...", file=sys.stderr)  # noqa: T201 - a command's own words
        plan = {"install": contender.install, "options": {self._place: contender.options}}
        found = run_program(self._command, plan, seconds=self._seconds, most=most, source=self._cwd)
        self._longest = max(self._longest, found.seconds)
        if found.code:
            text = f"with {contender.name}'s loader the program ended with exit code {found.code}:\n{found.errors}"
            raise ProgramFailed(text.strip())
        self._place = self._place or summary.judging_place(found.processes) or ""
        if not self._place:
            raise ValueError(_why_nothing_was_seen(found))
        contender.runs.append(summary.sum_up(found.processes, self._place, found.memory))
        return found

    def _has_time(self) -> bool:
        return time.monotonic() - self._began + self._longest < _MOST_S

    def _is_known(self, best: Contender) -> bool:
        gain = summary.gain_of(best.runs[best.skipped :], self._base.runs)
        return gain is not None and len(self._base.runs) > 2 and gain.high < _NARROW * gain.low

    def _describe(self, first: ProgramRun) -> None:
        """Append the first run's facts about the loaders to the findings."""
        places = dict.fromkeys(place for each in first.processes for place in each)
        for place in places:
            records = [each[place] for each in first.processes if place in each]
            engine, judges = "asyncloader" if records[0]["ours"] else "torch", place == self._place and len(places) > 1
            if place == self._place and records[0]["ours"]:
                self._base.name = "asyncloader as it is"
            text = f"{place}: {records[0]['kind']} of {engine}, num_workers={records[0]['workers']}, "
            text += f"{sum(each['batches'] for each in records):,} batches{'; it judges' * judges}"
            self.findings.append(Finding("loader", "ok", text))
        self.findings += summary.find_faults(first.processes, first.workers)

    def _equal(self, contender: Contender) -> str:
        """Say whether a loader's batches are equal to those of the program as it is."""
        one, two = self._base.runs[:2]
        number = summary.first_difference(one, contender.runs[0])
        if summary.first_difference(one, two) is not None:
            return f"not comparable: two runs of {self._base.name} differ"
        if number is not None and "num_workers" in contender.options:
            return "not comparable: other workers draw other random numbers"  # as with torch's loader
        return "yes" if number is None else f"no: batch {number} differs"

    def _sentence(self) -> str:
        base, waits = self._base, fmean(each.wait_frac for each in self._base.runs)
        spread = summary.spread_of(base.runs)
        if waits < _HARDLY:
            return f"no gain: training waits {waits:.0%} of the time"
        counted = [each for each in self._others if each.skipped or not each.options]
        known = [(gain, each) for each in counted if (gain := summary.gain_of(each.runs[each.skipped :], base.runs))]
        if not known:
            why = (
                "install() does not reach that loader" if base.name == "torch" else "the verdict names no other setting"
            )
            return f"no gain: {base.name} has nothing to be compared with: {why}"
        gain, best = max(known, key=lambda pair: pair[0].ratio)
        ratio, low, high = (f"{each:.2f}" if each < 2 else f"{each:.1f}" for each in gain)
        setting = f"; with {best.name.partition(', ')[2]}" if best.options else ""
        text = f"{ratio} times ({low} to {high}; two runs of {base.name} differ by {spread:.0%}{setting})"
        if self._equal(best).startswith("no:"):
            return f"no gain: the batches differ from torch's, and those of two runs of torch do not; {text}"
        return text if summary.is_gain(gain, spread) else f"no gain: {text}"


def _why_nothing_was_seen(found: ProgramRun) -> str:
    if "No module named 'asyncloader'" in found.errors:
        return "the Python that runs the program has no asyncloader: install it there"
    if not found.began:
        return "no Python process ran sitecustomize, by which loaders are seen: leave out -I, -S and -E"
    return f"no DataLoader gave two batches: a program has {_ALWAYS_S:g} s until the first, and --seconds from then on"


def _files() -> Iterator[tuple[str, int]]:
    """Yield the files in the working directory, and when they were changed."""
    number = 0
    for folder, folders, names in os.walk("."):
        folders[:] = [each for each in folders if not each.startswith((".", "__pycache__"))]
        number += len(names)
        for file in (Path(folder, each) for each in names if number < _FILES):
            if file.is_file():
                yield str(file), file.stat().st_mtime_ns


def _row(contender: Contender, equal: str) -> Finding:
    """Return a row of the table as a finding; tabs separate its cells."""
    runs, spread = contender.runs, summary.spread_of(contender.runs)
    rate, waits = fmean(each.rate for each in runs), fmean(each.wait_frac for each in runs)
    first, memory = min(each.first_s for each in runs), max(each.memory or 0 for each in runs)
    rates = f"{rate:.3g}" + (f" ±{spread:.0%} in {len(runs)} runs" if len(runs) > 1 else "")
    cells = rates, f"{waits:.0%}", f"{first:.2g} s" if first < inf else "", in_bytes(memory) if memory else "", equal
    figures = {"rate": rate, "spread": spread, "wait_frac": waits, "first_s": first, "memory": memory, "equal": equal}
    return Finding("run", "ok", "\t".join((contender.name, *cells)), figures={"options": contender.options, **figures})
