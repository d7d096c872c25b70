from __future__ import annotations

import json
from typing import Any

import pytest

from asyncloader.live.snapshot import Reading, Snapshots, WorkerReading, summary
from asyncloader.telemetry.counters import STAGES, Recorder
from asyncloader.telemetry.diagnosis import Diagnosis
from asyncloader.telemetry.statistics import Statistics


def worker(number: int = 0, **changes: Any) -> WorkerReading:
    usual = WorkerReading(number, f"pid {number + 10}", True, True, 2, 5, "running", 6, 3, 4096)
    return usual._replace(**changes)


def reading(clock: float, batches: int = 0, wait_s: float = 0.0, **changes: Any) -> Reading:
    statistics = Statistics()
    statistics.batches, statistics.samples, statistics.wait_s = batches, 4 * batches, wait_s
    usual = Reading(
        "DataLoader of X", 1, 1e9 + clock, clock, "epoch 0", False, statistics.snapshot(1), 1, clock, None,
        {-1: statistics.recorder.block.tolist()}, [], True, Diagnosis("unknown", {}, "Too few."),
    )  # fmt: skip
    return usual._replace(**changes)


def counted(**seconds: float) -> list[float]:
    recorder = Recorder()
    for stage in STAGES:
        if stage in seconds:
            recorder.time(stage, seconds[stage])
    return [*map(float, recorder.block)]


def test_rates_are_of_the_time_since_the_last_reading() -> None:
    """Without a reading before, of the whole run; the dictionary can be written as JSON and read again."""
    snapshots = Snapshots()
    first = snapshots.take(reading(10.0, 100, 5.0))
    assert first["rates"]["batches_per_s"] == 10
    assert first["rates"]["wait_frac"] == 0.5
    second = snapshots.take(reading(12.0, 140, 5.2))
    assert second["rates"]["batches_per_s"] == 20
    assert second["rates"]["samples_per_s"] == 80
    assert second["rates"]["wait_frac"] == pytest.approx(0.1)
    assert second["totals"]["batches"] == 140
    assert json.loads(json.dumps(second, allow_nan=False)) == second
    assert second["state"] == "running"
    assert snapshots.take(reading(13.0, 140, 5.2))["state"] == "idle"
    assert snapshots.take(reading(14.0, 140, 6.2, waiting_s=1.5))["state"] == "waiting"
    assert snapshots.take(reading(15.0, 140, 6.2, closed=True))["state"] == "closed"
    assert summary(second)["waits"] == "10% of the time"


def test_waiting_is_divided_between_the_stages() -> None:
    """In proportion to their seconds, those of two workers at the same time; decoding is counted once."""
    now = reading(10.0, 10, 8.0, blocks={-1: counted(h2d=1), 0: counted(fetch=5, decode=1), 1: counted(fetch=1)})
    shares = {each["stage"]: each["share"] for each in Snapshots().take(now)["wait_by_stage"]}
    assert shares == pytest.approx({"fetch": 0.8 * 3 / 4.5, "h2d": 0.8 / 4.5, "decode": 0.8 * 0.5 / 4.5})
    shares = {
        each["stage"]: each["share"] for each in Snapshots().take(now._replace(decodes_apart=False))["wait_by_stage"]
    }
    assert shares == pytest.approx({"fetch": 0.8 * 3 / 4, "h2d": 0.2})


def test_the_start_of_workers_has_its_own_share() -> None:
    """And no share is more than the waiting."""
    now = reading(10.0, 10, 4.0)
    now = now._replace(stats={**now.stats, "data/startup_s": 3.0}, blocks={-1: counted(), 0: counted(fetch=9)})
    shares = {each["stage"]: each["share"] for each in Snapshots().take(now)["wait_by_stage"]}
    assert shares == pytest.approx({"start": 0.3, "fetch": 0.1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "reading samples 75%, collating 25%"),
        ({"ready": False}, "starting"),
        ({"started": False}, "starting the dataset"),
        ({"outstanding": 0}, "idle: it has no task"),
        ({"state": "stopped by a signal (SIGSTOP)"}, "stopped by a signal (SIGSTOP)"),
        ({"state": "zombie", "ready": False}, "ended"),
    ],
)
def test_what_a_worker_does_now(changes: dict[str, Any], words: str) -> None:
    """Follows from the time that it has counted since the last reading, and from its process."""
    snapshots = Snapshots()
    snapshots.take(reading(1.0, workers=[worker(answers=1)], blocks={-1: counted(), 0: counted(fetch=9)}))
    block = counted(fetch=9 + 0.3, collate=0.1)
    found = snapshots.take(reading(2.0, workers=[worker(**changes)], blocks={-1: counted(), 0: block}))["workers"]
    assert found[0]["activity"] == words
    assert (found[0]["slots_in_use"], found[0]["slots"], found[0]["ring_bytes"]) == (3, 6, 4096)
    assert found[0]["busy_frac"] == pytest.approx(0.4)


def test_a_worker_that_answers_nothing() -> None:
    """Is at one task since its last answer; a replacement begins anew."""
    snapshots = Snapshots()
    for clock in (1.0, 2.0):
        snapshots.take(reading(clock, workers=[worker()], blocks={}))
    found = snapshots.take(reading(30.0, workers=[worker()], blocks={}))["workers"]
    assert found[0]["activity"] == "at one task for 29 s, running"
    replaced = snapshots.take(reading(31.0, workers=[worker(place="pid 99", answers=0)], blocks={}))["workers"]
    assert replaced[0]["activity"] == "at a task"
