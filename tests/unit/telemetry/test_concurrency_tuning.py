"""The tuner of the number of samples in flight: its convergence at simulated stores."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from asyncloader.telemetry.concurrency_tuning import ConcurrencyTuner
from asyncloader.telemetry.trials import Measured

MOST = 256
RUNS = 12


def waits(number: float) -> float:
    """Samples per second of a store that only waits, 50 ms for each."""
    return number / 0.05


def queues(number: float) -> float:
    """Of one that works at 32 requests at a time: further ones wait in its queue."""
    return min(number, 32) / 0.05


def slows(number: float) -> float:
    """Of one whose requests are in each other's way beyond 32."""
    return queues(number) / (1 + max(0, number - 32) / 100)


def gives_way(number: float) -> float:
    """Of one that hardly works with many: a half of them shows next to no gain."""
    return queues(number) if number <= 32 else 640 / 4 * (1 + 32 / number)


STORES: dict[str, tuple[Callable[[float], float], float]] = {
    "waits": (waits, 1e9),
    "queues": (queues, 1e9),
    "slows": (slows, 1e9),
    "gives way": (gives_way, 1e9),
    "slow consumer": (slows, 300.0),
}


def run(store: Callable[[float], float], consumer: float, noise: float, seed: int) -> list[tuple[float, int, bool]]:
    """Time, number and whether it is tried, of each window of 150 s; batches of 16 samples."""
    draw, tuner, now = random.Random(seed), ConcurrencyTuner(MOST), 0.0
    found: list[tuple[float, int, bool]] = []
    while now < 150.0:
        rate = min(store(tuner.value), consumer) / 16 * max(0.1, draw.gauss(1, noise))
        seconds, batches = tuner.window
        length = max(seconds, batches / rate)
        now += length
        found.append((now, tuner.value, tuner.tries))
        waited = 0.9 if store(tuner.value) < consumer else 0.01
        tuner.observe(Measured(round(1e6 * rate * length), 1e6 * length, waited, "fetch", None, 1.0, MOST))
    return found


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("name", STORES)
def test_convergence(name: str, noise: float) -> None:
    """After 30 s the rate is within 10 % of the best number's, and never was below 0.9 of the default's for 5 s; in the
    two minutes after that there are no more than a few trials. So in 11 of 12 runs at least.
    """
    store, consumer = STORES[name]

    def rate(number: int) -> float:
        return min(store(number), consumer)

    failures: list[Any] = []
    best = max(rate(number) for number in range(1, MOST + 1))
    for seed in range(RUNS):
        seen = run(store, consumer, noise, seed)
        low = longest = before = total = 0.0
        for at, number, _ in seen:
            low = low + at - before if rate(number) < 0.9 * rate(MOST) else 0.0
            longest = max(longest, low)
            total += rate(number) * (at - before) if at > 30 else 0.0
            before = at
        reached = total / (seen[-1][0] - next(at for at, *_ in seen if at > 30)) / best
        late = [number for at, number, tries in seen if at > 30 and tries]
        trials = sum(one != other for one, other in pairwise(late))
        if reached < 0.9 or longest > 5 or trials > 12:
            failures.append((seed, round(reached, 2), round(longest, 1), trials))
    assert len(failures) <= RUNS // 12, failures


@pytest.mark.parametrize("bound", ["compute", "sampler", "consumer process"])
def test_other_bounds_are_left_alone(bound: str) -> None:
    """Where the store cannot be the cause, nothing is tried."""
    tuner = ConcurrencyTuner(MOST)
    for _ in range(50):
        assert tuner.observe(Measured(10, 1.0, 0.9, bound, None, 1.0, MOST)) is None
    assert tuner.value == MOST


def test_a_store_that_recovers() -> None:
    """The number goes up again, once the store gives more with more."""
    tuner, store = ConcurrencyTuner(MOST), slows
    for number in range(400):
        if number == 60:
            assert tuner.value <= 64
            store = waits
        rate = store(tuner.value)
        tuner.observe(Measured(round(1000 * rate), 1000.0, 0.9, "store", None, 1.0, MOST))
    assert tuner.value == MOST
