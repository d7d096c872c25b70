"""Compares the rates of two loaders that were measured in turns, and judges whether the difference is real. Pure.

Data path: rates of rounds -> [comparison] -> bench, words.

Each round measures all loaders, so a machine that is slower for a while slows all of them, and the ratio within a round
stays. The mean of the ratios' logarithms has a confidence interval of Student's t-distribution. Each round measures the
user's loader twice: the difference between these two runs is noise (an A/A comparison), and a gain must exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Literal, NamedTuple

from asyncloader.telemetry.tuner import WORTH, t95

LEAST_ROUNDS = 3

Judgement = Literal["faster", "slower", "same", "unsure"]


class RateRatio(NamedTuple):
    """The ratio of two loaders' rates.

    Attributes:
        ratio: geometric mean of the rounds' ratios.
        low: lower bound of the true ratio, with a confidence of 95 %.
        high: upper bound of the true ratio, with a confidence of 95 %.
        rounds: number of rounds.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def noise(self) -> float:
        """Return the part by which two equal loaders may seem to differ; for an A/A comparison."""
        return max(self.high, 1 / self.low) - 1


def compare(rates: Sequence[float], others: Sequence[float]) -> RateRatio:
    """Compare a loader's rates with another loader's in the same rounds.

    Args:
        rates: batches per second in each round, of at least two rounds.
        others: batches per second of the other loader in the same rounds.
    """
    logs = [log(rate / other) for rate, other in zip(rates, others, strict=True)]
    mean = sum(logs) / len(logs)
    variance = sum((each - mean) ** 2 for each in logs) / (len(logs) - 1)
    reach = t95(len(logs) - 1) * sqrt(variance / len(logs))
    return RateRatio(exp(mean), exp(mean - reach), exp(mean + reach), len(logs))


def judge(found: RateRatio, control: RateRatio) -> Judgement:
    """Judge whether a loader is faster than another, slower, as fast, or whether the rounds cannot show it.

    Args:
        found: comparison of the two loaders.
        control: A/A comparison of the same rounds.
    """
    needed = 1 + max(WORTH, control.noise)
    if found.low > 1 and found.ratio > needed:
        return "faster"
    if found.high < 1 and found.ratio < 1 / needed:
        return "slower"
    if found.low > 1 / (1 + WORTH) and found.high < 1 + WORTH:
        return "same"
    return "unsure"


def is_no_slower(found: RateRatio) -> bool:
    """Return whether a loss of `WORTH` or more is ruled out."""
    return found.low > 1 / (1 + WORTH)
