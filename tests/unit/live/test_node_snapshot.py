"""The dictionary that describes a node: rates of loaders and processes that come and go, in a bounded size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncloader.commands.findings import as_lines
from asyncloader.commands.top import describe, view
from asyncloader.live.node_view import NodeSnapshots

Values = dict[str, Any]


def connection(worker: int = 0, *, relayed: bool = True) -> Values:
    counts = {"in_work": 2, "waiting": 1} if relayed else {"in_work": 0, "waiting": 0}
    return {
        "number": 7,
        "worker": worker,
        "pid": 100 + worker,
        "relayed": relayed,
        "batches": 5,
        "bytes": 500,
        **counts,
    }


def session(name: str, batches: int, *connections: Values, most: int | None = 1 << 30) -> Values:
    figures = {"batches": batches, "bytes": 100 * batches, "ring_bytes": 4096, "unsent_bytes": 0, "most_bytes": most}
    named = {"loader": name, "peer": "10.0.0.2", "dataset": "data:x with n=1"}
    return {**named, **figures, "connections": connections}


PROCESS = {"pid": 9, "dataset": "x", "ready": True, "connections": 1, "tasks": 8, "busy_s": 3.0, "state": "running"}


def reading(clock: float, *sessions: Values, processes: Sequence[Values] = (), **changes: Any) -> Values:
    usual = {
        "pid": 1,
        "time": 1e9 + clock,
        "clock": clock,
        "addresses": ["tcp://127.0.0.1:7070"],
        "draining": False,
        "problem": "",
        "totals": {"up_s": clock, "sessions": 1.0, "tasks": 0.0},
        "sessions": {each["loader"]: each for each in sessions},
        "processes": {each["pid"]: each for each in processes},
    }
    return usual | changes


def test_rates_are_those_since_the_last_reading() -> None:
    """Of loaders and processes that were read before; of others, all that they have; never below 0."""
    snapshots = NodeSnapshots()
    (first,) = snapshots.take(reading(10.0, session("a", 20, connection())))["sessions"]
    assert (first["batches_per_s"], first["in_work"], first["waiting"]) == (2, 2, 1)
    found = snapshots.take(reading(12.0, session("a", 30, connection()), session("b", 4), processes=[PROCESS]))
    assert [each["batches_per_s"] for each in found["sessions"]] == [5, 2]
    assert found["rates"] == {"interval_s": 2, "batches_per_s": 7, "bytes_per_s": 700}
    assert (found["processes"][0]["busy_frac"], found["processes"][0]["tasks_per_s"]) == (1, 4)
    again = snapshots.take(reading(13.0, session("a", 1), processes=[{**PROCESS, "busy_s": 3.5}]))
    assert again["sessions"][0]["batches_per_s"] == 0
    assert again["processes"][0]["busy_frac"] == pytest.approx(0.5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_states() -> None:
    """Until it listens it is starting; a problem is not all right."""
    take = NodeSnapshots().take
    assert (take(reading(1.0))["state"], take(reading(2.0, addresses=[]))["state"]) == ("serving", "starting")
    broken = take(reading(3.0, draining=True, problem="no disk"))
    assert (broken["state"], broken["ok"], broken["problem"]) == ("draining", False, "no disk")
    assert [as_lines(each) for each in describe([broken])][-1].startswith("!!  problem")


def test_many_loaders_are_counted_and_not_shown() -> None:
    """Their rates are in the sum, and the line stays shorter than a reader takes."""
    found = NodeSnapshots().take(reading(1.0, *(session(f"{n}" * 30, 1, connection()) for n in range(4096))))
    assert len(found["sessions"]) == 200
    assert found["sessions_left_out"] == 3896
    assert found["rates"]["batches_per_s"] == 4096
    assert len(json.dumps(found)) < 1 << 22


def test_the_view_has_names_as_they_are() -> None:
    """But for control characters, which are escapes."""
    found = reading(1.0, session("[red]a[/]\x1b", 1, connection()), addresses=["tcp://[::1]:7070"], problem="[b]no")
    shown = view(describe([NodeSnapshots().take(found)]), 200, 40)
    assert all(each in shown for each in ("tcp://[::1]:7070", r"[red]a[/]\x1b", "[b]no"))


def test_in_words() -> None:
    """A loader whose batches pass the node by has no rate; without a limit, memory is a number."""
    local = session("a", 0, connection(relayed=False), most=None)
    other = session("b", 3, connection(), connection(1))
    process = {**PROCESS, "ready": False}
    found = NodeSnapshots().take(reading(1.0, local, other, processes=[process]))
    texts = [each.text.partition("; ")[2] for each in describe([found])[1:]]
    assert texts == [
        "1 workers, not counted: batches pass the node by; memory 4 KiB",
        "2 workers, 3 batches/s, 300 B/s, 4 tasks in work, 2 waiting; memory 4 KiB of 1 GiB",
        "making its dataset",
    ]
