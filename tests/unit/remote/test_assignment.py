"""The shard assigner: assignments to workers, requests that wait, ranges that are returned, and states."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader.base.events import Cursor
from asyncloader.errors import StateError
from asyncloader.remote.assignment import (
    AssignmentLog,
    AssignmentLogState,
    Reply,
    Returned,
    ShardAssigner,
    StreamStart,
)
from asyncloader.remote.assignment_state import EpochAssignment, saved_key
from asyncloader.remote.shard_splitting import Assignment, CatalogRange, EpochPlan, EpochShares
from asyncloader.workers.fetch.setup import EpochStart

PLAN: list[Assignment] = [(CatalogRange(shard),) for shard in range(4)]
REST = CatalogRange(9, 5, 7)


def assigner_of(shard_ranges: int, workers: int, **options: Any) -> ShardAssigner:
    return ShardAssigner(AssignmentLog(PLAN[:shard_ranges]), [StreamStart()] * workers, **options)


def given(replies: list[Reply]) -> list[tuple[int, int | None]]:
    """For each reply the worker and the shard that it got."""
    return [(reply.worker, None if reply.assignment is None else reply.assignment[0].shard) for reply in replies]


def test_requests_wait_until_nobody_can_ask_earlier() -> None:
    """Worker 1's first request is answered once worker 0's is known."""
    assigner = assigner_of(4, 2)
    assert given(assigner.ask(1, 0, 0)) == []
    assert given(assigner.ask(0, 0, 0)) == [(0, 0), (1, 1)]


def test_unordered_requests_are_answered_as_they_come() -> None:
    """With ``ordered=False`` no request waits."""
    assigner = assigner_of(4, 3, ordered=False)
    assert given(assigner.ask(2, 0, 0)) == [(2, 0)]
    assert given(assigner.ask(2, 1, 0)) == [(2, 1)]
    assert given(assigner.ask(0, 0, 0)) == [(0, 2)]


def test_a_request_that_is_made_again_has_the_same_answer() -> None:
    """The replacement of a dead worker gets its predecessor's replies: assignments, "nothing", and the end."""
    assigner = assigner_of(1, 2)
    (first,) = assigner.ask(0, 0, 0)
    assert assigner.ask(0, 0, 0) == [first]
    (nothing,) = assigner.ask(1, 0, 0)
    assert nothing == Reply(1, 0)
    assert assigner.ask(1, 0, 0) == [nothing]
    (over,) = assigner.ask(1, 0, 0, [])
    assert over == Reply(1, 0, over=True)
    assert assigner.ask(1, 0, 0, []) == [over]
    assert assigner.ask(1, 0, 0) == [nothing]


def test_a_dead_process_is_not_answered_and_its_request_keeps_its_turn() -> None:
    """The replacement gets the reply when it asks: at once if it was due, else together with the others."""
    assigner = assigner_of(4, 2)
    assert given(assigner.ask(1, 0, 0)) == []
    assigner.died(1)
    assert given(assigner.ask(0, 0, 0)) == [(0, 0)]
    assert given(assigner.ask(1, 0, 0)) == [(1, 1)]
    assigner = assigner_of(4, 2)
    assert given(assigner.ask(1, 0, 0)) == []
    assigner.died(1)
    assert given(assigner.ask(1, 0, 0)) == []
    assert given(assigner.ask(0, 0, 0)) == [(0, 0), (1, 1)]


def test_the_last_worker_keeps_what_it_has() -> None:
    """A worker that cannot fill a batch returns its samples; the last running worker makes a short batch."""
    assigner = assigner_of(2, 2)
    assigner.ask(0, 0, 0)
    assigner.ask(1, 0, 0)
    replies = assigner.ask(0, 1, 0, [REST]) + assigner.ask(1, 1, 0, [CatalogRange(1, 3)])
    assert replies == [Reply(0, 1, over=True), Reply(1, 1, (REST,))]
    assert assigner.ask(1, 2, 0, [CatalogRange(1, 3), REST]) == [Reply(1, 2, over=True, last=True)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ((0, 1, 0), "worker 0 asks for its assignment number 1, and has had 0"),
        ((0, -1, 0), "worker 0 asks for its assignment number -1"),
        ((0, 0, -1), "worker 0 asks for batch -1"),
        ((0, 0, 1 << 60), "makes its batch 0"),
        ((0, 0, 0, [(1, 2, 3, False, 5)]), "no list of ranges"),
        ((0, 0, 0, [("a", 0, None, False)]), "no list of ranges"),
        ((0, 0, 0, [(0, -1, None, False)]), "no list of ranges"),
    ],
)
def test_requests_that_cannot_be(request_: tuple[Any, ...], words: str) -> None:
    """A wrong number, an impossible batch, or invalid ranges are refused, and nothing is changed."""
    assigner = assigner_of(2, 2)
    with pytest.raises(ValueError, match=words):
        assigner.ask(*request_)
    assert given(assigner.ask(0, 0, 0)) == [(0, 0)]
    assert repr(assigner) == "<ShardAssigner 1 assignments left, 0 of 2 workers waiting>"


