"""The benchmark's command: plans the rounds and prints the table; 1 if a floor is missed, 2 if it failed."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import sys
from collections.abc import Callable
from pathlib import Path

from . import against, days, gpu, inputs_report, report, sections, service, shared
from .harness import ROOT, JobFailed, Results, run_job, run_rounds, verify
from .plan import ROWS, Job, jobs

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
ROUNDS = PAGE.with_suffix(".json")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; an error in them ends the program with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measure asyncloader against torch's DataLoader and the peers, as ratios in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="2 short rounds instead of 6")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (6; 2 with --quick; 10 with --against)")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to measure, joined by commas (%(default)s)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="measure the peers too")
    parser.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        default=False,
        help=f"write {PAGE.relative_to(ROOT)}, over these rounds and those of the day before",
    )
    parser.add_argument(
        "--against",
        metavar="PATH",
        type=Path,
        help="another checkout of this project: measure this one's loaders against that one's, and nothing else; "
        "prints a table and writes no page",
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (10 if options.against else 2 if options.quick else 6)
    options.rows = tuple(options.rows.split(","))
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.against:
        options.save = False  # `make bench` asks for the page, which has no place for this table
        if not (options.against / "asyncloader" / "__init__.py").is_file():
            parser.error(f"--against: {options.against} is no checkout of this project")
        if options.rounds < 2:
            parser.error("--against needs at least 2 rounds: one has no confidence bounds")
    if options.save and options.rows != ROWS:
        parser.error("--save needs all rows: the page is written whole")
    return options


def main(arguments: list[str]) -> int:
    """Run the benchmark; the exit code."""
    options = parse(arguments)
    seconds = 0.3 if options.quick else 1.0

    def plan(number: int) -> list[Job]:
        planned = jobs(options.rows, seconds, options.peers, full=number == 0)
        return [dataclasses.replace(job, seconds=seconds) for job in planned]

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        if options.against:
            return compare(options, seconds, log)
        if options.peers:
            run_job(Job("peers"))
        results = run_rounds(plan, options.rounds, log)
        wrong = verify(results)
    except JobFailed as failure:
        log(f"no table, because a measurement failed: {failure}")
        if options.peers:
            log("The peers come with: make bench, or pip install --group bench. --no-peers leaves them out.")
        return 2
    if wrong:
        log("no table, because content differs: " + "; ".join(wrong))
        return 2
    writers = (report.floor_table, report.limit_table, report.peer_table, report.memory_bandwidth)
    tables = [write(results) for write in writers]
    print("\n\n".join(table for table in tables if table), flush=True)
    if options.save:
        command = " ".join(["python -m tests.benchmarks", *arguments])
        try:
            save(
                *days.add(ROUNDS, "transport", dt.datetime.now(dt.UTC).date().isoformat(), results),
                command,
                shared.section(shared.measure(log=log)),
            )
        except (JobFailed, RuntimeError) as failure:
            log(f"no page, because a measurement failed: {failure}")
            return 2
    missed = sum(not each.ok for each in report.verdicts(results))
    missed += sum(not each.ok for each in report.limit_verdicts(results))
    log(f"{missed} floors missed")
    return 1 if missed else 0


def compare(options: argparse.Namespace, seconds: float, log: Callable[[str], None]) -> int:
    """Measure this checkout against another checkout and print the table; the exit code.

    Raises:
        JobFailed: a measurement failed.
    """

    def plan(number: int) -> list[Job]:
        return against.plan(options.rows, seconds, full=number == 0)

    new, old = against.measure(options.against, plan, options.rounds, log)
    both = {(workload, f"new {loader}"): checksum for (workload, loader), checksum in new.checksums.items()}
    both |= {(workload, f"old {loader}"): checksum for (workload, loader), checksum in old.checksums.items()}
    if wrong := verify(Results(checksums=both)):
        log("no table, because content differs: " + "; ".join(wrong))
        return 2
    comparison = against.compare(new, old)
    print(against.table(comparison), flush=True)
    log(f"{comparison.short()} floors missed")
    return 1 if comparison.short() else 0


def save(results: Results, dates: list[str], command: str, memory: str = "", page: Path = PAGE) -> None:
    """Write the page, with the section on memory."""
    page.parent.mkdir(parents=True, exist_ok=True)
    text = report.page(results, dates, command, memory)
    # The sections of other commands stay: this machine need not have a card.
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    for title in (inputs_report.TITLE, service.TITLE, gpu.TITLE):
        kept = sections.find(before, title)
        text = sections.insert(text, kept) if kept else text
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
