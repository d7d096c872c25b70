"""Counters of transports: sums, and what was added since the last report."""

from __future__ import annotations

import pytest

from asyncloader.counters import KEYS, Counters
from asyncloader.transports import RetryCounts


def test_nothing_was_done() -> None:
    """There is nothing to tell at the beginning, and every sum is there."""
    counters = Counters()
    assert counters.sums == dict.fromkeys(KEYS, 0.0)
    assert counters.changes(counters.sums.copy()) == {}


def test_changes_are_told_once() -> None:
    """What was added is reported to each listener once, by name; the others are left out."""
    counters = Counters()
    one, other = counters.sums.copy(), counters.sums.copy()
    counters.add("retries")
    counters.add("retry_wait_s", 0.5)
    assert counters.changes(one) == {"retries": 1, "retry_wait_s": 0.5}
    assert counters.changes(one) == {}
    counters.add("retries", 2)
    assert counters.changes(one) == {"retries": 2}
    assert counters.changes(other) == {"retries": 3, "retry_wait_s": 0.5}


def test_an_unknown_name_is_a_mistake() -> None:
    """A misspelt name is not counted somewhere else."""
    with pytest.raises(KeyError):
        Counters().add("retry")


def test_a_transports_counts_are_added_up() -> None:
    """The counts of each transport count for the process as well."""
    from asyncloader.counters import COUNTERS

    reported = COUNTERS.sums.copy()
    counts = RetryCounts()
    counts.retry("status 503", 0.25)
    counts.retry("stalled", 0.5)
    counts.resume()
    counts.give_up()
    assert counts.snapshot() == {
        "retries": 2,
        "kinds": {"status 503": 1, "stalled": 1},
        "resumed": 1,
        "given_up": 1,
        "waited_s": 0.75,
    }
    # The sums are the whole process's, other tests' waits among them: a difference of two is rounded.
    added = {"retries": 2, "retry_wait_s": pytest.approx(0.75), "resumed": 1, "given_up": 1}
    assert COUNTERS.changes(reported) == added