def test_a_state_gives_back_what_nobody_had_begun() -> None:
    """Assignments given after the saved positions are the first, in order; then the rest of the plan."""
    assigner = assigner_of(4, 2)
    log = assigner.log
    assigner.ask(0, 0, 0)
    assigner.ask(1, 0, 0)
    assigner.ask(0, 1, 0)
    assigner.ask(1, 1, 0)
    assert log.state([0, 0]) == AssignmentLogState(4, PLAN, [], [])
    assert log.state([1, 1]) == AssignmentLogState(4, [PLAN[2], PLAN[3]], [], [])
    assert log.state([2, 1]) == AssignmentLogState(4, [PLAN[3]], [], [])
    assert log.state([1, 2]) == AssignmentLogState(4, [PLAN[2]], [], [])
    again = AssignmentLog(PLAN, 4, [PLAN[2], PLAN[3]])
    assert (len(again), again.source(1)) == (2, PLAN[3])
    assert ShardAssigner(again, [StreamStart(taken=1)] * 2).ask(0, 1, 0) == [Reply(0, 1, PLAN[2])]


def test_a_state_knows_who_is_over_for_what_it_gave_back() -> None:
    """A worker counts as ended once another worker's saved position includes the samples it returned."""
    assigner = assigner_of(2, 2)
    requests: list[tuple[Any, ...]] = [(0, 0, 0), (1, 0, 0), (0, 1, 0, [REST]), (1, 1, 0, [])]
    for request in requests:
        assigner.ask(*request)
    assert assigner.log.state([1, 1]) == AssignmentLogState(2, [], [], [])
    assert assigner.log.state([1, 2]) == AssignmentLogState(2, [], [], [0])


def test_what_was_given_back_is_given_to_later_requests_alone() -> None:
    """The giver's end was delivered, but no batch of the worker that took its samples: they keep their request order.

    Workers that resume from earlier positions repeat their requests, and get the same replies.
    """
    assigner = assigner_of(3, 3)
    requests: list[tuple[Any, ...]] = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0, [REST])]
    for request in requests:
        assigner.ask(*request)
    assert [assigner.answered(worker) for worker in (0, 1)] == [[Reply(1, 1)], [Reply(2, 1, over=True)]]
    state = assigner.log.state([0, 1, 1], [2])
    returned = Returned((0, 1, 2), (REST,))
    assert state == AssignmentLogState(3, [PLAN[0]], [returned], [])

    log = AssignmentLog(PLAN[:3], *state[:3])
    again = ShardAssigner(log, [StreamStart(), StreamStart(0, 0, 1), StreamStart(1, 1, 1, over=True)])
    assert log.state([0, 1, 1], [2]) == state
    assert again.ask(0, 0, 0) == [Reply(0, 0, PLAN[0])]
    assert again.ask(0, 1, 0) == [Reply(0, 1)]  # refused, as before
    assert again.ask(1, 1, 0) == []
    assert again.answered(0) == [Reply(1, 1)]  # refused, too
    assert again.ask(0, 1, 1, [PLAN[0][0]]) == []
    assert again.answered(1) == [Reply(0, 1, (REST,))]
    assert log.state([2, 1, 1], [2]) == AssignmentLogState(3, [], [], [2])


def test_a_new_epoch_s_state_is_its_beginning() -> None:
    """No assignment was given, so none is returned."""
    assert AssignmentLog(PLAN).state([0, 0]) == AssignmentLogState(0, [], [], [])
    assert AssignmentLog(PLAN, 2, [(REST,)]).state([1, 1]) == AssignmentLogState(2, [(REST,)], [], [])


# ------------------------------------------------------------------------------------------ the assignment's state


def epoch_plan(assignments: list[Assignment]) -> EpochPlan:
    return EpochPlan(assignments, EpochShares(1, None, 0.0))


def assignment_of(saved: Any, plan: list[Assignment] = PLAN, names: str = "abcd") -> EpochAssignment:
    return EpochAssignment(list(names), epoch_plan(plan), [EpochStart(), EpochStart()], saved, key=5, ordered=True)


def whole() -> dict[str, Any]:
    assignments = assignment_of(None)
    assignments.assigner.ask(0, 0, 0)
    return assignments.state([None, None], [0, 0])


def test_part_of_a_state() -> None:
    """The state consists of plain values, and another epoch can begin with it."""
    state = whole()
    assert state == {"key": 5, "plan": state["plan"], "done": 1, "back": [[[0, 0, None, False]]], "returned": []}
    assigner = assignment_of(state).assigner
    assert given(assigner.ask(0, 0, 0)) == [(0, 0)]
    assert given(assigner.ask(1, 0, 0)) == [(1, 1)]


def test_states_of_other_shards() -> None:
    """With other names, another order or other ranges the epoch is a different one."""
    state = whole()
    assignment_of(state)
    for plan, names in ((PLAN, "abce"), (PLAN[::-1], "abcd"), (PLAN[:3], "abcd"), ([*PLAN, (REST,)], "abcd")):
        with pytest.raises(StateError, match="was saved of other shards"):
            assignment_of(state, plan, names)


