"""Comparisons in rounds find gains, do not call noise a gain, and call doubtful differences unsure."""

from __future__ import annotations

import random
from math import exp

import pytest

from asyncloader.benchmarking.comparison import Judgement, RateRatio, compare, is_no_slower, judge


def simulate(generator: random.Random, factor: float, rounds: int, noise: float) -> tuple[RateRatio, RateRatio]:
    """Simulate two equal loaders and a loader `factor` times as fast, in rounds on a machine whose speed drifts."""
    first, second, other = list[float](), list[float](), list[float]()
    speed = 100.0
    for _ in range(rounds):
        speed *= exp(generator.gauss(0, 0.2))  # of all loaders in the round
        for rates, true in ((first, 1.0), (second, 1.0), (other, factor)):
            rates.append(speed * true * exp(generator.gauss(0, noise)))
    both = [(a * b) ** 0.5 for a, b in zip(first, second, strict=True)]
    return compare(other, both), compare(second, first)


def share(judgement: Judgement, factor: float, rounds: int, noise: float) -> float:
    """Return the share of simulated comparisons that are judged so."""
    generator = random.Random(7)
    found = [judge(*simulate(generator, factor, rounds, noise)) for _ in range(2000)]
    return found.count(judgement) / len(found)


@pytest.mark.parametrize("rounds", [3, 8])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_noise_is_not_called_a_gain(rounds: int, noise: float) -> None:
    """Fewer than 2 % of comparisons of equal loaders call a loader faster, even on a noisy machine."""
    assert share("faster", 1.0, rounds, noise) < 0.02
    assert share("slower", 1.0, rounds, noise) < 0.02


@pytest.mark.parametrize(("factor", "judgement"), [(1.5, "faster"), (1 / 1.5, "slower"), (1.0, "same")])
def test_a_difference_is_found(factor: float, judgement: Judgement) -> None:
    """Differences and equality are found, though the machine's own speed drifts between the rounds."""
    assert share(judgement, factor, rounds=8, noise=0.02) > 0.9


def test_a_gain_below_the_noise_is_unsure() -> None:
    """A gain that the noise hides is neither reported nor ruled out."""
    assert share("unsure", 1.2, rounds=3, noise=0.2) > 0.9


def test_the_interval_has_its_confidence() -> None:
    """In 5 % of comparisons the true ratio is below the lower end, and in 5 % above the upper end."""
    generator = random.Random(3)
    # Compares single runs, because the mean of two runs has less noise.
    found = [simulate(generator, 1.0, 6, 0.1)[1] for _ in range(4000)]
    for wrong in (sum(each.low > 1 for each in found), sum(each.high < 1 for each in found)):
        assert 0.04 < wrong / len(found) < 0.06


def test_the_ratio_is_that_of_the_rounds() -> None:
    """Each rate is compared with the other loader's rate in the same round."""
    found = compare([20.0, 200.0], [10.0, 100.0])
    assert found == pytest.approx(RateRatio(2.0, 2.0, 2.0, 2))
    assert compare([1.0, 4.0], [1.0, 1.0]).ratio == pytest.approx(2.0)


def test_no_slower() -> None:
    """A loss of 5 % must be ruled out, not merely unlikely."""
    assert is_no_slower(RateRatio(1.0, 0.97, 1.03, 5))
    assert not is_no_slower(RateRatio(1.0, 0.9, 1.1, 5))
