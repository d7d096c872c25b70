"""The benchmarks on a GPU: `python -m tests.benchmarks.gpu`; 1 if a figure is short, 2 if a measurement failed.

The files, from the top down: `gpu_plan` has the measurements and bounds, `gpu_child` carries out one measurement in a
process of its own by `gpu_slot` (a, d), `gpu_end` (b), `gpu_step` (c) or `gpu_soak` (e), over `gpu_loaders` and
`gpu_content` on a `gpu_card`, and `gpu_report` makes the tables.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import gpu_report, sections
from .gpu_plan import OURS, PARTS, QUICK_LIMIT_S, SOAK, SOAK_QUICK, GpuJob, Outcome, Run
from .harness import ROOT, JobFailed, Results, run_job
from .report import machine

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
CHILD = "tests.benchmarks.gpu_child"
QUICK_TEXT = "fewer configurations, 1 s a figure, and no more than six minutes"


class Measured(NamedTuple):
    """All rounds.

    Args:
        results: of them.
        rounds: their number.
        notes: on parts that were left out.
        broken: measurements of ours that failed.
    """

    results: Results
    rounds: int
    notes: list[str]
    broken: int


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; an error in them ends the program with 2."""
    parser = argparse.ArgumentParser(
        prog=gpu_report.COMMAND, description="Measure asyncloader's way to a CUDA device, as ratios in one run."
    )
    parser.add_argument("--quick", action="store_true", help=QUICK_TEXT)
    parser.add_argument("--rounds", type=int, help="interleaved rounds (3; 1 with --quick)")
    listed = "; ".join(f"{letter}: {text}" for letter, text in PARTS.items())
    parser.add_argument("--parts", default=",".join(PARTS), help=f"{listed} (%(default)s)")
    parser.add_argument("--soak", type=int, help=f"batches of part e ({SOAK:,}; {SOAK_QUICK:,} with --quick)")
    parser.add_argument("--loaders", default="", help="in parts b and c only those with this text in their name")
    parser.add_argument("--save", action="store_true", help=f"write the section of {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    options.rounds = (1 if options.quick else 3) if options.rounds is None else options.rounds
    options.soak = (SOAK_QUICK if options.quick else SOAK) if options.soak is None else options.soak
    options.parts = tuple(dict.fromkeys(options.parts.split(",")))
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.soak < 4:
        parser.error(f"--soak must be at least 4, not {options.soak}")
    if options.save and (set(options.parts) != set(PARTS) or options.loaders):
        parser.error("--save needs all parts and loaders: the section is written whole")
    return options


def measure(
    run: Run,
    rounds: int,
    log: Callable[[str], None],
    do: Callable[[GpuJob, float], Outcome] | None = None,
) -> Measured:
    """Measure all of it, round by round. Failures are noted, and the rest goes on; parts for which a quick run has no
    time are noted, too.

    Args:
        run: the parts to measure.
        rounds: how many.
        log: called with each line of progress.
        do: carries out a job within a number of seconds; the default does so in a process.
    """
    results, notes, broken = Results(), list[str](), 0
    do = do or run_apart
    began = time.monotonic()
    for number in range(rounds):
        for job in run.jobs(number):
            what = " ".join(filter(None, [job.probe, job.workload, job.loader]))
            passed = time.monotonic() - began
            if run.quick and passed > QUICK_LIMIT_S:
                notes.append(f"Round {number + 1}: no time for {what}.")
                continue
            limit = run.limit_s(job)
            if run.quick:
                limit = min(limit, QUICK_LIMIT_S + 25.0 - passed)
            try:
                figures, failures = do(job, limit)
            except JobFailed as failure:
                log(f"{what} failed: {failure}")
                figures, failures = {}, [_reason(str(failure))]
            results.failures += [f"round {number + 1}, {what}: {failure}" for failure in failures]
            broken += bool(failures) and (job.probe != "end" or job.loader in OURS)
            for metric, values in figures.items():
                for name, value in values.items():
                    results.add(metric, name, value)
                    log(f"{metric}, {name}: {value:.6g}")
        log(f"round {number + 1} of {rounds}: {time.monotonic() - began:.0f} s since the start")
    return Measured(results, rounds, notes, broken)


def run_apart(job: GpuJob, limit_s: float) -> Outcome:
    """Carry out a job in a process of its own.

    Raises:
        JobFailed: it failed, or took longer than this.
    """
    return Outcome(**run_job(job, CHILD, limit_s)[0])


def _reason(text: str) -> str:
    said = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Content|Unavailable)\b", line)]
    return (said[-1] if said else text.splitlines()[0])[:300]


def computer() -> dict[str, str]:
    """The names and versions of the machine that matter here, and of the card."""
    from . import gpu_card

    found = machine()
    kept = ("date", "processor", "cores", "memory", "kernel", "Python", "numpy", "uvloop", "spdl")
    return {name: found[name] for name in kept} | gpu_card.describe()


def save(text: str, page: Path = PAGE) -> None:
    """Put the section into the page."""
    page.write_text(sections.insert(page.read_text(encoding="utf-8"), text), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the benchmark; the exit code."""
    options = parse(arguments)
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none, and nothing is measured", file=sys.stderr)
        return 2
    from . import gpu_loaders

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = gpu_loaders.available()
    run = Run(
        parts=options.parts,
        quick=options.quick,
        cores=len(os.sched_getaffinity(0)),
        loaders=tuple(name for name in found if options.loaders in name),
        soak=options.soak,
    )
    measured = measure(run, options.rounds, log)
    measured.notes.extend(gpu_report.missing_note(found))
    command = " ".join([gpu_report.COMMAND, *arguments])
    return conclude(measured, command, PAGE if options.save else None, log)


def conclude(measured: Measured, command: str, page: Path | None, log: Callable[[str], None]) -> int:
    """Print the tables, write the section of the page, if any; the exit code.

    Where a measurement of ours failed, the page stays as it is.
    """
    print("\n\n".join(gpu_report.tables(measured.results)), flush=True)
    for each in (*measured.notes, *measured.results.failures):
        log(each)
    if measured.broken:
        log(f"{measured.broken} measurements of ours failed" + ("; nothing is saved" if page else ""))
        return 2
    if page is not None:
        save(gpu_report.section(measured.results, command, measured.rounds, computer(), measured.notes), page)
    missed = sum(not each.ok for each in gpu_report.verdicts(measured.results))
    log(f"{missed} figures short")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
