"""Plans in messages, and requests for them: they are read as sent, and nothing else is read as a plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.service.protocol import shard_plan
from asyncloader.service.protocol.records import pack_record
from asyncloader.service.protocol.shard_plan import (
    Catalog,
    Plan,
    PlanRequest,
    check_catalog,
    messages,
    read_plan,
    read_request,
)

INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
REQUEST = PlanRequest(3, 1, 2, 1 << 63, True, "known")


@pytest.mark.parametrize("shards", [0, 1, 20_000])
def test_a_plan_comes_in_pieces(shards: int) -> None:
    """However many shards the plan has, no message is large."""
    plan = Plan(
        "mark",
        [f"shard {number}" for number in range(shards)],
        [[(number, 0, None, False)] for number in range(shards)],
        1 << 40,
        0.25,
    )
    sent = list(messages(plan))
    assert max(map(len, sent)) < 1 << 20
    assert read_plan(iter(sent).__next__) == plan
    assert read_plan(iter(list(messages(b"an error"))).__next__) == b"an error"


def test_a_plan_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is refused before it takes all memory."""
    part = next(iter(messages(Plan("mark", ["shard"] * 20_000, [], None, 0.0))))
    monkeypatch.setattr(shard_plan, "_MOST_PLAN", 10 * len(part))
    with pytest.raises(ValueError, match="a plan of more than"):
        read_plan(lambda: part)


@example(b"\xa1\xff")  # a text that is invalid
@given(st.one_of(st.binary(), st.builds(pack_record, st.one_of(INTEGERS, st.tuples(st.integers(-1, 5), INTEGERS)))))
def test_what_is_no_plan(body: bytes) -> None:
    """Other bodies are an error."""
    with pytest.raises(ValueError, match=r"broken|cannot"):
        read_plan(iter([body, body, body]).__next__)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 0},
        {"workers": 1 << 24},
        {"workers": True},
        {"rank": 2},
        {"rank": -1},
        {"ranks": "2"},
        {"key": -1},
        {"key": "x"},
        {"known": None},
    ],
)
def test_requests_out_of_range(changes: dict[str, Any]) -> None:
    """Such requests are refused before anything is planned; a catalog is checked in the same way."""
    assert read_request(pack_record(REQUEST)) == REQUEST
    with pytest.raises(ValueError, match=r"PLAN|rank"):
        read_request(pack_record(REQUEST._replace(**changes)))
    with pytest.raises(ValueError, match="PLAN"):
        read_request(pack_record((1, 2)))
    check_catalog(Catalog(3, 2, "mark"))
    with pytest.raises(ValueError, match="rank"):
        check_catalog(Catalog(0, 2, "mark"))
