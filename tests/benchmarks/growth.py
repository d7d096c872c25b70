"""How cost grows with workers, batches and samples, and over a day: `python -m tests.benchmarks.growth`.

Every point is measured in a process of its own, torch's DataLoader beside ours. With `--save` each result is written at
once to `docs/reference/growth.json`, and the page and its picture from all that the file has: so the points may be
measured in several runs, and a run that is ended early loses one point at most.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from . import growth_chart
from .growth_plan import CURVES, DAY, LOADERS, OURS, TORCH, Point, Soak, point, soaks
from .harness import ROOT, JobFailed, run_program

PAGE = ROOT / "docs" / "reference" / "growth.md"
SOAK = "soak"
ROUNDS = 3  # of a point that are kept
LIMIT_S = 900.0

Kept: TypeAlias = dict[str, dict[str, Any]]
"""For each part (a curve, or the soak) and each key in it (`loader value`), the rounds, the newest last."""

_HEAD = """\
# How cost grows

Written by `python -m tests.benchmarks.growth --save`; do not edit. {machine}

One thing grows at a time; the rest is {workers} workers, batches of 32 samples and 32 KiB, and 10^6 samples. A sample
is an array that is computed when it is asked for; the order is shuffled, and ours is seeded. Each point is a process of
its own, the median of up to {rounds} rounds, and torch's DataLoader is measured in the same way beside it. Workers are
forked and persist. *CPU* is the main process's, all threads, for each batch, the consumer included. *Memory* is the
proportional set size of the main process and its workers, with the batches on their way, while batches flow. *First
batch* is counted from before the loader is made. With {cores} cores, more than {cores} workers cannot make more
batches: there the curves show what an idle worker costs.

![How rate, CPU time, memory and the time to the first batch grow](growth.svg)

- A ring keeps its slots. Where large batches take unequal times, each ring comes to use three of them, while torch
  frees a batch's memory with the batch: see [rings and leases](../explanation/rings-and-leases.md).
- torch makes a list of a shuffled epoch's indices, which takes 72 GB for 10^9 samples; the seeded order is computed.
- An epoch of 10 samples is a single batch: that row is the cost of beginning an epoch.
"""


def main(arguments: list[str]) -> int:
    """Measure the points that are asked for; the exit code, 2 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short clocks, and a hundredth of the day")
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.relative_to(ROOT)} after each point")
    parts = ",".join([*CURVES, SOAK])
    parser.add_argument("--parts", default=parts, help="curves to measure, joined by commas (%(default)s)")
    parser.add_argument("--loaders", default=",".join(LOADERS), help="whose points (%(default)s)")
    parser.add_argument("--missing", action="store_true", help="only the points that the page has not")
    parser.add_argument("--for", dest="limit_s", type=float, metavar="S", help="begin no point after so many seconds")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - {*CURVES, SOAK}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {parts}")
    file = PAGE.with_suffix(".json")
    kept: Kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    ends = time.monotonic() + (options.limit_s or 1e9)
    for part, key, job in jobs(options.parts.split(","), options.loaders.split(","), quick=options.quick):
        rounds = kept.setdefault(part, {}).setdefault(key, [])
        if options.missing and rounds:
            continue
        if time.monotonic() > ends:
            print("more points are left", file=sys.stderr)
            break
        try:
            result = run(job)
        except JobFailed as failure:
            print(f"{part}, {key}: {failure}", file=sys.stderr)
            return 2
        print(part, key, json.dumps(result), flush=True)
        rounds[:] = [*rounds, {"date": dt.datetime.now(dt.UTC).date().isoformat(), "result": result}][-ROUNDS:]
        if options.save:
            save(kept, file)
    return 0


def jobs(parts: list[str], loaders: list[str], *, quick: bool) -> Iterator[tuple[str, str, Point | Soak]]:
    """The measurements: part, key, job. The loaders take turns, so that the machine's moods touch both."""
    for part in parts:
        for value in CURVES[part][1] if part != SOAK else ():
            for loader in loaders:
                job = point(part, value, loader, 0.3 if quick else 1.0)
                if job is not None:
                    yield part, f"{loader} {value}", job
        for soak in soaks(quick) if part == SOAK else ():
            if soak.loader in loaders:
                yield part, soak.loader, soak


def run(job: Point | Soak) -> Any:
    """Measure in a process of its own.

    Raises:
        JobFailed: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        return run_program("tests.benchmarks.growth_child", job.to_json(), str(job), Path(folder), limit_s=LIMIT_S)


def median(kept: Kept, curve: str, loader: str, value: int, figure: str) -> float | None:
    """The figure's median over the rounds; None if the point was not measured."""
    results = (each["result"] for each in kept.get(curve, {}).get(f"{loader} {value}", []))
    numbers = [result[figure] for result in results if figure in result]
    return statistics.median(numbers) if numbers else None


def save(kept: Kept, file: Path) -> None:
    """Write the rounds, the page and its picture."""
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(page(kept), encoding="utf-8")
    file.with_suffix(".svg").write_text(growth_chart.draw(kept, median), encoding="utf-8")


def page(kept: Kept) -> str:
    """The page's text."""
    dates = sorted({each["date"] for part in kept.values() for rounds in part.values() for each in rounds})
    machine = (
        f"Python {platform.python_version()}, torch {version('torch')}, Linux, {os.cpu_count()} CPUs, "
        f"{memory_gib()} GiB, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}."
    )
    workers, cores = Point(OURS).workers, os.cpu_count()
    text = [_HEAD.format(machine=machine, workers=workers, rounds=ROUNDS, cores=cores)]
    for curve, (title, values) in CURVES.items():
        if kept.get(curve):
            text += [f"## By {title}", table(kept, curve, title, values)]
    if kept.get(SOAK):
        text += ["## Over a day", soak_table(kept[SOAK])]
    return "\n\n".join(text).replace("\n\n\n", "\n\n") + "\n"


def table(kept: Kept, curve: str, title: str, values: tuple[int, ...]) -> str:
    """The points of one curve as a Markdown table: torch's figure, and ours."""
    columns = growth_chart.FIGURES
    lines = [
        f"| {title} | " + " | ".join(f"{name}: torch | ours" for _, name, _ in columns) + " |",
        "|--:|" + "--:|--:|" * len(columns),
    ]
    for value in values:
        cells: list[str] = []
        for figure, _, scale in columns:
            for loader in (TORCH, OURS):
                number = median(kept, curve, loader, value, figure)
                cells.append("" if number is None else figures(number * scale))
        if any(cells):
            lines.append(f"| {value:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def soak_table(kept: dict[str, Any]) -> str:
    """The soak as a Markdown table, with its introduction."""
    lines = [
        (
            f"{DAY:,} batches, which is a day of training at 10 a second, in 20 epochs, and for torch {DAY // 10:,} in "
            "4. Each line is taken amid an epoch, after a garbage collection. Descriptors and threads are those of all "
            "processes, tasks those of asyncio, objects those that Python's collector knows in the main process."
        ),
        "",
        "| loader | batches | memory, MiB | objects | tasks | descriptors | threads | processes |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for loader, rounds in kept.items():
        for look in rounds[-1]["result"] if rounds else ():
            names = ("objects", "tasks", "descriptors", "threads", "processes")
            numbers = " | ".join(f"{look[name]:,.0f}" for name in names)
            lines.append(f"| {loader} | {look['batches']:,.0f} | {look['memory'] / 2**20:,.1f} | {numbers} |")
    return "\n".join(lines)


def figures(number: float) -> str:
    """Three significant figures."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def memory_gib() -> int:
    """The machine's memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
