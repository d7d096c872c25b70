"""The rate is that of steady batches or of whole epochs, and a run ends when it has enough batches."""

from __future__ import annotations

import pytest

from asyncloader.benchmarking.arrival_times import ArrivalTimes


def test_batches_that_were_ready_do_not_count() -> None:
    """Ten batches are ready after a start of 3 seconds; the rate is that of the later batches, 10 per second."""
    times = ArrivalTimes(0.0, window=0.95, ahead=10, workers=1)
    assert not any(times.came(3.0) for _ in range(10))
    number = next(number for number in range(1, 100) if times.came(3.0 + number / 10))
    found = times.result()
    assert found is not None
    assert number == 11  # the window begins at the first batch that was not ready
    assert found.rate == pytest.approx(10.0)
    assert (found.batches, found.first_s, found.epochs) == (10, 3.0, 0)
    assert found.gaps == pytest.approx([0.1] * 10)


def test_workers_in_step_are_counted_as_whole_turns() -> None:
    """Four workers deliver four batches each second; a part of a turn would count batches without their time."""
    times = ArrivalTimes(0.0, window=3.5, ahead=4, workers=4)
    for number in range(100):
        if times.came(float(number // 4)):
            break
    found = times.result()
    assert found is not None
    assert found.batches % 4 == 0
    assert found.rate == pytest.approx(4.0)


def test_short_epochs_are_counted_whole() -> None:
    """The starts of the workers count, but not the first epoch, in which the process itself is starting, too."""
    times, now = ArrivalTimes(0.0, window=0.95, ahead=4, workers=2), 0.0
    for epoch in range(10):
        now += 5.0 if not epoch else 0.4
        for _ in range(5):
            now += 0.02
            assert not times.came(now)
        if times.ended(now):
            break
    found = times.result()
    assert found is not None
    assert (found.epochs, found.batches) == (2, 10)
    assert found.rate == pytest.approx(10 / 1.0)


def test_a_generator_is_counted_once() -> None:
    """The second epoch of an exhausted generator has no batch, and ends the run."""
    times = ArrivalTimes(0.0, window=1.0, ahead=1, workers=0)
    for number in range(5):
        times.came(number * 0.1)
    assert not times.ended(0.5)
    assert times.ended(0.5)
    found = times.result()
    assert found is not None
    assert found.rate == pytest.approx(10.0)


def test_slow_batches_end_the_run_early() -> None:
    """A run whose batches come every 4 seconds does not wait for the usual eight batches."""
    times = ArrivalTimes(0.0, window=1.0, ahead=4, workers=2)
    number = next(number for number in range(1, 100) if times.came(90.0 + number * 4.0))  # a slow start
    assert number == 5  # after twice the longest time, and more than a turn of both workers
    found = times.result()
    assert found is not None
    assert found.rate == pytest.approx(0.25)


def test_too_few_batches_have_no_rate() -> None:
    """A single batch gives no rate, and without any batch no result exists."""
    times = ArrivalTimes(0.0, window=1.0, ahead=4, workers=2)
    assert times.result() is None
    times.came(1.0)
    times.ended(1.0)
    times.ended(1.0)
    found = times.result()
    assert found is not None
    assert found.rate == 0.0
