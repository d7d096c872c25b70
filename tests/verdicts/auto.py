"""Measures settings that are "auto" beside fixed numbers, on planted runs: ``python -m tests.verdicts --auto``.

Each row is read for 40 s by a loader that chooses, and then by loaders with fixed numbers for some seconds each, twice,
in turn; rates are batches per second. Promised: after 30 s within 10 % of the best fixed number, and never for more
than 5 s below 0.9 of the number that the loader begins with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncloader import DataLoader
from tests.verdicts.planted import AsyncPlanted, Crowded, Locked, Pauses, Planted, SlowSampler, nothing, sleeps

_SECONDS, _SETTLED_S, _BIN_S = 40.0, 30.0, 1.0
_NUMBERS = {
    "num_workers": (1, 2, 4, 8, 16, 32, 64),
    "concurrency": (4, 16, 32, 64, 128, 256),
    "prefetch_factor": (1, 2, 8, 32),
}
_LENGTH = 800_000


@dataclass(frozen=True)
class AutoRow:
    """A planted run of any length.

    Attributes:
        name: the planted condition.
        dataset: makes the dataset.
        options: of the loader.
        consume: called with each batch.
        setting: the option that is "auto".
        fixed_s: seconds for which each fixed number is read, twice.
    """

    name: str
    dataset: Callable[[], Any]
    options: dict[str, Any]
    consume: Callable[[Any], None] = nothing
    setting: str = "num_workers"
    fixed_s: float = 4.0


_TWO = {"num_workers": 2}

ROWS = [
    AutoRow("slow reads", lambda: Planted(11, _LENGTH, waits=0.004), {}),
    AutoRow("computing", lambda: Planted(11, _LENGTH, computes=0.003), {}),
    AutoRow("one lock that all workers wait for", lambda: Locked(11, _LENGTH, 0.004), {}),
    AutoRow("slow consumer", lambda: Planted(11, _LENGTH, waits=0.0005), {}, sleeps(0.02)),
    AutoRow(
        "a sampler that is slow",
        lambda: Planted(11, _LENGTH, waits=0.0005),
        {"sampler": SlowSampler(_LENGTH, 0.002)},
    ),
    AutoRow("a store that waits", lambda: AsyncPlanted(11, _LENGTH, waits=0.1), {}, setting="concurrency"),
    AutoRow("a crowded store", lambda: Crowded(11, _LENGTH, waits=0.05), {}, setting="concurrency"),
    AutoRow("crowded, 2 workers", lambda: Crowded(11, _LENGTH, waits=0.05), _TWO, setting="concurrency"),
    AutoRow(
        *("a consumer that pauses", lambda: Planted(11, _LENGTH, waits=0.0025), {"num_workers": 4}, Pauses()),
        setting="prefetch_factor",
        fixed_s=15.0,
    ),
    AutoRow("slow reads", lambda: Planted(11, _LENGTH, waits=0.004), _TWO, setting="prefetch_factor"),
]


def arrivals(row: AutoRow, value: Any, seconds: float) -> tuple[list[float], list[float], list[str]]:
    """Read for so long. Returns when batches came, since the first, the setting's number then, and the decisions."""
    options: dict[str, Any] = {"batch_size": 8, "seed": 1, row.setting: value, **row.options}
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    came: list[float] = []
    numbers: list[float] = []
    with DataLoader[Any](row.dataset(), **options) as loader:
        for batch in loader:
            row.consume(batch)
            came.append(time.perf_counter())
            numbers.append(float(int(getattr(loader, row.setting))))
            if came[-1] - came[0] > seconds:
                break
        decisions = list(getattr(loader, row.setting).decisions) if value == "auto" else []
    return [at - came[0] for at in came], numbers, decisions


def rate(came: list[float], begin: float = 0.5) -> float:
    """Batches per second from a time on."""
    late = [at for at in came if at >= begin]
    return (len(late) - 1) / max(1e-9, late[-1] - late[0])


def longest_below(came: list[float], least: float) -> float:
    """The longest time for which the rate of whole seconds was below `least`."""
    bins = [0] * int(came[-1] / _BIN_S)
    for at in came:
        if at / _BIN_S < len(bins):
            bins[int(at / _BIN_S)] += 1
    longest = here = 0
    for number in bins:
        here = here + 1 if number / _BIN_S < least else 0
        longest = max(longest, here)
    return longest * _BIN_S


def measure(wanted: list[str]) -> str:
    """Measure the rows whose names contain one of `wanted`, or all. Returns the table."""
    lines = [
        "| planted | setting | begins with | settles on | trials | 30 s on | best fixed | promised | got | below 0.9 |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        if wanted and not any(part in row.name for part in wanted):
            continue
        came, numbers, decisions = arrivals(row, "auto", _SECONDS)
        fixed: dict[int, list[float]] = {number: [] for number in (*_NUMBERS[row.setting], int(numbers[0]))}
        for _ in range(2):
            for number, rates in fixed.items():
                rates.append(rate(arrivals(row, number, row.fixed_s)[0]))
        found = {number: statistics.mean(rates) for number, rates in fixed.items()}
        best = max(found, key=found.__getitem__)
        got = rate(came, _SETTLED_S)
        below = longest_below(came, 0.9 * found[int(numbers[0])])
        trials = sum("tries" in each for each in decisions)
        lines.append(
            f"| {row.name} | `{row.setting}` | {numbers[0]:.0f} | {numbers[-1]:.0f} | {trials} | {got:.1f} "
            f"| {best}: {found[best]:.1f} | 90% | {got / found[best]:.0%} | {below:.0f} s |"
        )
        print(lines[-1], flush=True)
        for each in decisions:
            print(f"      {each}", flush=True)
    return "\n".join([*lines, ""])
