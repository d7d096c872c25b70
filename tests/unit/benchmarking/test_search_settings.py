"""The search measures settings in the right order, and chooses the cheapest of about equal settings."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader.benchmarking.search_settings import (
    Setting,
    apply_predictions,
    choose_best,
    needs_thread_safety,
    propose_variants,
)

FACTS: dict[str, Any] = {
    "workers": 2,
    "threads": False,
    "prefetch": 2,
    "concurrency": None,
    "persistent": False,
    "iterable": False,
    "stateful": False,
    "asynchronous": False,
    "context": False,
}
BASE = Setting.of(FACTS)


def test_a_change_makes_the_setting() -> None:
    """The arguments turn a setting into another, and leave out options that have no effect in it."""
    assert Setting(8, prefetch=4).change_from(BASE) == {"num_workers": 8, "prefetch_factor": 4}
    assert Setting(2, threads=True).change_from(BASE) == {"workers": "threads"}
    assert BASE.change_from(Setting(2, threads=True)) == {"workers": None}
    assert Setting(0, concurrency=16).change_from(BASE) == {"num_workers": 0, "concurrency": 16}
    alone = Setting(4, threads=True, prefetch=8, persistent=True).with_change({"num_workers": 0})
    assert alone == Setting(0)
    assert alone.change_from(BASE) == {"num_workers": 0}


def test_predicted_settings_keep_their_order() -> None:
    """Each predicted setting comes once, and the loader's own setting is left out."""
    changes = [{"num_workers": 4}, {"num_workers": 0}, {"num_workers": 0, "persistent_workers": True}, {}]
    assert apply_predictions(BASE, changes) == [Setting(4), Setting(0)]


def test_variants_are_of_the_kind_of_dataset() -> None:
    """Threads are tried for indexed datasets, and samples in flight for indexed, blocking datasets that wait."""
    assert propose_variants(BASE, FACTS, waits=False) == [
        Setting(2, threads=True),
        Setting(2, prefetch=4),
        Setting(2, prefetch=8),
    ]
    waiting = propose_variants(BASE, FACTS, waits=True)
    assert {Setting(0, concurrency=16), Setting(2, concurrency=16)} < set(waiting)
    assert propose_variants(BASE, {**FACTS, "iterable": True}, waits=True) == [
        Setting(2, prefetch=4),
        Setting(2, prefetch=8),
    ]
    asynchronous = propose_variants(BASE, {**FACTS, "asynchronous": True}, waits=True)
    assert not any(each.concurrency for each in asynchronous)
    assert Setting(2, threads=True) not in propose_variants(BASE, {**FACTS, "context": True}, waits=False)
    assert propose_variants(Setting(0), FACTS, waits=False) == []


@pytest.mark.parametrize(
    ("setting", "facts", "needed"),
    [
        (Setting(2, threads=True), FACTS, True),
        (Setting(2, concurrency=16), FACTS, True),
        (Setting(2, threads=True), {**FACTS, "asynchronous": True}, False),
        (Setting(8), FACTS, False),
    ],
)
def test_settings_that_need_a_thread_safe_dataset(setting: Setting, facts: dict[str, Any], needed: bool) -> None:
    """Threads and samples in flight call a blocking dataset from several threads."""
    assert needs_thread_safety(setting, BASE, facts) == needed


def test_of_about_equal_settings_the_cheapest_is_chosen() -> None:
    """More workers must be worth their cost; threads are chosen only if no setting of processes is about as fast."""
    assert choose_best({BASE: 100.0, Setting(8): 104.0}, BASE, FACTS) == BASE
    assert choose_best({BASE: 100.0, Setting(8): 106.0}, BASE, FACTS) == Setting(8)
    assert choose_best({BASE: 100.0, Setting(1): 97.0}, BASE, FACTS) == Setting(1)
    assert choose_best({Setting(8): 100.0, Setting(1, threads=True): 103.0}, BASE, FACTS) == Setting(8)
    assert choose_best({Setting(8): 100.0, Setting(2, threads=True): 200.0}, BASE, FACTS) == Setting(2, threads=True)
