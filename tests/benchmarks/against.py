"""Measures this checkout's loaders against another checkout's, side by side in one run: `--against PATH`.

Each measurement is made in both trees, each time in a process of its own. A round gives
each row one ratio; over the rounds the logarithms of the ratios have a mean, and Student's t its 95 % confidence
bounds. A row is short when even the upper bound says that the new tree is slower.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .harness import ROOT, Results, record, run_job
from .plan import ASYNC_PLAIN, METRICS, OURS, Job, Metric, jobs

ROW_FLOOR, MEAN_FLOOR = 0.98, 0.99
"""The value that the upper bound must reach: of each row, and of the geometric mean over all of them."""
NO_RATIO = ("seeded/cost", "shuffle/memory")
"""Metrics that are differences of two measurements: they may be zero or less."""

# Student's t, two-sided 95 %, by degrees of freedom. Between two entries the smaller counts: its bounds are wider.
T95 = {
    **dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228), 1)),
    **dict(enumerate((2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086), 11)),
    25: 2.060,
    30: 2.042,
    40: 2.021,
    60: 2.000,
    120: 1.980,
}


class Ratio(NamedTuple):
    """New over old, more than 1 being better: the geometric mean of the rounds and its 95 % confidence bounds."""

    mean: float
    low: float
    high: float


class Row(NamedTuple):
    """One metric of one loader: the medians of both trees, and their ratio."""

    metric: Metric
    loader: str
    old: float
    new: float
    ratio: Ratio


class Comparison(NamedTuple):
    """Every row, and the geometric mean over them."""

    rows: list[Row]
    mean: Ratio

    def short(self) -> int:
        """How many rows miss their floor, the mean counted as one."""
        return sum(row.ratio.high < ROW_FLOOR for row in self.rows) + (self.mean.high < MEAN_FLOOR)


def bounds(logs: Sequence[float]) -> Ratio:
    """The geometric mean of ratios given by their logarithms, with its bounds; at least two of them."""
    freedom = len(logs) - 1
    t = T95[max(each for each in T95 if each <= freedom)]
    mean = statistics.fmean(logs)
    spread = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread))


def compare(new: Results, old: Results) -> Comparison:
    """The ratios of all rows that both trees have; a metric where less is better is turned over."""
    rows: list[Row] = []
    logs: list[list[float]] = []
    for metric in METRICS:
        for loader in (*OURS, ASYNC_PLAIN):
            if metric.key in NO_RATIO or not new.has(metric.key, loader):
                continue
            sign = 1 if metric.more_is_better else -1
            pairs = zip(new.values[metric.key, loader], old.values[metric.key, loader], strict=True)
            logs.append([sign * math.log(mine / other) for mine, other in pairs])
            was, now = (tree.median(metric.key, loader) * metric.scale for tree in (old, new))
            rows.append(Row(metric, loader, was, now, bounds(logs[-1])))
    # Rows of a round share the machine's load of that minute: a round is one observation of the mean, not many.
    return Comparison(rows, bounds([statistics.fmean(each) for each in zip(*logs, strict=True)]))


def plan(rows: tuple[str, ...], seconds: float, full: bool) -> list[Job]:
    """The jobs of one round that measure a loader of ours, for one tree."""
    ours: list[Job] = []
    for job in jobs(rows, seconds, peers=False, full=full):
        loaders = OURS if job.probe == "inline" else (job.loader,)
        ours += [dataclasses.replace(job, loader=each) for each in loaders if each in (*OURS, ASYNC_PLAIN)]
    return [dataclasses.replace(job, seconds=seconds) for job in ours]


def measure(
    other: Path, plan: Callable[[int], list[Job]], rounds: int, log: Callable[[str], None]
) -> tuple[Results, Results]:
    """Run the plan's jobs in both trees, this one and `other`, in an order that alternates.

    Raises:
        JobFailed: a job failed, or took another tree's package.
    """
    new, old = Results(), Results()
    trees = ((str(ROOT), new), (str(other.resolve()), old))
    for number in range(rounds):
        started = time.monotonic()
        planned = [(job, tree, results) for job in plan(number) for tree, results in trees]
        for job, tree, results in planned if number % 2 == 0 else reversed(planned):
            record(job, *run_job(dataclasses.replace(job, tree=tree)), results)
        log(f"round {number + 1} of {rounds}: {len(planned)} measurements in {time.monotonic() - started:.0f} s")
    return new, old


def table(comparison: Comparison) -> str:
    """The rows and their verdicts, in Markdown."""
    lines = ["| what | loader | old | new | new / old | 95 % | |", "|---|---|--:|--:|--:|--:|---|"]
    for row in comparison.rows:
        unit = row.metric.unit
        cells = (row.metric.title, f"`{row.loader}`", f"{row.old:,.4g} {unit}", f"{row.new:,.4g} {unit}")
        lines.append("| " + " | ".join((*cells, *_cells(row.ratio, ROW_FLOOR))) + " |")
    lines.append("| " + " | ".join(("geometric mean", "", "", "", *_cells(comparison.mean, MEAN_FLOOR))) + " |")
    return "\n".join(lines)


def _cells(ratio: Ratio, floor: float) -> tuple[str, str, str]:
    said = "ok" if ratio.high >= floor else f"**short**: below {floor}"
    return f"**{ratio.mean:.3f}**", f"{ratio.low:.3f} to {ratio.high:.3f}", said
