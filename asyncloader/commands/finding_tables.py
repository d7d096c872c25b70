"""Says which findings of a command are rows of one table in a terminal, and what its cells are. Pure.

Data path: findings -> [finding_tables] -> terminal.

The cells come from the findings' figures, which programs get, too. So a table has no fact that the lines lack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from asyncloader.commands.findings import Finding


def is_row(finding: Finding) -> bool:
    """Return whether a finding is a row of the table of traced workers, rather than a line of its own."""
    return bool(re.fullmatch(r"worker \d+", finding.name)) and "mean_s" in finding.figures


def columns(rows: Sequence[Finding]) -> list[str]:
    """Return the headings for these findings."""
    return ["worker", "batches", "at work", *(f"mean {stage}" for stage in _stages(rows)), "place"]


def cells(row: Finding, rows: Sequence[Finding]) -> list[str]:
    """Return the row of a finding, given all."""
    figures = row.figures
    means = [figures["mean_s"].get(stage) for stage in _stages(rows)]
    times = ["" if each is None else in_time(each) for each in means]
    return [row.name, f"{figures['batches']:,}", f"{figures['busy_frac']:.0%}", *times, str(figures["place"])]


def _stages(rows: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(stage for each in rows for stage in each.figures["mean_s"]))


def in_time(number: float) -> str:
    """Return seconds as a text with three digits."""
    if number >= 90:
        return f"{number / 60:.3g} minutes"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{math.ceil(number * 1e9)} ns" if number > 0 else "0 s"
