"""Plant runs whose bound is known, and follow their verdicts: ``python -m tests.verdicts``.

Each row is read as it is, and then with what its verdict names (`measuring.py`). All runs are in this process, one
after the other. Returns 1 if a bound is wrong; each failure is printed by
name. ``--save`` writes docs/reference/verdicts.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncloader.base.cpus import usable_cpus
from tests.verdicts.measuring import QUICK, Advised, Times, advise
from tests.verdicts.planted import CannotPlant
from tests.verdicts.rows import ROWS, SEEDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verdicts.md"
_PAGE = """\
# Verdicts

Runs whose bound is planted: what [`diagnose()`](../how-to/make-it-faster.md) said of them, and how many times as fast
they were with each option that it named. Candidates are options worth trying, of which it promises nothing. Measured by
`python -m tests.verdicts --save` on {cpus} CPUs, with and without a seed where that may differ, for {times.advice:g} s
each. These begin when as many batches have come as are made ahead while workers start, or with the second batch if
workers start anew in each epoch.

| planted | said | candidates | following gave |
|---|---|---|--:|
{advised}
{left_out}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that the arguments select. Returns 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts")
    parser.add_argument("--rows", default="", help="parts of names, joined by commas; default: all")
    parser.add_argument("--modes", default=",".join(SEEDS), help="without a seed, with a seed; default: both")
    parser.add_argument("--quick", action="store_true", help="short runs, for development: their figures mean little")
    parser.add_argument("--save", action="store_true", help="write docs/reference/verdicts.md; takes all rows")
    given = parser.parse_args(arguments)
    modes = given.modes.split(",")
    if given.save and (given.rows or given.quick or set(modes) != set(SEEDS)):
        parser.error("--save writes the whole page: leave out --rows, --modes and --quick")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    times = QUICK if given.quick else Times()
    outcomes: list[Advised] = []
    left_out: dict[str, str] = {}
    for row in ROWS:
        if not any(part in row.name for part in given.rows.split(",")):
            continue
        try:
            for outcome in (advise(row, mode, times) for mode in row.modes if mode in modes):
                print("FAILED" if outcome.failures else "ok    ", line(outcome), end="", flush=True)
                outcomes.append(outcome)
        except CannotPlant as reason:
            print(f"left out {row.name}: {reason}", flush=True)
            left_out[row.name] = str(reason)
    if given.save:
        PAGE.write_text(page(outcomes, left_out, times))
    failures = [f"{outcome.name}: {text}" for outcome in outcomes for text in outcome.failures]
    print(*failures, f"{len(outcomes)} outcomes, {len(failures)} failures", sep="\n")
    return 1 if failures else 0


def line(outcome: Advised) -> str:
    """Return the line of the table."""
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in outcome.cells)} |\n"


def page(outcomes: Sequence[Advised], left_out: Mapping[str, str], times: Times) -> str:
    """Return docs/reference/verdicts.md."""
    missing = "".join(f"\nLeft out on this machine: {name}, as {reason}.\n" for name, reason in left_out.items())
    return _PAGE.format(
        times=times,
        cpus=usable_cpus(),
        advised="".join(map(line, outcomes)),
        left_out=missing,
    )


if __name__ == "__main__":
    sys.exit(main())
