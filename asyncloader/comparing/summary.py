"""Sums up the runs of a program: rates and their ratio, waiting, memory, and whether the batches were equal. Pure.

Data path: records of runs -> [summary] -> try_command.

The ratio's interval takes the larger of two deviations: that between runs of the same loader, and that between blocks
within a run. So a machine whose speed drifts, and a program whose phases differ, both widen it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import exp, inf, log, sqrt
from typing import Any, NamedTuple

from asyncloader.telemetry.trials import WORTH, t95

_BLOCKS = 8

Values = Mapping[str, Any]


class RunSummary(NamedTuple):
    """A run's figures for the loader that judges.

    Attributes:
        rate: batches per second from the second one on, mean of the processes; 0: fewer than two came.
        blocks: the same of the run's parts, up to 8.
        wait_frac: share of the time that the program waited for batches.
        first_s: seconds from `iter()` to the first batch; None: none came.
        memory: bytes at most; None: unknown.
        digests: of the first batches of each process, sorted.
        batches: of all processes.
    """

    rate: float
    blocks: tuple[float, ...]
    wait_frac: float
    first_s: float | None
    memory: int | None
    digests: tuple[tuple[int, ...], ...]
    batches: int


class Gain(NamedTuple):
    """How many times as fast a loader is as another: the ratio, and the bounds of 95 % confidence on either side."""

    ratio: float
    low: float
    high: float


def judging_place(processes: Sequence[Values]) -> str | None:
    """Return the place of the loader with most batches; None: none gave two."""
    counts: Counter[str] = Counter()
    for process in processes:
        counts.update({place: each["batches"] for place, each in process["loaders"].items()})
    place, number = max(counts.items(), key=lambda item: item[1], default=(None, 0))
    return place if number > 1 else None


def sum_up(processes: Sequence[Values], place: str, memory: int | None) -> RunSummary:
    """Return the figures of the loader of a place in a run."""
    records = [each["loaders"][place] for each in processes if place in each["loaders"]]
    parts = [each["points"] for each in records if len(each["points"]) > 1]
    rates = [_rate(each[0], each[-1]) for each in parts]
    blocks = [_blocks(each) for each in parts]
    waits = [(each[-1][2] - each[0][2]) / max(each[-1][0] - each[0][0], 1e-9) for each in parts]
    firsts = [each["first_s"] for each in records if each["first_s"] is not None]
    return RunSummary(
        rate=sum(rates) / max(1, len(rates)),
        blocks=tuple(sum(each) / len(each) for each in zip(*blocks, strict=False)),
        wait_frac=min(1.0, sum(waits) / max(1, len(waits))),
        first_s=max(firsts, default=None),
        memory=memory,
        digests=tuple(sorted(tuple(each["digests"]) for each in records if each["digests"])),
        batches=sum(each["batches"] for each in records),
    )


def _rate(begin: Sequence[float], end: Sequence[float]) -> float:
    return (end[1] - begin[1]) / max(end[0] - begin[0], 1e-9)


def _blocks(points: Sequence[Sequence[float]]) -> list[float]:
    number = min(_BLOCKS, len(points) - 1)
    bounds = [points[each * (len(points) - 1) // number] for each in range(number + 1)]
    return [_rate(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def spread_of(runs: Sequence[RunSummary]) -> float:
    """Return the part by which the fastest of some runs exceeds the slowest."""
    rates = [each.rate for each in runs]
    return max(rates) / min(rates) - 1.0 if rates and min(rates) > 0 else inf


def gain_of(runs: Sequence[RunSummary], others: Sequence[RunSummary]) -> Gain | None:
    """Compare the rates of a loader with another loader's. None: a run has no rate, or there are fewer than three."""
    both = [[each.rate for each in side] for side in (runs, others)]
    freedom = sum(map(len, both)) - 2
    if freedom < 1 or not all(both) or min(min(each) for each in both) <= 0:
        return None
    logs = [[log(rate) for rate in side] for side in both]
    means = [sum(side) / len(side) for side in logs]
    between = sum((each - mean) ** 2 for side, mean in zip(logs, means, strict=True) for each in side) / freedom
    within = [_block_variance(each.blocks) for each in (*runs, *others)]
    reach = max(
        t95(freedom) * sqrt(between * sum(1 / len(side) for side in both)),
        t95(_BLOCKS) * sqrt(sum(within) / len(within) * sum(1 / len(side) for side in both)),
    )
    ratio = means[0] - means[1]
    return Gain(exp(ratio), exp(ratio - reach), exp(ratio + reach))


def _block_variance(blocks: Sequence[float]) -> float:
    """Return the variance of a run's rate, as a part of it, that its blocks show."""
    if len(blocks) < 3:
        return 0.0
    mean = sum(blocks) / len(blocks)
    return sum((each / mean - 1.0) ** 2 for each in blocks) / (len(blocks) - 1) / len(blocks)


def is_gain(gain: Gain | None, spread: float) -> bool:
    """Whether a gain exceeds 5 %, and what two runs of torch's loader differ by, also at its lower bound."""
    return gain is not None and gain.low > 1.0 + max(WORTH, spread)


def first_difference(run: RunSummary, other: RunSummary) -> int | None:
    """Return the number of the first batch, from 1, that differs between two runs; None: none, as far as both came."""
    if len(run.digests) != len(other.digests):
        return 1
    pairs = [zip(one, two, strict=False) for one, two in zip(run.digests, other.digests, strict=True)]
    differ = [next((number for number, (a, b) in enumerate(each, 1) if a != b), None) for each in pairs]
    return min((each for each in differ if each is not None), default=None)
