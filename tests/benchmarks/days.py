"""Keeps the rounds of each day in a file beside the page: its medians are over the last two days that were measured.

A machine's speed differs more from one day to the next than within a day: figures of a single day promise too much.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .harness import Results

MOST_DAYS = 2


def add(file: Path, part: str, today: str, results: Results) -> tuple[Results, list[str]]:
    """Save today's rounds in the place of those that were measured earlier today; return them with the day's before.

    Args:
        file: JSON; it need not exist.
        part: the name of the measurements, which are kept apart from those of other names.
        today: the date, as YYYY-MM-DD.
        results: today's.

    Returns:
        The rounds of the days that are kept, the oldest first, and their dates. A day with other rows than today's is
        dropped: ratios are of numbers from the same round.
    """
    parts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    measured = _packed(results)
    days = {day: each for day, each in parts.get(part, {}).items() if _rows(each) == _rows(measured)}
    days[today] = measured
    parts[part] = {day: days[day] for day in sorted(days)[-MOST_DAYS:]}
    file.write_text(json.dumps(parts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return read(file, part)


def read(file: Path, part: str) -> tuple[Results, list[str]]:
    """The rounds that are kept under this name, and their dates, as `add` returns them; no dates if none are kept."""
    kept = json.loads(file.read_text(encoding="utf-8")).get(part, {})
    merged = Results()
    for day in kept.values():
        for metric, loader, rounds in day["values"]:
            merged.values.setdefault((metric, loader), []).extend(rounds)
        merged.checksums |= {(workload, loader): checksum for workload, loader, checksum in day["checksums"]}
        merged.memcpy += day["memcpy"]
        merged.failures += day["failures"]
    return merged, list(kept)


def _rows(day: dict[str, Any]) -> set[tuple[str, str]]:
    """The metrics and loaders of a day."""
    return {(metric, loader) for metric, loader, _ in day["values"]}


def _packed(results: Results) -> dict[str, Any]:
    """The fields of `Results`, with lists for the dictionaries that have pairs as keys."""
    fields = dataclasses.asdict(results)
    return {
        name: [[*key, value] for key, value in field.items()] if isinstance(field, dict) else field
        for name, field in fields.items()
    }
