"""Counts and times of one process: sums, histograms, and the loader for which they count."""

from __future__ import annotations

import math
import threading
from contextvars import copy_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.telemetry.counters import RECORD_BYTES, STAGES, Recorder, count, recording, stage_times
from asyncloader.transports import RetryCounts

SECONDS = st.floats(0, 1800, allow_subnormal=False)


@given(st.lists(SECONDS, min_size=1, max_size=200))
def test_quantiles_are_exact_to_a_quarter_of_an_octave(seconds: list[float]) -> None:
    """A quantile is in the right bucket; the buckets' edges are a quarter of an octave apart.

    All times below a microsecond are in one bucket.
    """
    recorder = Recorder()
    for each in seconds:
        recorder.time("fetch", each)
    times = stage_times(recorder.block.tolist(), "fetch")
    assert times.number == len(seconds)
    assert times.total == pytest.approx(sum(seconds))
    ordered = sorted(seconds)
    for share, value in ((0.5, times.p50), (0.95, times.p95), (0.99, times.p99)):
        exact = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        assert exact / 1.25 - 1.25e-6 <= value <= max(1.25 * exact, 1.25e-6) + 1e-12
    assert times.p50 <= times.p95 <= times.p99


@given(st.lists(st.floats(-1, 1e7)))
def test_noted_times_count_as_others(seconds: list[float]) -> None:
    """Times that are noted and counted later, once they are many, give the block that `time` gives, up to the rounding
    of the sum.
    """
    at_once, later = Recorder(), Recorder()
    note = later.note("fetch")
    for each in seconds:
        at_once.time("fetch", each)
        note(each)
    later.count_noted(len(seconds) + 1)
    assert not any(later.block)
    for _ in range(2):  # the second time nothing is left to count
        later.count_noted()
        assert later.block.tolist() == pytest.approx(at_once.block.tolist())


def test_what_is_too_long_for_the_buckets_counts_in_the_last() -> None:
    """Times beyond the last bucket are counted in the last bucket."""
    recorder = Recorder()
    recorder.time("wait", 1e9)
    times = stage_times(recorder.block.tolist(), "wait")
    assert (times.number, times.total) == (1, 1e9)
    assert 1000 < times.p50 < 3000


def test_blocks_add_up() -> None:
    """The counts of several processes are merged by adding their blocks; the stages stay separate."""
    one, other = Recorder(), Recorder()
    for number, stage in enumerate(STAGES):
        one.time(stage, number)
        other.time(stage, 10 * number)
        other.time(stage, 10 * number)
    merged = [sum(pair) for pair in zip(one.block.tolist(), other.block.tolist(), strict=True)]
    for number, stage in enumerate(STAGES):
        assert stage_times(merged, stage)[:2] == (3, 21 * number)


def test_another_process_reads_what_is_written() -> None:
    """A block in shared memory shows each change at once; after `keep` it is a private copy with the same values."""
    memory = bytearray(RECORD_BYTES)
    writer, reader = Recorder(memory), Recorder(memory)
    writer.add("requests")
    assert reader.block[0] == 1
    reader.keep()
    writer.add("requests")
    assert (reader.block[0], writer.block[0]) == (1, 2)


def test_an_unknown_name_is_a_mistake() -> None:
    """A misspelt name is a KeyError."""
    with pytest.raises(KeyError):
        Recorder().add("retry")


def test_two_loaders_in_one_process_do_not_count_for_each_other() -> None:
    """Contexts and threads that began for one loader do not count for the other, either."""
    one, other = Recorder(), Recorder()
    with recording(one):
        count("requests")
        begun = copy_context()
        with recording(other):
            count("requests", 10)
        count("requests")
    thread = threading.Thread(target=begun.run, args=(count, "requests", 100))
    thread.start()
    thread.join()
    count("requests", 1000)
    assert (one.block[0], other.block[0]) == (102, 10)


def test_a_transports_counts_are_added_up() -> None:
    """The counts of each transport also count for the loader."""
    recorder, counts = Recorder(), RetryCounts()
    with recording(recorder):
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
    assert recorder.block.tolist()[:6] == [0, 0, 2, 1, 1, 0.75]
