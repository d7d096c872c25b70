"""Plant runs whose bound is known, and follow their verdicts: ``python -m tests.verdicts``.

Each row is read as it is, and then with what its verdict names; where the loader may choose the number of workers,
also with "auto" and beside fixed numbers (`measuring.py`). All runs are in this process, one after the other:
about half an hour on 2 CPUs. Returns 1 if a bound is wrong, if a followed change makes a run slower, or if "auto"
falls short; each failure is printed by name. ``--save`` writes docs/reference/verdicts.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncloader.cpus import usable_cpus
from tests.verdicts.measuring import QUICK, Advised, Chosen, Times, advise, choose
from tests.verdicts.planted import CannotPlant
from tests.verdicts.rows import ROWS, SEEDS, Row

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verdicts.md"
_PAGE = """\
# Verdicts

Runs whose bound is planted: what [`diagnose()`](../how-to/make-it-faster.md) said of them, and how many times as fast
they were with each option that it named. Candidates are options worth trying, of which it promises nothing. Measured by
`python -m tests.verdicts --save` on {cpus} CPUs, with and without a seed where that may differ, for {times.advice:g} s
each. These begin when as many batches have come as are made ahead while workers start, or with the second batch if
workers start anew in each epoch.

| planted | said | candidates or change | following gave |
|---|---|---|--:|
{advised}
## The loader's own choice

The number of workers is "auto", the other options are those of the run above. The loader reads for {times.auto:g}
s from its first batch on. *Of the best* is its rate from second {times.settled:g} on, as a share of the best of
about five fixed numbers, each of which is measured twice for {times.fixed:g} s, in turns. *Below 0.9 for* is the
longest time in which each second had less than 0.9 of the batches that the number at the beginning has. *Change*
is what `diagnose()` said that "auto" had measured, and how many times as fast as at the beginning the run is with
it. Without a seed, `num_workers` is chosen in a trial before the first batch.

| planted | begins | settles | tried | of the best fixed | below 0.9 for | change |
|---|--:|--:|--:|--:|--:|---|
{chosen}{left_out}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that the arguments select. Returns 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts")
    parser.add_argument("--rows", default="", help="parts of names, joined by commas; default: all")
    parser.add_argument("--modes", default=",".join(SEEDS), help="without a seed, with a seed; default: both")
    parser.add_argument("--quick", action="store_true", help="short runs, for development: their figures mean little")
    parser.add_argument("--advice", action="store_true", help="only the verdicts, and following them")
    parser.add_argument("--auto", action="store_true", help='only the runs with num_workers="auto"')
    parser.add_argument("--save", action="store_true", help="write docs/reference/verdicts.md; takes all rows")
    given = parser.parse_args(arguments)
    modes, both = given.modes.split(","), given.advice == given.auto
    if given.save and (given.rows or given.quick or not both or set(modes) != set(SEEDS)):
        parser.error("--save writes the whole page: leave out --rows, --modes, --quick, --advice and --auto")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    times = QUICK if given.quick else Times()
    outcomes: list[Advised | Chosen] = []
    left_out: dict[str, str] = {}
    for row in ROWS:
        if not any(part in row.name for part in given.rows.split(",")):
            continue
        try:
            for outcome in measured(row, modes, times, advice=both or given.advice, auto=both or given.auto):
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


def measured(row: Row, modes: list[str], times: Times, *, advice: bool, auto: bool) -> Iterator[Advised | Chosen]:
    """Measure a row in some modes, one after the other."""
    modes = [mode for mode in row.modes if mode in modes]
    if advice:
        for mode in modes:
            yield advise(row, mode, times)
    for mode in modes if auto and row.auto else ():
        yield choose(row, mode, times)


def line(outcome: Advised | Chosen) -> str:
    """Return the line of the table."""
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in outcome.cells)} |\n"


def page(outcomes: Sequence[Advised | Chosen], left_out: Mapping[str, str], times: Times) -> str:
    """Return docs/reference/verdicts.md."""
    missing = "".join(f"\nLeft out on this machine: {name}, as {reason}.\n" for name, reason in left_out.items())
    return _PAGE.format(
        times=times,
        cpus=usable_cpus(),
        advised="".join(line(each) for each in outcomes if isinstance(each, Advised)),
        chosen="".join(line(each) for each in outcomes if isinstance(each, Chosen)),
        left_out=missing,
    )


if __name__ == "__main__":
    sys.exit(main())
