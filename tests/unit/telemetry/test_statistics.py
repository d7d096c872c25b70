from __future__ import annotations

import math

import pytest

from asyncloader.telemetry.counters import Recorder, stage_times
from asyncloader.telemetry.metrics import metrics
from asyncloader.telemetry.statistics import Statistics
from tests.unit.telemetry.figures import FIGURES


def test_snapshot_of_nothing_is_all_zero() -> None:
    """Before the first batch every figure is 0.0; none is missing or not a number."""
    snapshot = Statistics().snapshot(0)
    assert snapshot == dict.fromkeys(FIGURES, 0.0)
    assert all(type(value) is float for value in snapshot.values())


def test_batches_add_up() -> None:
    """Counts and times are sums over all batches."""
    s = Statistics()
    s.begin()
    s.batch(samples=4, nbytes=100, pickled=7, waited=0.5, busy=0.25, workers=2)
    s.batch(samples=3, nbytes=50, pickled=1, waited=0.25, busy=0.5, workers=2)
    assert (s.batches, s.samples, s.bytes, s.pickled, s.wait_s, s.busy_s) == (2, 7, 150, 8, 0.75, 0.75)
    assert s.worker_s == 2 * s.elapsed_s > 0


def test_each_batch_counts_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch adds the time since the batch before, times the number of workers to the workers' time."""
    times = iter([10.0, 11.0, 13.0])
    monkeypatch.setattr("asyncloader.telemetry.statistics.perf_counter", lambda: next(times))
    s = Statistics()
    s.begin()
    for _ in range(2):
        s.batch(samples=1, nbytes=1, pickled=0, waited=0.0, busy=0.0, workers=2)
    assert (s.elapsed_s, s.worker_s) == (3.0, 6.0)


def test_waits_at_the_same_time_leave_no_negative_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tasks that share an iterator each waits as long as the others: the consumer's own time is never below 0."""
    times = iter([10.0, 11.0, 12.0])
    monkeypatch.setattr("asyncloader.telemetry.statistics.perf_counter", lambda: next(times))
    s = Statistics()
    s.begin()
    for waited in (0.75, 2.0):
        s.batch(samples=1, nbytes=1, pickled=0, waited=waited, busy=0.0, workers=1)
    block = s.blocks()[-1]
    assert stage_times(block, "consumer")[:2] == (2.0, 0.25)
    assert stage_times(block, "wait")[:2] == (2.0, 2.75)


def test_rates_are_per_second_of_the_iterators_time() -> None:
    """Rates and shares divide by the time that iterators were in use."""
    s = Statistics()
    s.batches, s.samples, s.bytes = 10, 40, 800
    s.elapsed_s, s.wait_s, s.worker_s, s.busy_s = 4.0, 1.0, 8.0, 2.0
    snapshot = s.snapshot(3)
    assert snapshot["data/batches_per_sec"] == 2.5
    assert snapshot["data/samples_per_sec"] == 10.0
    assert snapshot["data/bytes_per_sec"] == 200.0
    assert snapshot["data/wait_frac"] == 0.25
    assert snapshot["data/worker_busy_frac"] == 0.25
    assert snapshot["data/queue_depth"] == 3.0


def test_shares_never_exceed_one() -> None:
    """Rounding of clocks gives no share above 1."""
    s = Statistics()
    s.elapsed_s, s.wait_s, s.worker_s, s.busy_s = 1.0, 1.5, 1.0, 3.0
    snapshot = s.snapshot(0)
    assert (snapshot["data/wait_frac"], snapshot["data/worker_busy_frac"]) == (1.0, 1.0)


def test_pauses_between_epochs_do_not_count() -> None:
    """`begin` sets the clock's mark: the time before it is not counted."""
    s = Statistics()
    s._mark = -math.inf
    s.begin()
    s.batch(1, 1, 0, 0.0, 0.0, 1)
    assert math.isfinite(s.elapsed_s)


def test_first_batch_time_is_that_of_the_newest_iterator() -> None:
    """The time to the first batch is measured from `begin`, and replaced by each new iterator's."""
    s = Statistics()
    s.first_batch(s.begin() - 100.0)
    assert s.time_to_first_batch_s >= 100.0
    begun = s.begin()
    s.first_batch(begun)
    assert 0.0 <= s.time_to_first_batch_s < 100.0


def test_a_node_that_workers_leave_keeps_its_counts() -> None:
    """Batches count for the node that made them, workers for their newest node. Exporters get a label per node."""
    s = Statistics()
    for worker in (0, 1):
        s.add_worker(worker, Recorder(), "tcp://a:1")
        s.came_from_node(worker, 100, 0.5)
    s.snapshot(0, interval=True)
    s.add_worker(1, Recorder(), "unix:/b")
    s.came_from_node(1, 10, 0.25)
    parts = {"workers": (1.0, 1.0), "batches": (2.0, 1.0), "bytes": (200.0, 10.0), "busy_s": (1.0, 0.25)}
    expected = {
        f"node/{address}/{name}": values[number]
        for name, values in parts.items()
        for number, address in enumerate(("tcp://a:1", "unix:/b"))
    }
    stats = s.snapshot(0, {"dropped_samples": 0, "repeated_samples": 0})
    assert {key: value for key, value in stats.items() if key.startswith("node/")} == expected
    assert s.snapshot(0, prefix="x/", interval=True)["x/node/tcp://a:1/batches"] == 0.0
    found = {each.name: each for each in metrics(stats, s.blocks())}
    assert [(each.name, each.labels, each.value) for each in found["asyncloader_node_busy_seconds"].samples] == [
        ("asyncloader_node_busy_seconds_total", {"node": "tcp://a:1"}, 1.0),
        ("asyncloader_node_busy_seconds_total", {"node": "unix:/b"}, 0.25),
    ]
    assert found["asyncloader_node_workers"].type == "gauge"


def test_snapshot_is_a_fresh_dictionary() -> None:
    """A caller may change the returned dictionary."""
    s = Statistics()
    s.snapshot(0).clear()
    assert s.snapshot(0).keys() == FIGURES
