"""Run the planted runs: ``python -m tests.verdicts [--rows NAME,...] [--seeds 11,12] [--kinds sync,async]``;
``--auto`` measures settings that are "auto" instead (`auto.py`).

For each row, loop and seed: the run itself, its verdict, the runs with the settings that it names as worth trying, and
those of the grid, all in this process, one after the other. Prints a line for each, and at the end the table;
``--save`` writes the table into docs/reference/verdicts.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.cpus import usable_cpus
from asyncloader.options.objects import grouped
from asyncloader.telemetry.diagnosis import Diagnosis
from tests.verdicts.auto import measure
from tests.verdicts.planted import CannotPlant
from tests.verdicts.rows import ROWS, Row

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verdicts.md"
SEEDS = (11, 12, 13, 14, 15)
_PAGE = """\
# Verdicts

Runs whose bound is planted: whether [`diagnose()`](../how-to/make-it-faster.md) names it, and what the settings gain
that it names as worth trying. The costs of samples are drawn from the {seeds}. *Tried* are those settings; *got*,
the time of the run through that with the fastest of them, or 1 where none was faster; *of the best*, how much of the
best setting's gain that is, among {grid}. Medians over the seeds; measured on {cpus} CPUs by
`python -m tests.verdicts {arguments}`.

{table}"""


_GRID = (
    "numbers of workers (0 to 64), `prefetch_factor` (1 to 4), `concurrency` (4 to 256), persistent workers and sizes "
    "of rings, as far as they can act"
)


class Outcome(NamedTuple):
    """The results of a planted run."""

    row: Row
    kind: str
    diagnosis: Diagnosis
    seconds: float
    tried: float
    best: float
    best_setting: dict[str, Any]

    @property
    def right(self) -> bool:
        return self.diagnosis.bound in self.row.bounds

    @property
    def reached(self) -> float:
        """The part of the best gain that the candidates reach."""
        return self.best / self.tried


def read(row: Row, kind: str, seed: int, options: dict[str, Any]) -> tuple[float, Diagnosis]:
    """Read all epochs. Returns the seconds, and the verdict."""
    if kind == "sync":
        with row.beside(), DataLoader[Any](row.dataset(seed), **grouped(options)) as loader:
            begin = time.perf_counter()
            for _ in range(row.epochs):
                for batch in loader:
                    row.consume(batch)
            return time.perf_counter() - begin, loader.diagnose()

    async def loop() -> tuple[float, Diagnosis]:
        async with AsyncDataLoader[Any](row.dataset(seed), **grouped(options)) as loader:
            begin = time.perf_counter()
            for _ in range(row.epochs):
                async for batch in loader:
                    row.consume(batch)
            return time.perf_counter() - begin, loader.diagnose()

    with row.beside():
        return asyncio.run(loop())


def merged(options: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Options with a change, as `clone` applies it."""
    found = {**options, **change}
    if not found["num_workers"]:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            found.pop(name, None)
    return found


def run(row: Row, kind: str, seed: int, *, grid: bool) -> Outcome:
    """Run a row, with the settings that its verdict names as worth trying, and with those of its grid."""
    seconds, diagnosis = read(row, kind, seed, row.options)
    best, tried, best_setting = seconds, seconds, dict[str, Any]()
    candidates = [dict(each) for each in diagnosis.candidates]
    for number, setting in enumerate([*candidates, *(row.grid if grid else ())]):
        found = read(row, kind, seed, merged(row.options, setting))[0]
        if found < best:
            best, best_setting = found, setting
        if number < len(candidates):
            tried = best
    return Outcome(row, kind, diagnosis, seconds, tried, best, best_setting)


def main() -> int:
    """Run the rows that the arguments select. Returns 1 if a verdict is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts")
    parser.add_argument("--rows", default="", help="parts of names, joined by commas")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--kinds", default="sync,async")
    parser.add_argument("--grid", default=True, action=argparse.BooleanOptionalAction)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--auto", action="store_true", help='measure settings that are "auto" beside fixed numbers')
    given = parser.parse_args()
    wanted = [each for each in given.rows.split(",") if each]
    if given.auto:
        print(measure(wanted))
        return 0
    outcomes: list[Outcome] = []
    for row in ROWS:
        if wanted and not any(part in row.name for part in wanted):
            continue
        for kind in given.kinds.split(","):
            for seed in map(int, given.seeds.split(",")):
                try:
                    outcome = run(row, kind, seed, grid=given.grid)
                except CannotPlant as reason:
                    print(f"left out {row.name}: {reason}", flush=True)
                    continue
                outcomes.append(outcome)
                mark = "ok   " if outcome.right else "WRONG"
                found = outcome.diagnosis
                print(
                    f"{mark} {row.name} [{kind}, {seed}]: {found.bound}, {outcome.seconds:.2f} s, "
                    f"{[*map(dict, found.candidates)]} -> {outcome.tried:.2f} s, "
                    f"best {outcome.best:.2f} s {outcome.best_setting}, reached {outcome.reached:.0%}"
                )
                print(f"      {found.text}", flush=True)
    text = table(outcomes)
    print(text)
    if given.save:
        grid = _GRID if given.grid else "these settings alone"
        arguments, seeds = " ".join(sys.argv[1:]), f"seed{'s' * (',' in given.seeds)} {given.seeds.replace(',', ', ')}"
        PAGE.write_text(_PAGE.format(seeds=seeds, cpus=usable_cpus(), table=text, grid=grid, arguments=arguments))
    return 0 if all(outcome.right for outcome in outcomes) else 1


def table(outcomes: list[Outcome]) -> str:
    """Return the table: a line for each row and loop, with medians over the seeds."""
    lines = [
        "| planted | loop | verdict | right | tried | got | of the best |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.row.name, outcome.kind), []).append(outcome)
    for (name, kind), found in groups.items():
        settings = [
            ", ".join(f"`{key}={value}`" for each in outcome.diagnosis.candidates for key, value in each.items())
            for outcome in found
        ]
        tries = statistics.mode(settings) or "nothing"
        gain = statistics.median(each.seconds / each.tried for each in found)
        reached = statistics.median(each.reached for each in found)
        right = sum(each.right for each in found)
        loop = "`for`" if kind == "sync" else "`async for`"
        bound = statistics.mode(each.diagnosis.bound for each in found)
        verdict = f"{bound} | {right} of {len(found)} | {tries}"
        lines.append(f"| {name} | {loop} | {verdict} | {gain:.2f} | {reached:.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
