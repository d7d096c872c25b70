"""A worker's spans: of its tasks, and those of no task; bytes that are no spans are refused."""

from __future__ import annotations

import struct

import pytest

from asyncloader.telemetry import counters
from asyncloader.telemetry.counters import STAGES, Recorder, span
from asyncloader.telemetry.spans import SpanLog, unpack
from asyncloader.workers.ipc.wire import MOST_SPAN_BYTES


def test_spans_of_a_task_and_of_none() -> None:
    """Those that end after the answer go with the next; a recorder that is not traced notes nothing."""
    recorder = Recorder()
    recorder.time("fetch", 1.0)
    log = SpanLog(recorder, process=False)
    recorder.time("first_read", 0.25)
    log.begin(5.0, 6.0)
    recorder.time("fetch", 0.5)
    first = unpack(log.answered(2, 3), 2, 3)
    assert first is not None
    assert (first.asked, first.begin) == (5.0, 6.0)
    assert [(name, seconds) for name, _, seconds in first.own] == [("fetch", 0.5)]
    assert [(name, seconds) for name, _, seconds in first.loose] == [("first_read", 0.25)]
    recorder.time("collate", 0.125)
    assert log.answered(2, 4) == b""
    log.begin(7.0, 8.0)
    body = log.answered(2, 4)
    second = unpack(body, 2, 4)
    assert second is not None
    assert [name for name, _, _ in second.loose] == ["collate"]
    assert unpack(body, 2, 5) is None
    log.stop()
    assert recorder.sink is None


def test_a_frame_is_bounded() -> None:
    """However many spans end, and in whatever task."""
    recorder = Recorder()
    log = SpanLog(recorder, process=False)
    for _ in range(3000):
        recorder.time("fetch", 0.0)
    log.begin(1.0, 1.0)
    for _ in range(3000):
        recorder.time("fetch", 0.0)
    assert len(log.answered(0, 0)) <= MOST_SPAN_BYTES
    log.stop()


def test_a_task_of_many_reads_keeps_its_stages() -> None:
    """They end last, when the reads have taken all the room that reads get."""
    recorder = Recorder()
    log = SpanLog(recorder, process=False)
    log.begin(1.0, 1.0)
    for _ in range(3000):
        log._note("read", 0.0)
    for stage in STAGES:
        recorder.time(stage, 0.0)
    body = log.answered(0, 0)
    log.stop()
    assert len(body) <= MOST_SPAN_BYTES
    found = unpack(body, 0, 0)
    assert found is not None
    names = [name for name, _, _ in found.own]
    assert names[-len(STAGES) :] == list(STAGES)
    assert names.count("read") > 900


def test_two_workers_of_a_process() -> None:
    """Code of no task goes to the newer; the end of the other changes nothing, and after both nothing is left."""
    first, second = Recorder(), Recorder()
    ended, log = SpanLog(first, process=True), SpanLog(second, process=True)
    ended.stop()
    span("read", 0.5)
    log.begin(1.0, 1.0)
    found = unpack(log.answered(0, 0), 0, 0)
    assert found is not None
    assert [(name, seconds) for name, _, seconds in found.loose] == [("read", 0.5)]
    log.stop()
    assert first.sink is second.sink is counters._process.sink is None


@pytest.mark.parametrize("body", [b"", b"12", bytes(MOST_SPAN_BYTES + 1)])
def test_bytes_that_are_no_spans(body: bytes) -> None:
    """Of a node that cannot be trusted."""
    assert unpack(body, 0, 0) is None


def test_numbers_that_cannot_be() -> None:
    """A span of them is left out, a task of them has none."""
    head = struct.Struct("=IQdddH")
    wrong = [(255, 1.0, 0.5), (0, float("nan"), 0.0), (0, 1.0, float("inf")), (0, 1.0, 2.0), (0, -1.0, 0.0)]
    spans = b"".join(struct.pack("=Bdd", *each) for each in wrong)
    found = unpack(head.pack(0, 0, 1.0, 2.0, 3.0, 5) + spans, 0, 0)
    assert found is not None
    assert not found.own
    assert unpack(head.pack(0, 0, 1.0, float("nan"), 3.0, 0), 0, 0) is None
    assert unpack(head.pack(0, 0, 1.0, 4.0, 3.0, 0), 0, 0) is None
