"""Compares the rates of two loaders that were measured in turns, and says what the figures can show. Pure.

Data path: rates of rounds -> [comparison] -> bench, words.

Each round measures all loaders once, so what makes the machine slower for a while slows all of them, and the ratio
within a round stays. The mean of the ratios' logarithms has a confidence interval of Student's. One loader is measured
twice in each round: what these two differ by is noise (an A/A comparison), and a gain must exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Literal, NamedTuple

from asyncloader.telemetry.worker_tuning import WORTH, t95

LEAST_ROUNDS = 3

Judgement = Literal["faster", "slower", "same", "unsure"]


class RateRatio(NamedTuple):
    """How many times as fast a loader is as another one.

    Attributes:
        ratio: the geometric mean of the rounds.
        low: the true ratio is above this with a confidence of 95 %.
        high: and below this with a confidence of 95 %.
        rounds: their number.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def noise(self) -> float:
        """Of an A/A comparison: the part by which two equal loaders may seem to differ."""
        return max(self.high, 1 / self.low) - 1


def compare(rates: Sequence[float], others: Sequence[float]) -> RateRatio:
    """Compare rates with those of another loader in the same rounds.

    Args:
        rates: in batches per second, one for each round; at least two.
        others: of the other loader.
    """
    logs = [log(rate / other) for rate, other in zip(rates, others, strict=True)]
    mean = sum(logs) / len(logs)
    variance = sum((each - mean) ** 2 for each in logs) / (len(logs) - 1)
    reach = t95(len(logs) - 1) * sqrt(variance / len(logs))
    return RateRatio(exp(mean), exp(mean - reach), exp(mean + reach), len(logs))


def judge(found: RateRatio, control: RateRatio) -> Judgement:
    """Say what a comparison shows.

    Args:
        found: of two loaders.
        control: the A/A comparison of the same rounds.
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
    """Whether a loss of `WORTH` or more is ruled out."""
    return found.low > 1 / (1 + WORTH)
