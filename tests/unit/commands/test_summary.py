"""How runs are summed up, and when a gain is sure."""

from __future__ import annotations

import pytest

from asyncloader.commands.summary import (
    RunSummary,
    first_difference,
    gain_of,
    is_gain,
    judging_place,
    spread_of,
    sum_up,
)


def run(rate: float, variance: float = 0.0, digests: list[list[int]] | None = None) -> RunSummary:
    return RunSummary(rate, variance, 0.5, 0.1, None, digests or [])


def test_the_figures_of_a_run() -> None:
    """The rate begins with the second batch, and is the mean of the processes; the loader with most batches judges."""
    points = [[10.0, 1, 5.0], [11.0, 11, 5.5], [12.0, 21, 6.0]]
    record = {"points": points, "first_s": 2.0, "digests": [3, 4], "batches": 21}
    fast = record | {"points": [[0.0, 1, 0.0], [1.0, 31, 1.0]], "digests": [1, 2], "batches": 31}
    few = record | {"batches": 2}
    processes = [{"train": record, "eval": few}, {"train": fast}]
    assert judging_place(processes) == "train"
    found = sum_up(processes, "train", 7)
    assert found == RunSummary(20.0, 0.0, 0.75, 2.0, 7, [[1, 2], [3, 4]])
    assert sum_up(processes, "nowhere", None).rate == 0
    assert judging_place([{"eval": record | {"batches": 1}}]) is None


def test_the_parts_of_a_run_show_its_variance() -> None:
    """A run that is twice as fast for half of its time says little about its mean."""
    even = {"points": [[each, 10 * each, 0.0] for each in range(9)], "first_s": 1.0, "digests": [], "batches": 80}
    uneven = even | {"points": [[each, 10 * each + 10 * max(0, each - 4), 0.0] for each in range(9)]}
    steady, varied = (sum_up([{"a": each}], "a", None) for each in (even, uneven))
    assert steady.variance == 0.0
    assert varied.variance > 0.01
    narrow, wide = (gain_of([each] * 2, [each] * 2) for each in (steady, varied))
    assert narrow is not None and narrow.low == narrow.high == 1.0  # noqa: PT018 - for the type checker
    assert wide is not None and wide.low < 0.9 < wide.ratio  # noqa: PT018


@pytest.mark.parametrize(
    ("rates", "others", "gains"),
    [
        ([31.0, 30.0], [10.0, 10.1, 9.9], True),
        ([10.4, 10.4], [10.0, 10.0, 10.0], False),  # below what is worth a change
        ([11.0, 11.0], [10.0, 12.0, 10.0], False),  # below the noise
        ([14.0, 10.5], [10.0, 10.1, 9.9], False),  # too uneven
        ([5.0, 5.0], [10.0, 10.0, 10.0], False),
    ],
)
def test_a_gain_exceeds_the_noise(rates: list[float], others: list[float], gains: bool) -> None:
    """At its lower bound it is above 5 %, and above what two runs of torch's loader differ by."""
    base = [*map(run, others)]
    gain = gain_of([*map(run, rates)], base)
    assert gain is not None
    assert gain.low <= gain.ratio <= gain.high
    assert is_gain(gain, spread_of(base)) is gains


def test_runs_that_cannot_be_compared() -> None:
    """Two runs show no deviation; a run without batches has no rate."""
    assert gain_of([run(2)], [run(1)]) is None
    assert gain_of([], [run(1), run(1), run(1)]) is None
    assert gain_of([run(0), run(1)], [run(1), run(1)]) is None
    assert spread_of([run(0), run(1)]) == float("inf")


def test_batches_are_compared_as_far_as_both_came() -> None:
    """For each process; another number of processes cannot have the same batches."""
    whole = run(1, digests=[[1, 2, 3], [4, 5, 6]])
    assert first_difference(whole, run(1, digests=[[1, 2], [4, 5, 6, 7]])) is None
    assert first_difference(whole, run(1, digests=[[1, 2, 9], [4, 8]])) == 2
    assert first_difference(whole, run(1, digests=[[1, 2, 3]])) == 1