@pytest.mark.parametrize(
    "change",
    [
        {"done": -1},
        {"done": 5},
        {"done": True},
        {"back": None},
        {"back": [[[0, 0, None, False, 1]]]},
        {"back": [[[4, 0, None, False]]]},
        {"back": [[[0, -1, None, False]]]},
        {"back": [[[0, 0, "1", False]]]},
        {"back": [[[0, 0, None, 0]]]},
        {"returned": None},
        {"returned": [5]},
        {"returned": [[[0, 0], [[0, 0, None, False]]]]},
        {"returned": [[[0, 0, 2], [[0, 0, None, False]]]]},
        {"returned": [[[0, -1, 0], [[0, 0, None, False]]]]},
        {"returned": [[[0, "1", 0], [[0, 0, None, False]]], [[0, 1, 0], [[0, 0, None, False]]]]},
        {"returned": [[[0, 0, 1], [[4, 0, None, False]]]]},
    ],
)
def test_broken_parts(change: dict[str, Any]) -> None:
    """An invalid value or a missing key is a StateError."""
    with pytest.raises(StateError, match=r"the state is broken|was saved of other shards"):
        assignment_of(whole() | change)
    for name in ("plan", "done", "back", "returned"):
        part = whole()
        del part[name]
        with pytest.raises(StateError, match="lacks something"):
            assignment_of(part)
    for key in (None, -1, True, "5", 1 << 63):
        with pytest.raises(StateError, match="the key is"):
            saved_key(whole() | {"key": key})
    nonsense: Any
    with pytest.raises(StateError, match="lacks something"):
        assignment_of({})
    for nonsense in (5, [], "plan", {}):
        with pytest.raises(StateError, match="lacks something"):
            saved_key(nonsense)


def test_workers_that_have_read_without_a_part_of_a_state() -> None:
    """A state with the workers' positions but without the remaining shards is broken."""
    unplanned: dict[str, Any] = {"key": 5, "plan": None, "done": 0, "back": []}
    assignment_of(unplanned)
    for saved in (None, unplanned):
        with pytest.raises(StateError, match="nothing says which are left"):
            EpochAssignment(
                list("abcd"), epoch_plan(PLAN), [EpochStart(skip=1), EpochStart()], saved, key=5, ordered=True
            )


STREAM: dict[str, Any] = {
    "batch": 0, "taken": 1, "asked": None, "dry": False, "over": False, "todo": [[0, 5, None, False]],
    "carry": [], "blocks": {"number": 0, "aim": 2, "given": 1, "size": 2, "block": [[0, 0, 5, False]], "filling": []},
}  # fmt: skip


def begin_stream(state: Any) -> EpochAssignment:
    start = EpochStart(cursor=Cursor(1, 1, False, None, state))
    return EpochAssignment(list("abcd"), epoch_plan(PLAN), [start, EpochStart()], whole(), key=5, ordered=True)


@pytest.mark.parametrize("state", [5, "state", [], {}])
def test_what_is_no_state_of_a_worker_stream(state: Any) -> None:
    """A cursor with another iterator state is a StateError, before a worker gets it."""
    with pytest.raises(StateError, match="the state is broken: a worker's position in the shards"):
        begin_stream(state)


@pytest.mark.parametrize("field", STREAM)
def test_broken_stream_states(field: str) -> None:
    """The error for a missing field names it; an invalid value is an error, too."""
    begin_stream(STREAM)
    with pytest.raises(StateError, match=f"lacks '{field}'"):
        begin_stream({name: value for name, value in STREAM.items() if name != field})
    right = {("asked", None), ("blocks", None), ("dry", True), ("over", True)}
    value: Any
    for value in ("x", -2, 1.5, True, [5], [[9, 0, None, False]], [[0]], {}, None):
        if isinstance(value, bool | None) and (field, value) in right:
            begin_stream(STREAM | {field: value})
            continue
        with pytest.raises(StateError, match="the state is broken"):
            begin_stream(STREAM | {field: value})


@pytest.mark.parametrize("field", STREAM["blocks"])
def test_broken_blocks(field: str) -> None:
    """Invalid shuffle blocks are refused, and so is a block that gave out more samples than it held."""
    for value in ("x", -2, True, [[9, 0, None, False]], None):
        with pytest.raises(StateError, match="the state is broken"):
            begin_stream(STREAM | {"blocks": STREAM["blocks"] | {field: value}})
    with pytest.raises(StateError, match="3 of a block of 2 samples"):
        begin_stream(STREAM | {"blocks": STREAM["blocks"] | {"given": 3}})


def test_states_of_another_shuffle_buffer() -> None:
    """A block can only be restored into a buffer of the same size."""
    with pytest.raises(StateError, match="shuffled differently"):
        EpochAssignment(
            list("abcd"), epoch_plan(PLAN), [EpochStart(), EpochStart()], whole(), key=5, ordered=True, shuffle=8
        )
