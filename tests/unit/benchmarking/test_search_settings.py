"""Which settings of a loader are measured, and which of about equal ones is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader.benchmarking.search_settings import Setting, best_of, needs_thread_safety, predicted, variants

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
    """The arguments that lead from one setting to another do, and say nothing of options that mean nothing there."""
    assert Setting(8, prefetch=4).change_from(BASE) == {"num_workers": 8, "prefetch_factor": 4}
    assert Setting(2, threads=True).change_from(BASE) == {"workers": "threads"}
    assert BASE.change_from(Setting(2, threads=True)) == {"workers": None}
    assert Setting(0, concurrency=16).change_from(BASE) == {"num_workers": 0, "concurrency": 16}
    alone = Setting(4, threads=True, prefetch=8, persistent=True).with_change({"num_workers": 0})
    assert alone == Setting(0)
    assert alone.change_from(BASE) == {"num_workers": 0}


def test_predicted_settings_keep_their_order() -> None:
    """Each comes once, and the loader's own is not among them."""
    changes = [{"num_workers": 4}, {"num_workers": 0}, {"num_workers": 0, "persistent_workers": True}, {}]
    assert predicted(BASE, changes) == [Setting(4), Setting(0)]


def test_variants_are_of_the_kind_of_dataset() -> None:
    """Threads are tried where the dataset is indexed, samples in flight where they wait and the dataset blocks."""
    assert variants(BASE, FACTS, waits=False) == [
        Setting(2, threads=True),
        Setting(2, prefetch=4),
        Setting(2, prefetch=8),
    ]
    waiting = variants(BASE, FACTS, waits=True)
    assert {Setting(0, concurrency=16), Setting(2, concurrency=16)} < set(waiting)
    assert variants(BASE, {**FACTS, "iterable": True}, waits=True) == [Setting(2, prefetch=4), Setting(2, prefetch=8)]
    asynchronous = variants(BASE, {**FACTS, "asynchronous": True}, waits=True)
    assert not any(each.concurrency for each in asynchronous)
    assert Setting(2, threads=True) not in variants(BASE, {**FACTS, "context": True}, waits=False)
    assert variants(Setting(0), FACTS, waits=False) == []


@pytest.mark.parametrize(
    ("setting", "facts", "needed"),
    [
        (Setting(2, threads=True), FACTS, True),
        (Setting(2, concurrency=16), FACTS, True),
        (Setting(2, threads=True), {**FACTS, "asynchronous": True}, False),
        (Setting(8), FACTS, False),
    ],
)
def test_what_needs_a_dataset_that_is_safe_in_threads(setting: Setting, facts: dict[str, Any], needed: bool) -> None:
    """Threads and samples in flight, of a dataset that blocks."""
    assert needs_thread_safety(setting, BASE, facts) == needed


def test_of_about_equal_settings_the_cheapest_is_chosen() -> None:
    """More workers must be worth it, and threads, which the dataset must allow, more so than processes."""
    assert best_of({BASE: 100.0, Setting(8): 104.0}, BASE, FACTS) == BASE
    assert best_of({BASE: 100.0, Setting(8): 106.0}, BASE, FACTS) == Setting(8)
    assert best_of({BASE: 100.0, Setting(1): 97.0}, BASE, FACTS) == Setting(1)
    assert best_of({Setting(8): 100.0, Setting(1, threads=True): 103.0}, BASE, FACTS) == Setting(8)
    assert best_of({Setting(8): 100.0, Setting(2, threads=True): 200.0}, BASE, FACTS) == Setting(2, threads=True)
