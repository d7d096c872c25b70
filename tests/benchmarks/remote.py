"""Reads of loaders from a store with a latency: `python -m tests.benchmarks.remote`; 1 if a figure is short.

The files, from the top down: `remote_plan` has the measurements and bounds, `remote_store` serves `remote_content`,
`remote_child` measures one of `remote_loaders` (with the clients in `remote_clients`) in a process of its own, and
`remote_report` makes the tables.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import days, remote_report, sections
from .harness import ROOT, JobFailed, Results, attempt
from .remote_plan import LATENCIES, OURS, Row, rows
from .remote_store import running_store

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
ROUNDS = PAGE.with_suffix(".json")
MODULE = "tests.benchmarks.remote"


class Measured(NamedTuple):
    """All rounds.

    Args:
        results: of them.
        rounds: their number.
        load: processes that wanted to run, on average.
    """

    results: Results
    rounds: int
    load: float


def measure(planned: list[Row], rounds: int, seconds: float, log: Callable[[str], None]) -> Measured:
    """Measure all of it, in rounds whose order turns around.

    Raises:
        JobFailed: a measurement failed, a peer's three times in a row.
        RuntimeError: the store did not start.
    """
    results, loads = Results(), list[float]()
    with running_store() as store:
        for number in range(rounds):
            began = time.monotonic()
            for row in planned if number % 2 == 0 else reversed(planned):
                name = f"{row.loader}, {row.kind}, {row.latency} ms"
                output, _ = attempt(row.job(store, seconds), results, name, peer=row.loader not in OURS)
                results.add(row.metric, row.loader, output["rate"])
                results.add(row.cpu, row.loader, output["cpu"])
                loads.append(os.getloadavg()[0])
                log(f"{row.kind}, {row.latency} ms, {row.loader}: {output['rate']:,.0f} samples/s")
            log(f"remote round {number + 1} of {rounds}: {time.monotonic() - began:.0f} s")
    return Measured(results, rounds, statistics.fmean(loads))


def section(quick: bool, rounds: int, log: Callable[[str], None], command: str) -> str:
    """Measure all rows and give the section of the page, over these rounds and those of the day before.

    Raises:
        JobFailed, RuntimeError: as `measure`.
    """
    return _section(measure(rows(), rounds, 1.5 if quick else 3.0, log), command)


def _section(measured: Measured, command: str) -> str:
    kept = days.add(ROUNDS, "remote", dt.datetime.now(dt.UTC).date().isoformat(), measured.results)
    return remote_report.section(*kept, command, measured.load)


def save(text: str, page: Path = PAGE) -> None:
    """Put the section into the page."""
    page.write_text(sections.insert(page.read_text(encoding="utf-8"), text), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the benchmark; the exit code: 2 if it failed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="Measure what asyncloader and others read from a store with a latency."
    )
    parser.add_argument("--quick", action="store_true", help="1 short round instead of 3")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (3; 1 with --quick)")
    parser.add_argument("--latencies", default=",".join(map(str, LATENCIES)), help="milliseconds (%(default)s)")
    parser.add_argument("--loaders", default="", help="only those with this text in their name")
    parser.add_argument("--save", action="store_true", help=f"write the section of {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 3)
    latencies = tuple(int(each) for each in options.latencies.split(","))
    if unknown := set(latencies) - set(LATENCIES):
        parser.error(f"no such latency: {unknown}; there are {LATENCIES}")
    planned = [row for row in rows(latencies) if options.loaders in row.loader]
    if options.save and planned != rows():
        parser.error("--save needs all rows: the section is written whole")

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        measured = measure(planned, rounds, 1.5 if options.quick else 3.0, log)
    except JobFailed as failure:
        log(f"no table, because a measurement failed: {failure}")
        log("The peers come with: make bench, or pip install --group bench.")
        return 2
    print("\n\n".join(remote_report.tables(measured.results)), flush=True)
    log(f"{measured.load:.1f} processes wanted to run, on average")
    if options.save:
        save(_section(measured, " ".join([f"python -m {MODULE}", *arguments])))
    missed = sum(not each.ok for each in remote_report.verdicts(measured.results))
    log(f"{missed} figures short")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
