"""Spans never overlap in a lane, whatever is recorded, and the records of any order make a trace."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.telemetry import chrome
from asyncloader.telemetry.chrome import (
    BatchRecord,
    Span,
    StageRecord,
    Unit,
    lanes,
    nested,
)

BOUNDS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(st.lists(BOUNDS))
def test_nested_spans(bounds: list[list[int]]) -> None:
    """All lie within the outer span, and two within or beside each other; what lay so before is left as it was."""
    outer = Span("outer", 5, 25)
    given_spans = [Span(str(number), begin, end) for number, (begin, end) in enumerate(bounds)]
    found = nested(outer, given_spans)
    for each in found:
        assert 5 <= each.begin < each.end <= 25
        for other in found:
            beside = each.end <= other.begin or other.end <= each.begin
            within = each.begin <= other.begin <= other.end <= each.end
            assert beside or within or other.begin <= each.begin <= each.end <= other.end
    assert {each.name for each in found} <= {each.name for each in given_spans}
    assert nested(outer, found) == found


@given(st.lists(BOUNDS))
def test_lanes(bounds: list[list[int]]) -> None:
    """No two units of a lane overlap, no lane is used without need, and each unit has one."""
    units = [Unit(Span(str(number), begin, end + 1), []) for number, (begin, end) in enumerate(bounds)]
    placed, left_out = lanes(units)
    assert not left_out
    assert sorted(unit.outer.name for _, unit in placed) == sorted(unit.outer.name for unit in units)
    for lane, unit in placed:
        for other_lane, other in placed:
            if lane == other_lane and unit is not other:
                assert unit.outer.end <= other.outer.begin or other.outer.end <= unit.outer.begin
    at_once = max((sum(u.outer.begin <= at < u.outer.end for u in units) for at in range(32)), default=0)
    assert len({lane for lane, _ in placed}) == at_once


def test_lanes_are_bounded() -> None:
    """Units beyond `MOST_LANES` at a time are left out, and counted."""
    units = [Unit(Span(str(number), number, 1000), []) for number in range(chrome.MOST_LANES + 3)]
    placed, left_out = lanes(units)
    assert (len(placed), left_out) == (chrome.MOST_LANES, 3)


def test_a_fetch_has_its_collation_within() -> None:
    """The recorded seconds of a fetch leave the collation out, which is a part of it."""
    records = [
        StageRecord(10.0, "collate", 1.0),
        StageRecord(11.0, "fetch", 4.0),
        BatchRecord(11.5, 1, 0, -1, 5.5, 11.25, -1, -1, copied=False),
    ]
    spans = events(records, "X")
    assert [(each["name"], each["ts"], each["dur"]) for each in spans] == [
        ("batch 0", 5.5e6, 6e6),
        ("wait", 5.5e6, 5.75e6),
        ("open", 11.25e6, 0.25e6),
        ("fetch", 6e6, 5e6),
        ("collate", 9e6, 1e6),
    ]


def events(records: Any, phases: str) -> list[dict[str, Any]]:
    trace = chrome.trace_of(records, 0.0, 20.0, {"loader": "DataLoader", "pid": 1})
    return [each for each in trace if each["ph"] in phases]
