"""Inputs as people have them, read by torch, ours and the peers: `python -m tests.benchmarks.inputs`.

Data path: seed -> files -> [rounds of child processes] -> a section of the page.

The files, from the top down: `inputs_plan` has the measurements, `inputs_data` makes the files and has the datasets,
`inputs_child` measures one of `inputs_loaders` in a process of its own, and `inputs_report` makes the section.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import days, inputs_report, sections
from .harness import ROOT, JobFailed, Results, attempt
from .inputs_data import INPUTS
from .inputs_plan import MODULES, PEERS, REFERENCE, ROWS
from .plan import TORCH, Job
from .store import running_store

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
MODULE = "tests.benchmarks.inputs"


def measure(name: str, rounds: int, *, quick: bool, log: Callable[[str], None]) -> Results:
    """Measure one row, in rounds whose order turns around; torch comes first, whose time is the others' training step.

    Raises:
        JobFailed: a measurement failed, a peer's three times in a row, or a loader's content is not the reference's.
        RuntimeError: the store did not start.
    """
    row, results, seconds = ROWS[name], Results(), 0.1 if quick else 1.0
    with tempfile.TemporaryDirectory(prefix="inputs-") as place, ExitStack() as stack:
        folder = Path(place)
        batches = INPUTS[name].make(folder, row.quick if quick else row.samples)
        (folder / "batches.json").write_text(json.dumps(batches), encoding="utf-8")
        store = f"{stack.enter_context(running_store(folder))}/{row.latency}" if row.latency else ""

        def run(loader: str, step: float = 0.0) -> dict[str, Any]:
            job = Job("inputs", name, loader, seconds=seconds, store=store, folder=place, step=step)
            output, _ = attempt(job, results, f"{loader}, {name}", peer=loader in PEERS)
            for metric in ("rate", "stepped", "fed"):
                if metric in output:
                    results.add(f"{name}/{metric}", loader, output[metric])
            log(f"{name}, {loader}: {', '.join(f'{key} {value}' for key, value in output.items())}")
            return output

        def read(loader: str, step: float = 0.0) -> dict[str, Any]:
            output = run(loader, step)
            if output["checksum"] != wanted["checksum"]:
                raise JobFailed(f"{name}: {loader} delivered other content than the files have")
            return output

        wanted = run(REFERENCE)
        loaders = [loader for loader in row.loaders[1:] if not missing(MODULES.get(loader, "asyncloader"))]
        for loader in row.loaders[1:]:
            if loader not in loaders:
                log(f"{name}, {loader}: not run, {MODULES[loader]} is not installed")
        for number in range(rounds):
            began = time.monotonic()
            step = read(TORCH)["step"]
            for loader in row.limits:
                run(loader)
            for loader in loaders if number % 2 == 0 else reversed(loaders):
                read(loader, step)
            log(f"{name}: round {number + 1} of {rounds} in {time.monotonic() - began:.0f} s")
    return results


def missing(*modules: str) -> list[str]:
    """Those of these modules that are not installed."""
    return [module for module in modules if find_spec(module) is None]


def save(name: str, results: Results, command: str, page: Path = PAGE) -> None:
    """Put a row into the section of the page, over these rounds and those of the day before; other rows stay."""
    rounds = page.with_suffix(".json")
    days.add(rounds, f"inputs/{name}", dt.datetime.now(dt.UTC).date().isoformat(), results)
    measured = {each: kept for each in ROWS if (kept := days.read(rounds, f"inputs/{each}"))[1]}
    text = sections.insert(page.read_text(encoding="utf-8"), inputs_report.section(measured, command))
    page.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Measure and print the tables; the exit code: 2 if a measurement failed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Measure loaders on photos, tokens, tables, texts and shards.",
    )
    parser.add_argument("--quick", action="store_true", help="1 round over few samples instead of 3")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (3; 1 with --quick)")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to measure, joined by commas (%(default)s)")
    parser.add_argument("--save", action="store_true", help=f"write these rows into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.save and options.quick:
        parser.error("--save needs all samples: leave out --quick")

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for name in names:
        try:
            results = measure(name, options.rounds or (1 if options.quick else 3), quick=options.quick, log=log)
        except JobFailed as failure:
            log(f"no table, because a measurement failed: {failure}")
            log("The peers come with: make bench, or pip install --group bench.")
            return 2
        print(f"{name}\n\n{inputs_report.table(name, results)}\n", flush=True)
        if options.save:
            save(name, results, f"python -m {MODULE} --save")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
