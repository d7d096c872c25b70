"""Says which findings of a command are rows of one table in a terminal, and what its cells are. Pure.

Data path: findings -> [finding_tables] -> terminal.

The cells come from the findings' figures, which programs get, too. So a table has no fact that the lines lack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncloader.commands.findings import Finding


class FindingTable(NamedTuple):
    """A table whose rows are findings.

    Attributes:
        columns: returns the headings for all of its findings.
        cells: returns the row of a finding, given all.
    """

    columns: Callable[[Sequence[Finding]], list[str]]
    cells: Callable[[Finding, Sequence[Finding]], list[str]]


def table_of(finding: Finding) -> FindingTable | None:
    """Return the table that a finding belongs to; None: it is a line of its own."""
    if re.fullmatch(r"worker \d+", finding.name) and "mean_s" in finding.figures:
        return _TRACED_WORKERS
    if finding.name == "would help" and "gain" in finding.figures:
        return _HELPS
    return None


def _stages(rows: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(stage for each in rows for stage in each.figures["mean_s"]))


def _worker_columns(rows: Sequence[Finding]) -> list[str]:
    return ["worker", "batches", "at work", *(f"mean {stage}" for stage in _stages(rows)), "place"]


def _worker_cells(row: Finding, rows: Sequence[Finding]) -> list[str]:
    figures = row.figures
    means = [figures["mean_s"].get(stage) for stage in _stages(rows)]
    times = ["" if each is None else in_time(each) for each in means]
    return [row.name, f"{figures['batches']:,}", f"{figures['busy_frac']:.0%}", *times, str(figures["place"])]


def _help_columns(_: Sequence[Finding]) -> list[str]:
    return ["would help", "times as fast", "samples/s"]


def _help_cells(row: Finding, _: Sequence[Finding]) -> list[str]:
    figures = row.figures
    return [str(figures["option"]), f"{figures['gain']:.2f}", f"{figures['samples_per_s']:,.0f}"]


def in_time(number: float) -> str:
    """Return seconds as a text with three digits."""
    if number >= 5400:
        return f"{number / 3600:.3g} hours"
    if number >= 90:
        return f"{number / 60:.3g} minutes"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{math.ceil(number * 1e9)} ns" if number > 0 else "0 s"


_TRACED_WORKERS = FindingTable(_worker_columns, _worker_cells)
_HELPS = FindingTable(_help_columns, _help_cells)
