"""The tuner of the number of batches ahead: its convergence in simulated pipelines, in which workers take turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from asyncloader.telemetry.prefetch_tuning import PrefetchTuner
from asyncloader.telemetry.trials import Measured

WORKERS, LEAST, MOST = 4, 2, 32
RUNS = 6

Costs = Callable[[random.Random, int], float]
"""Seconds of a batch, by its number."""


def steadily(seconds: float) -> Costs:
    return lambda draw, _: seconds * draw.gauss(1, 0.05)


def with_pauses(every: int, pause: float, seconds: float) -> Costs:
    return lambda draw, number: pause if number % every == 0 else seconds * draw.gauss(1, 0.05)


def with_slow_ones(seconds: float, share: float, times: float) -> Costs:
    return lambda draw, _: seconds * (times if draw.random() < share else 1)


RUNS_OF: dict[str, tuple[Costs, Costs]] = {
    "pauses": (steadily(0.02), with_pauses(64, 0.3, 0.002)),
    "long pauses": (steadily(0.02), with_pauses(100, 0.5, 0.001)),
    "some slow batches": (with_slow_ones(0.01, 0.03, 15), steadily(0.001)),
    "slow batches": (steadily(0.02), steadily(0.001)),
    "slow consumer": (steadily(0.01), steadily(0.005)),
    "as fast as one another": (steadily(0.02), steadily(0.005)),
}


def batches(makes: Costs, takes: Costs, seed: int, ahead: Callable[[], int]) -> Iterator[tuple[float, float, float]]:
    """When each batch was taken, how long the consumer waited for it, and how long a worker was at it."""
    draw, number, now = random.Random(seed), 0, 0.0
    taken: list[float] = []
    free = [0.0] * WORKERS
    while True:
        place = number - WORKERS * ahead()
        begin = max(free[number % WORKERS], taken[place] if place >= 0 else 0.0)
        cost = makes(draw, number)
        made = free[number % WORKERS] = begin + cost
        waited = max(0.0, made - now)
        taken.append(max(made, now))
        now = taken[-1] + takes(draw, number)
        number += 1
        yield taken[-1], waited, cost


def rate_of(makes: Costs, takes: Costs, ahead: int) -> float:
    found = batches(makes, takes, 99, lambda: ahead)
    return 3000 / [next(found)[0] for _ in range(3000)][-1]


def run(makes: Costs, takes: Costs, seed: int) -> list[tuple[float, int, float, bool]]:
    """Time, number, rate, and whether it is tried, of each window of 90 s."""
    tuner = PrefetchTuner(LEAST)
    seen: list[tuple[float, int, float, bool]] = []
    begun, count, waits, busy = 0.0, 0, 0.0, 0.0
    for now, waited, cost in batches(makes, takes, seed, lambda: tuner.value):
        count, waits, busy = count + 1, waits + waited, busy + cost
        seconds, least = tuner.window
        if now - begun < seconds or count < least:
            continue
        length = now - begun
        seen.append((now, tuner.value, count / length, tuner.tries))
        shares = waits / length, busy / length / WORKERS
        tuner.observe(Measured(count, length, shares[0], "fetch", None, shares[1], MOST))
        begun, count, waits, busy = now, 0, 0.0, 0.0
        if now > 90:
            return seen
    raise AssertionError


@pytest.mark.parametrize("name", RUNS_OF)
def test_convergence(name: str) -> None:
    """After 30 s the number is one whose rate is within 10 % of the best number's; in the minute after that there
    are no more than a few trials; and where nothing is to be gained the number stays. So in 5 of 6 runs at least.
    """
    makes, takes = RUNS_OF[name]
    rates = {ahead: rate_of(makes, takes, ahead) for ahead in (1, LEAST, 4, 8, 16, MOST)}
    best, failures = max(rates.values()), list[Any]()
    for seed in range(RUNS):
        seen = run(makes, takes, seed)
        late = [(number, tries) for at, number, _, tries in seen if at > 30]
        reached = sum(rates[number] for number, _ in late) / len(late) / best
        trials = sum(one != other for one, other in pairwise(tries for _, tries in late))
        below = max(rates[number] < 0.9 * rates[LEAST] for _, number, *_ in seen)
        idle = best < 1.03 * rates[LEAST] and late[-1] != (LEAST, False)
        if reached < 0.9 or trials > 8 or below or idle:
            failures.append((seed, round(reached, 2), trials, late[-1]))
    assert len(failures) <= RUNS // 6, (failures, rates)


def test_memory_bounds_it() -> None:
    """No more is tried than there is room for; what there is no room for any more goes without a trial."""
    tuner = PrefetchTuner(LEAST)
    waits = Measured(100, 1.0, 0.5, "fetch", None, 0.5, LEAST, "2 MiB of free memory")
    assert [tuner.observe(waits) for _ in range(9)] == [None] * 9
    found = tuner.observe(waits._replace(most=5))
    assert found is not None
    assert (found.value, found.kept) == (5, False)
    assert found.reason == (
        "the consumer waits 50% of the time, and workers 50% of theirs; 2 MiB of free memory allow 5"
    )
    for _ in range(4):
        found = tuner.observe(waits._replace(batches=200, most=5))
    assert found is not None
    assert (found.value, found.kept) == (5, True)
    found = tuner.observe(waits._replace(most=3))
    assert found is not None
    assert (found.value, found.kept) == (3, True)


@pytest.mark.parametrize("change", [{"bound": "sampler"}, {"busy": 0.95}, {"waited": 0.01}, {"most": LEAST}], ids=str)
def test_what_more_batches_ahead_would_not_help(change: dict[str, Any]) -> None:
    """Workers that are busy, or wait for something else; a consumer that does not wait; no room."""
    tuner = PrefetchTuner(LEAST)
    window = Measured(100, 1.0, 0.5, "fetch", None, 0.5, MOST)._replace(**change)
    assert [tuner.observe(window) for _ in range(40)] == [None] * 40
