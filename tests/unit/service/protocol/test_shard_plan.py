"""Plans, and requests for them: they are read as sent, and nothing else is read as a plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.service.protocol.records import pack_record, read_record
from asyncloader.service.protocol.shard_plan import (
    Catalog,
    Plan,
    PlanRequest,
    check_catalog,
    read_request,
)

INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
REQUEST = PlanRequest(3, 1, 2, 1 << 63, True, "known")


@pytest.mark.parametrize("shards", [0, 1, 20_000])
def test_a_plan_arrives_as_it_was(shards: int) -> None:
    """However many shards it has."""
    names = [f"shard {number}" for number in range(shards)]
    plan = Plan("mark", names, [[(number, 0, None, False)] for number in range(shards)], 1 << 40, 0.25)
    assert read_record(Plan, pack_record(plan)) == plan


@example(b"\xa1\xff")  # a text that is invalid
@given(st.one_of(st.binary(), st.builds(pack_record, st.one_of(INTEGERS, st.tuples(st.integers(-1, 5), INTEGERS)))))
def test_what_is_no_plan(body: bytes) -> None:
    """Other bodies are an error."""
    with pytest.raises(ValueError, match="broken stream: PLAN: a body that cannot be read"):
        read_record(Plan, body)


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


@pytest.mark.parametrize("batch", [-1, 1 << 25, 1 << 63])
def test_a_batch_that_cannot_be(batch: int) -> None:
    """A node refuses it: its workers compute an order from it."""
    with pytest.raises(ValueError, match="CATALOG"):
        check_catalog(read_record(Catalog, pack_record(Catalog(1, 1, "x", batch))))


@pytest.mark.parametrize("changes", [{"left_out": 1.5}, {"samples": -1}, {"assignments": [[(0, -1, None, False)]]}])
def test_plans_out_of_range(changes: dict[str, Any]) -> None:
    """A node is not trusted."""
    with pytest.raises(ValueError, match="broken stream: PLAN"):
        read_record(Plan, pack_record(Plan("mark", [], [], None, 0.0)._replace(**changes)))
