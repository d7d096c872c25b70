"""Reads a trace, and checks it against the format of Chrome's trace events, and against what every trace promises."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

_KEYS: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "cat": str, "s": str, "ts": (int, float), "pid": int, "tid": int},
    "C": {"name": str, "ts": (int, float), "pid": int, "args": dict},
}
_METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


class Found(NamedTuple):
    """A trace that is right.

    Attributes:
        facts: of the whole.
        delivered: iterator and number of each batch that the consumer got, in the order of time.
        ways: the categories of each batch's spans in the order of time, for those that workers have made.
        spans: the names of the spans of each track and category, without numbers.
        events: instant events by name: their arguments, with the track's name as `track`.
        tracks: names of all tracks.
    """

    facts: dict[str, Any]
    delivered: list[tuple[int, int]]
    ways: dict[tuple[int, int], list[str]]
    spans: dict[tuple[str, str], Counter[str]]
    events: dict[str, list[dict[str, Any]]]
    tracks: list[str]


def read_trace(path: Path) -> Found:
    """Read a trace, and check it."""
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    assert trace.keys() == {"displayTimeUnit", "traceEvents", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    limit = trace["otherData"]["seconds"] * 1e6 + 1
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[str, int, int], Any] = {}
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        kind = event["ph"]
        for key, types in _KEYS[kind].items():
            assert isinstance(event[key], types), event
        if "ts" in event:
            assert 0 <= event["ts"] <= event["ts"] + event.get("dur", 0) <= limit, event
        if kind == "X":
            lanes[event["pid"], event["tid"]].append(event)
        elif kind == "M":
            assert event["name"] in _METADATA
            lane = event["name"], event["pid"], 0 if event["name"].startswith("process") else event["tid"]
            assert lane not in names
            names[lane] = event["args"]
        elif kind == "i":
            events[event["name"]].append({**event.get("args", {}), "track": event["pid"]})
    for spans in lanes.values():
        _check_nesting(spans)
    spans_of = _spans(lanes, names)
    batches = [
        event for spans in lanes.values() for event in spans if _is(event, "consumer", "batch") and "args" in event
    ]
    delivered = [(each["args"]["iterator"], each["args"]["batch"]) for each in sorted(batches, key=_time)]
    assert len(set(delivered)) == len(delivered), "a batch is delivered once"
    tracks = {pid: args["name"] for (name, pid, _), args in names.items() if name == "process_name"}
    for found in events.values():
        for each in found:
            each["track"] = tracks[each["track"]]
    ways = _ways(batches, [each for spans in lanes.values() for each in spans])
    return Found(trace["otherData"], delivered, ways, spans_of, dict(events), list(tracks.values()))


def _time(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _is(event: dict[str, Any], category: str, name: str) -> bool:
    return bool(event["cat"] == category and event["name"].partition(" ")[0] == name)


def _ns(us: float) -> int:
    return round(us * 1e3)


def _check_nesting(spans: list[dict[str, Any]]) -> None:
    """Spans of a lane come in the order of time, and each lies within or beside the others."""
    begun: list[int] = []
    before = 0
    for each in sorted(spans, key=lambda each: (_ns(each["ts"]), -_ns(each["dur"]))):
        begin, end = _ns(each["ts"]), _ns(each["ts"]) + _ns(each["dur"])
        assert before <= begin < end
        before = begin
        while begun and begun[-1] <= begin:
            begun.pop()
        assert not begun or end <= begun[-1], each
        begun.append(end)


def _spans(lanes: dict[tuple[int, int], list[dict[str, Any]]], names: Any) -> dict[tuple[str, str], Counter[str]]:
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (pid, tid), spans in lanes.items():
        assert ("thread_name", pid, tid) in names
        track = names["process_name", pid, 0]["name"]
        for each in spans:
            found[track, each["cat"]][each["name"].partition(" ")[0]] += 1
    return dict(found)


def _ways(batches: list[dict[str, Any]], spans: list[dict[str, Any]]) -> dict[tuple[int, int], list[str]]:
    """The categories of each delivered batch's spans in the order of time, for those that a worker has made."""
    found: dict[tuple[int, int], list[str]] = {}
    for each in batches:
        found[each["args"]["iterator"], each["args"]["batch"]] = []
    # The consumer may have asked for a batch before it was made: what counts is when it got the batch.
    for each in sorted(spans, key=lambda each: _time(each) + each["dur"] * (each["cat"] == "consumer")):
        figures = each.get("args", {})
        key = figures.get("iterator"), figures.get("batch")
        if key in found and each["cat"] not in found[key]:
            found[key].append(each["cat"])
    return {key: way for key, way in found.items() if len(way) > 1}
