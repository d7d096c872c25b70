"""The summary of a run, and the page with the numbers of the last long one. Both are Markdown.

The table is written between two markers; the page's text around them is kept.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.stress.runner import Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "reliability.md"
BEGIN = "<!-- written by python -m tests.stress --save: begin -->"
END = "<!-- written by python -m tests.stress --save: end -->"

INTRO = """# Reliability

The chaos runner checks the loaders' batches while workers die, hang and run out of memory. This page has the numbers of
its last long run; `make chaos SEEDS=2000` repeats it, and writes the table below.

Each seed draws one case: a map dataset, an asynchronous one, or a stream, with or without a state; 1 to 4 workers, in
a sixth of the cases threads; batches from nothing to three slots' worth; torch mode or seeded mode; a consumer that is
fast, slow, or keeps every batch; and faults, with the moments at which they strike. The case runs in a process of its
own, with a deadline. The expected batches are computed beforehand, without the loader where possible: the order is a
list, the content of each sample a function of its index, and in seeded mode the random numbers that samples draw are
compared with those of an undisturbed run.

A case is **wrong** if a batch is missing, comes twice, comes in another's place, or differs in a single bit, also later
while it is held; if an error other than the expected one is raised; if a mapped segment, process, thread, descriptor or
task is left behind; if a finalizer or a thread raises; or if the loader's counts and reports (restarts, bad samples,
warnings) differ from the events of the case. It is **hung** if it does not end by its deadline.

The runner is tested with planted bugs: each of five is planted alone (a released slot that is freed whatever its
generation, tasks of a dead worker that are not reassigned, slots that do not come back, a batch that overtakes another,
a deadline that is not checked), and is found within three cases (`tests/stress/test_planted_bugs.py`).

## The last long run

"""

TITLES = {
    "calm": "no fault",
    "heal": "workers that die, stop or hang, and are replaced",
    "hail": "worker after worker is killed, replacements among them",
    "timed out": "a worker that hangs, and `timeout`, which only reports",
    "no restarts": "a death, and no restart allowed",
    "one restart": "one worker dies more often than it may",
    "poison": "a sample that kills every worker that touches it",
    "poison skipped": 'such a sample, with `on_error="skip"`',
    "bad samples": "samples that raise: raised, skipped, refilled, substituted",
    "too many bad samples": "more samples that raise than `max_skipped_samples`",
    "starved worker": "a worker that gets no more shared memory",
    "short of something": "a main process without descriptors or room for larger rings",
    "cancelled": "`__anext__` cancelled at many points",
    "left": "a consumer that dies, leaves, closes, or is interrupted",
    "resumed": "a state saved in the middle, from which another loader goes on",
    "retired": "workers that grow beyond `worker_memory_limit`",
    "forked": "a trainer that forks while it holds batches",
}


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """One line."""
    failed = [outcome.case.seed for outcome in outcomes if outcome.problems]
    hung = sum(outcome.hung for outcome in outcomes)
    what = f"{len(outcomes)} cases in {seconds:.0f} s, {_total(outcomes, 'batches'):,} batches, "
    what += f"{_total(outcomes, 'struck'):,} faults struck, {len(failed)} failed, {hung} hung"
    return what + (f": {','.join(map(str, failed))}" if failed else "")


def _total(outcomes: Sequence[Outcome], what: str) -> int:
    return int(sum(outcome.report.get(what, 0) for outcome in outcomes))


def table(outcomes: Sequence[Outcome]) -> str:
    """One row for each scenario."""
    lines = [
        "| scenario | cases | batches | faults that struck | workers replaced | wrong | hung |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for scenario, title in [*TITLES.items(), ("", "**all**")]:
        some = [outcome for outcome in outcomes if scenario in ("", outcome.case.scenario)]
        wrong = sum(bool(outcome.problems) for outcome in some)
        numbers = [len(some), *(_total(some, what) for what in ("batches", "struck", "restarts")), wrong]
        numbers.append(sum(outcome.hung for outcome in some))
        lines.append(f"| {title} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)


def save(outcomes: Sequence[Outcome], command: str, seconds: float, page: Path = PAGE) -> None:
    """Write the table between the page's markers; a page without them gets them at its end."""
    seeds = sorted(outcome.case.seed for outcome in outcomes)
    kinds = Counter(f"{outcome.case.loader} loader" for outcome in outcomes)
    methods = Counter(outcome.case.method for outcome in outcomes)
    when = f"{dt.datetime.now(dt.UTC):%d %B %Y}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs"
    failed = sorted(outcome.case.seed for outcome in outcomes if outcome.problems)
    text = "\n".join(
        [
            BEGIN,
            "",
            f"`{command}`, seeds {seeds[0]} to {seeds[-1]}, {seconds / 60:.0f} minutes, {when}; {versions}.",
            "",
            table(outcomes),
            "",
            "Loaders: "
            + ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
            + ". Start methods: "
            + ", ".join(f"{count:,} {method}" for method, count in sorted(methods.items()))
            + f". Failed seeds: {', '.join(map(str, failed)) or 'none'}.",
            "",
            END,
        ]
    )
    old = page.read_text(encoding="utf-8") if page.exists() else INTRO
    if BEGIN in old and END in old:
        before, _, rest = old.partition(BEGIN)
        new = before + text + rest.partition(END)[2]
    else:
        new = old.rstrip("\n") + "\n\n" + text + "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(new, encoding="utf-8")
