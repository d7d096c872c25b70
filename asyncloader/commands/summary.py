"""Sums up the runs of a program: rates and their ratio, waiting, memory, whether the batches were equal; and what in
the use of torch's loader gives wrong samples, or costs time. Pure.

Data path: records of runs -> [summary] -> try_command.

The ratio's interval takes the larger of two deviations: that between runs of the same loader, and that between parts of
a run. So a machine whose speed drifts, and a program whose phases differ, both widen it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, inf, log, sqrt
from statistics import fmean, variance
from typing import Any, NamedTuple, TypeAlias

from asyncloader.verification.findings import Finding

WORTH = 0.05
"""The least part by which batches must come faster for a gain to be one."""

_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.9, 1.86, 1.83, 1.81, 1.8, 1.78)
_BLOCKS = 8  # parts of a run

Values: TypeAlias = Mapping[str, Any]


class RunSummary(NamedTuple):
    """A run's figures for the loader that judges: batches per second from the second one on, as a mean of the processes
    (0: fewer than two came), and its relative variance; the share of the time that the program waited; seconds from
    `iter()` to the first batch; bytes (None: unknown); and digests of each process's first batches, sorted.
    """

    rate: float
    variance: float
    wait_frac: float
    first_s: float
    memory: int | None
    digests: list[list[int]]


class Gain(NamedTuple):
    """How many times as fast a loader is as another, and the bounds; each holds with a confidence of 95 %."""

    ratio: float
    low: float
    high: float


def judging_place(processes: Sequence[Values]) -> str | None:
    """Return the place of the loader with most batches; None: none gave two."""
    counts: Counter[str] = Counter()
    for process in processes:
        counts.update({place: each["batches"] for place, each in process.items()})
    return next((place for place, number in counts.most_common(1) if number > 1), None)


def sum_up(processes: Sequence[Values], place: str, memory: int | None) -> RunSummary:
    """Return the figures of the loader of a place in a run."""
    records = [each[place] for each in processes if place in each]
    parts = [each["points"] for each in records if len(each["points"]) > 1] or [[[0.0] * 3] * 2]
    return RunSummary(
        rate=fmean(_rate(each[0], each[-1]) for each in parts),
        variance=fmean(map(_variance, parts)),
        wait_frac=min(1.0, fmean(_rate(each[0], each[-1], 2) for each in parts)),
        first_s=max((each["first_s"] or inf for each in records), default=inf),
        memory=memory,
        digests=sorted(each["digests"] for each in records if each["digests"]),
    )


def _rate(begin: Sequence[float], end: Sequence[float], of: int = 1) -> float:
    return (end[of] - begin[of]) / max(end[0] - begin[0], 1e-9)


def _variance(points: Sequence[Sequence[float]]) -> float:
    """Return the relative variance of a run's mean rate."""
    number = min(_BLOCKS, len(points) - 1)
    bounds = [points[each * (len(points) - 1) // number] for each in range(number + 1)]
    rates = [_rate(begin, end) for begin, end in pairwise(bounds)]
    return variance(rates) / number / fmean(rates) ** 2 if number > 2 else 0.0


def spread_of(runs: Sequence[RunSummary]) -> float:
    """Return the part by which one of two successive runs exceeds the other, on average; 0 for a single run."""
    rates = [each.rate for each in runs]
    if min(rates) <= 0:
        return inf
    return exp(fmean(abs(log(one / other)) for one, other in pairwise(rates)) if len(rates) > 1 else 0.0) - 1.0


def gain_of(runs: Sequence[RunSummary], others: Sequence[RunSummary]) -> Gain | None:
    """Compare a loader's rates with another's. None: a run has no rate, or there are fewer than three."""
    freedom = len(runs) + len(others) - 2
    if freedom < 1 or not runs or min(each.rate for each in (*runs, *others)) <= 0:
        return None
    logs = [[log(each.rate) for each in side] for side in (runs, others)]
    between = sum((each - fmean(side)) ** 2 for side in logs for each in side) / freedom
    within = fmean(each.variance for each in (*runs, *others))
    one_run = max(t95(freedom) * sqrt(between), t95(_BLOCKS) * sqrt(within))
    ratio, reach = fmean(logs[0]) - fmean(logs[1]), one_run * sqrt(1 / len(runs) + 1 / len(others))
    return Gain(exp(ratio), exp(ratio - reach), exp(ratio + reach))


def is_gain(gain: Gain, spread: float) -> bool:
    """Whether a gain exceeds 5 %, and what runs of torch's loader differ by, also at its lower bound."""
    return gain.low > 1.0 + max(WORTH, spread)


def first_difference(run: RunSummary, other: RunSummary) -> int | None:
    """Return the number of the first batch, from 1, that differs between two runs; None: none, as far as both came."""
    if len(run.digests) != len(other.digests):
        return 1
    pairs = zip(run.digests, other.digests, strict=True)
    return min((n for a, b in pairs for n, (x, y) in enumerate(zip(a, b, strict=False), 1) if x != y), default=None)


_COSTS = 0.05  # the share of the time from which on a cost is named
_LEAST_SINGLES = 3
_SEED = "in worker_init_fn, seed it by torch.initial_seed() % 2**32, which differs by worker and epoch"
_PART = "in its __iter__, take only this worker's part (torch.utils.data.get_worker_info())"

Fault: TypeAlias = tuple[str, str, str]  # name, text, advice


def find_faults(processes: Sequence[Values], workers: Sequence[Values]) -> list[Finding]:
    """Return a finding for each fault of each loader of torch, from the records of processes that iterated loaders,
    and what torch's workers reported.
    """
    found: dict[tuple[str, str], Finding] = {}  # ranks have the same faults
    for process in processes:
        for place, record in process.items():
            mine = [each for each in workers if (each["place"], each["process"]) == (place, record["process"])]
            for name, text, advice in () if record["ours"] else (*_of_loader(record, mine), *_of_workers(mine)):
                found.setdefault((place, name), Finding(name, "note", f"{place}: {text}", advice))
    return [*found.values()]


def _of_loader(record: Values, reports: Sequence[Values]) -> Iterator[Fault]:
    points, start_s = record["points"] or [[0.0]], record["start_s"]
    seconds = points[-1][0] - points[0][0]
    if record["singles"] >= _LEAST_SINGLES and record["singles"] >= 0.8 * (record["begins"] - 1):
        text = f"iter() was called {record['begins']} times, and the iterator left after its first batch"
        yield "iter() for each step", text, "keep the iterator, and call iter() again when it has ended"
    elif record["workers"] and not record["persistent"] and start_s > _COSTS * seconds:
        text = f"workers were started {record['begins']} times; until their first batches came, {start_s:.2g} s passed"
        yield "workers start anew", f"{text} of {seconds:.2g} s", "set persistent_workers=True"
    orders = [tuple(each) for each in record["orders"] if each[0] > 1]
    if len(orders) > len(set(orders)):
        text = "two epochs had the same order: the sampler's set_epoch was not called between them"
        yield "same order in each epoch", text, "call sampler.set_epoch(epoch) before each epoch"
    if record["stale"]:
        changes = ", ".join(f"{path} to {value}" for path, value in record["stale"].items())
        text = f"persistent workers had begun before the program changed {changes}, and keep the former value"
        yield "stale workers", text, "set persistent_workers=False, or keep the value in a tensor in shared memory"
    share = max(each["state_s"] / max(each["seconds"], 1e-9) for each in ({**record, "seconds": seconds}, *reports))
    if share > _COSTS:
        yield "states cost time", f"state_dict() took {share:.0%} of the time", "save a state each some hundred steps"


def _of_workers(reports: Sequence[Values]) -> Iterator[Fault]:
    """Compare the workers of an iterator with one another, and each worker with that of the epoch before."""
    for key, name, words in (
        ("begun", "equal random numbers", "workers drew the same from"),
        ("worker", "random numbers restart", "each epoch drew the same from"),
    ):
        states: dict[tuple[int, str], list[int]] = defaultdict(list)
        for each in reports:
            for generator, state in each["drawn"].items():
                states[each[key], generator].append(state)
        same = sorted({generator for (_, generator), among in states.items() if len(among) > len(set(among))})
        if same:
            yield name, f"{words} {', '.join(same)}", _SEED
    epochs: dict[int, list[list[int]]] = defaultdict(list)
    for each in reports:
        if each["streams"] and len(set(each["batches"])) > 1:
            epochs[each["begun"]].append(each["batches"])
    for among in epochs.values():
        if len(among) > len({tuple(each[: min(map(len, among))]) for each in among}):
            text = "workers read the same samples of the IterableDataset, so that each came more than once"
            yield "duplicates", text, _PART


def t95(freedom: int) -> float:
    """The one-sided 95 % quantile of Student's distribution; from 12 degrees of freedom on, that of 12, which is above
    the true one.

    Args:
        freedom: degrees of freedom, at least 1.
    """
    return _T95[min(freedom, len(_T95)) - 1]
