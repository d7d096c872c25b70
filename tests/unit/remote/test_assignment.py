"""The lease book by itself: who gets what, when a request must wait, what comes back, and what a state says."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader.errors import StateError
from asyncloader.remote.assignment import LaneStart, Lease, LeaseBook, Ledger, LedgerState, Reply, Returned
from asyncloader.remote.assignment_state import EpochLeases, saved_key
from asyncloader.remote.catalog import Piece
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.setup import EpochStart

PLAN: list[Lease] = [(Piece(shard),) for shard in range(4)]
REST = Piece(9, 5, 7)


def book_of(pieces: int, lanes: int, **options: Any) -> LeaseBook:
    return LeaseBook(Ledger(PLAN[:pieces]), [LaneStart()] * lanes, **options)


def given(replies: list[Reply]) -> list[tuple[int, int | None]]:
    """Of each reply: the lane, and the shard that it got."""
    return [(reply.lane, None if reply.lease is None else reply.lease[0].shard) for reply in replies]


def test_requests_wait_until_nobody_can_ask_earlier() -> None:
    """The second lane's first request is answered when the first lane's is known."""
    book = book_of(4, 2)
    assert given(book.ask(1, 0, 0)) == []
    assert given(book.ask(0, 0, 0)) == [(0, 0), (1, 1)]


def test_a_lane_that_has_made_a_batch_is_past_it() -> None:
    """A request of batch 1 is answered when the other lane is in a later batch, or has had more leases."""
    book = book_of(4, 2)
    book.ask(0, 0, 0)
    assert given(book.ask(1, 0, 0)) == [(1, 1)]
    book.answered(1)
    assert given(book.ask(1, 1, 1)) == []
    assert given(book.answered(0)) == []  # lane 0 may ask for its lease number 1 in batch 1, too, and comes first
    assert given(book.answered(0)) == [(1, 2)]


def test_unordered_requests_are_answered_as_they_come() -> None:
    """``ordered=False`` waits for nobody."""
    book = book_of(4, 3, ordered=False)
    assert given(book.ask(2, 0, 0)) == [(2, 0)]
    assert given(book.ask(2, 1, 0)) == [(2, 1)]
    assert given(book.ask(0, 0, 0)) == [(0, 2)]


def test_a_request_that_is_made_again_has_the_same_answer() -> None:
    """A worker in another's place is answered as that one was: leases, "there is nothing", and the end."""
    book = book_of(1, 2)
    (first,) = book.ask(0, 0, 0)
    assert book.ask(0, 0, 0) == [first]
    (nothing,) = book.ask(1, 0, 0)
    assert nothing == Reply(1, 0)
    assert book.ask(1, 0, 0) == [nothing]
    (over,) = book.ask(1, 0, 0, [])
    assert over == Reply(1, 0, over=True)
    assert book.ask(1, 0, 0, []) == [over]
    assert book.ask(1, 0, 0) == [nothing]


def test_a_dead_process_is_not_answered_and_its_request_keeps_its_turn() -> None:
    """Who takes its place has the answer when it asks: at once if it was due, else together with the others."""
    book = book_of(4, 2)
    assert given(book.ask(1, 0, 0)) == []
    book.died(1)
    assert given(book.ask(0, 0, 0)) == [(0, 0)]
    assert given(book.ask(1, 0, 0)) == [(1, 1)]
    book = book_of(4, 2)
    assert given(book.ask(1, 0, 0)) == []
    book.died(1)
    assert given(book.ask(1, 0, 0)) == []
    assert given(book.ask(0, 0, 0)) == [(0, 0), (1, 1)]


def test_what_was_refused_stays_refused_when_there_is_more_again() -> None:
    """A lane heard that there is nothing, and later got what another gave back: who takes its place hears both."""
    book = book_of(2, 2)
    for request in ((0, 0, 0), (1, 0, 0), (0, 1, 0)):
        book.ask(*request)
    book.answered(0)
    assert book.ask(1, 1, 0) == [Reply(1, 1)]
    book.answered(1)
    assert book.ask(0, 1, 1, [REST]) == [Reply(0, 1, over=True)]
    assert book.ask(1, 1, 1, []) == [Reply(1, 1, (REST,))]
    assert book.ask(1, 1, 0) == [Reply(1, 1)]
    assert book.ask(1, 1, 1, []) == [Reply(1, 1, (REST,))]


def test_the_last_lane_keeps_what_it_has() -> None:
    """A lane that cannot fill a batch gives it back; the last one there is makes a short one."""
    book = book_of(2, 2)
    book.ask(0, 0, 0)
    book.ask(1, 0, 0)
    replies = book.ask(0, 1, 0, [REST]) + book.ask(1, 1, 0, [Piece(1, 3)])
    assert replies == [Reply(0, 1, over=True), Reply(1, 1, (REST,))]
    assert book.ask(1, 2, 0, [Piece(1, 3), REST]) == [Reply(1, 2, over=True, last=True)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ((0, 1, 0), "lane 0 asks for its lease number 1, and has had 0"),
        ((0, -1, 0), "lane 0 asks for its lease number -1"),
        ((0, 0, -1), "lane 0 asks for batch -1"),
        ((0, 0, 1 << 60), "makes its batch 0"),
        ((0, 0, 0, [(1, 2, 3, False, 5)]), "no list of pieces"),
        ((0, 0, 0, [5]), "no list of pieces"),
        ((0, 0, 0, [("a", 0, None, False)]), "no list of pieces"),
        ((0, 0, 0, [(0, -1, None, False)]), "no list of pieces"),
    ],
)
def test_requests_that_cannot_be(request_: tuple[Any, ...], words: str) -> None:
    """A lane that was not given so much, makes no such batch, or gives back nonsense; and nothing is changed by it."""
    book = book_of(2, 2)
    with pytest.raises(ValueError, match=words):
        book.ask(*request_)
    assert given(book.ask(0, 0, 0)) == [(0, 0)]
    assert repr(book) == "<LeaseBook 1 leases left, 0 of 2 lanes waiting>"


def test_a_state_gives_back_what_nobody_had_begun() -> None:
    """What was leased after the lanes' places comes first, in its order; then the rest of the plan."""
    book = book_of(4, 2)
    ledger = book.ledger
    book.ask(0, 0, 0)
    book.ask(1, 0, 0)
    book.ask(0, 1, 0)
    book.ask(1, 1, 0)
    assert ledger.state([0, 0]) == LedgerState(4, PLAN, [], [])
    assert ledger.state([1, 1]) == LedgerState(4, [PLAN[2], PLAN[3]], [], [])
    assert ledger.state([2, 1]) == LedgerState(4, [PLAN[3]], [], [])
    assert ledger.state([1, 2]) == LedgerState(4, [PLAN[2]], [], [])
    again = Ledger(PLAN, 4, [PLAN[2], PLAN[3]])
    assert (len(again), again.source(1)) == (2, PLAN[3])
    assert LeaseBook(again, [LaneStart(taken=1)] * 2).ask(0, 1, 0) == [Reply(0, 1, PLAN[2])]


def test_a_state_knows_who_is_over_for_what_it_gave_back() -> None:
    """A lane's end counts once another lane's place is behind taking what it left; until then it is its lane's."""
    book = book_of(2, 2)
    requests: list[tuple[Any, ...]] = [(0, 0, 0), (1, 0, 0), (0, 1, 0, [REST]), (1, 1, 0, [])]
    for request in requests:
        book.ask(*request)
    assert book.ledger.state([1, 1]) == LedgerState(2, [], [], [])
    assert book.ledger.state([1, 2]) == LedgerState(2, [], [], [0])


def test_what_was_given_back_is_given_to_later_requests_alone() -> None:
    """Where the giver's end was delivered and no taker's batch, the lease is kept with its stamp: lanes that go on from
    before it ask again what they asked before it, and are answered as they were.
    """
    book = book_of(3, 3)
    requests: list[tuple[Any, ...]] = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0, [REST])]
    for request in requests:
        book.ask(*request)
    assert [book.answered(lane) for lane in (0, 1)] == [[Reply(1, 1)], [Reply(2, 1, over=True)]]
    state = book.ledger.state([0, 1, 1], [2])
    returned = Returned((0, 1, 2), (REST,))
    assert state == LedgerState(3, [PLAN[0]], [returned], [])

    ledger = Ledger(PLAN[:3], *state[:3])
    again = LeaseBook(ledger, [LaneStart(), LaneStart(0, 0, 1), LaneStart(1, 1, 1, over=True)])
    assert ledger.state([0, 1, 1], [2]) == state
    assert again.ask(0, 0, 0) == [Reply(0, 0, PLAN[0])]
    assert again.ask(0, 1, 0) == [Reply(0, 1)]  # refused, as it was
    assert again.ask(1, 1, 0) == []
    assert again.answered(0) == [Reply(1, 1)]  # this one as well
    assert again.ask(0, 1, 1, [PLAN[0][0]]) == []
    assert again.answered(1) == [Reply(0, 1, (REST,))]
    assert ledger.state([2, 1, 1], [2]) == LedgerState(3, [], [], [2])


def test_returns_are_taken_in_the_order_of_stamps() -> None:
    """Also where one was there when the epoch was resumed, and an earlier one is made again after that."""
    late, early = Returned((0, 2, 1), (REST,)), Piece(1, 5)
    ledger = Ledger(PLAN[:1], 1, [], [late])
    book = LeaseBook(ledger, [LaneStart(), LaneStart(over=True), LaneStart(0, 0, 1)])
    assert book.ask(0, 0, 0, [early]) == [Reply(0, 0, over=True)]
    assert ledger.state([0, 0, 1], [0, 1]).returned == [Returned((0, 0, 0), (early,)), late]
    assert book.ask(2, 1, 0) == [Reply(2, 1, (early,))]
    assert book.ask(2, 2, 0) == [Reply(2, 2, (REST,))]
    assert ledger.state([0, 0, 3], [0, 1]) == LedgerState(1, [], [], [0, 1])


def test_whoever_is_last_takes_what_was_given_back() -> None:
    """Also if its stamp is one that no request can have: a state that was edited loses no sample silently."""
    never = Returned((1 << 60, 0, 1), (REST,))
    book = LeaseBook(Ledger(PLAN[:1], 1, [], [never]), [LaneStart(0, 0, 1), LaneStart(over=True)])
    assert book.ask(0, 1, 0) == [Reply(0, 1)]
    assert book.ask(0, 1, 0, []) == [Reply(0, 1, (REST,))]
    assert book.ask(0, 2, 0, []) == [Reply(0, 2, over=True, last=True)]


def test_a_new_epoch_s_state_is_its_beginning() -> None:
    """Nothing was leased: nothing comes back."""
    assert Ledger(PLAN).state([0, 0]) == LedgerState(0, [], [], [])
    assert Ledger(PLAN, 2, [(REST,)]).state([1, 1]) == LedgerState(2, [(REST,)], [], [])


# ------------------------------------------------------------------------------------------ the part of a state


def leases_of(saved: Any, plan: list[Lease] = PLAN, names: str = "abcd") -> EpochLeases:
    return EpochLeases(list(names), plan, [EpochStart(), EpochStart()], saved, key=5, ordered=True)


def whole() -> dict[str, Any]:
    leases = leases_of(None)
    leases.book.ask(0, 0, 0)
    return leases.state([None, None], [0, 0])


def test_part_of_a_state() -> None:
    """It is plain, and another epoch's leases begin with it."""
    state = whole()
    assert state == {"key": 5, "plan": state["plan"], "done": 1, "back": [[[0, 0, None, False]]], "returned": []}
    book = leases_of(state).book
    assert given(book.ask(0, 0, 0)) == [(0, 0)]
    assert given(book.ask(1, 0, 0)) == [(1, 1)]


def test_states_of_other_shards() -> None:
    """Other names, another order, or other pieces: it is not the same epoch."""
    state = whole()
    leases_of(state)
    for plan, names in ((PLAN, "abce"), (PLAN[::-1], "abcd"), (PLAN[:3], "abcd"), ([*PLAN, (REST,)], "abcd")):
        with pytest.raises(StateError, match="was saved of other shards"):
            leases_of(state, plan, names)


@pytest.mark.parametrize(
    "change",
    [
        {"done": -1},
        {"done": 5},
        {"done": "1"},
        {"done": None},
        {"done": True},
        {"back": None},
        {"back": 5},
        {"back": [[[0, 0, None, False, 1]]]},
        {"back": [[[4, 0, None, False]]]},
        {"back": [[[0, -1, None, False]]]},
        {"back": [[[0, 0, "1", False]]]},
        {"back": [[[0, 0, None, 0]]]},
        {"back": [[5]]},
        {"back": "abc"},
        {"returned": None},
        {"returned": [5]},
        {"returned": [[[0, 0, 0]]]},
        {"returned": [[[0, 0], [[0, 0, None, False]]]]},
        {"returned": [[[0, 0, 2], [[0, 0, None, False]]]]},
        {"returned": [[[0, -1, 0], [[0, 0, None, False]]]]},
        {"returned": [["abc", [[0, 0, None, False]]]]},
        {"returned": [[[0, "1", 0], [[0, 0, None, False]]], [[0, 1, 0], [[0, 0, None, False]]]]},
        {"returned": [[[0, 0, 1], [[4, 0, None, False]]]]},
    ],
)
def test_broken_parts(change: dict[str, Any]) -> None:
    """Whatever it holds, the outcome is a StateError."""
    with pytest.raises(StateError, match=r"the state is broken|was saved of other shards"):
        leases_of(whole() | change)
    for name in ("plan", "done", "back", "returned"):
        part = whole()
        del part[name]
        with pytest.raises(StateError, match="lacks something"):
            leases_of(part)
    for key in (None, -1, True, "5", 1 << 63):
        with pytest.raises(StateError, match="the key is"):
            saved_key(whole() | {"key": key})
    nonsense: Any
    with pytest.raises(StateError, match="lacks something"):
        leases_of({})
    for nonsense in (5, [], "plan", {}):
        with pytest.raises(StateError, match="lacks something"):
            saved_key(nonsense)


def test_workers_that_have_read_without_a_part_of_a_state() -> None:
    """A state that says where the lanes are, and not what is left of the shards, is broken."""
    unplanned: dict[str, Any] = {"key": 5, "plan": None, "done": 0, "back": []}
    leases_of(unplanned)
    for saved in (None, unplanned):
        with pytest.raises(StateError, match="nothing says which are left"):
            EpochLeases(list("abcd"), PLAN, [EpochStart(skip=1), EpochStart()], saved, key=5, ordered=True)


LANE: dict[str, Any] = {
    "batch": 0, "taken": 1, "asked": None, "dry": False, "over": False, "todo": [[0, 5, None, False]],
    "carry": [], "blocks": {"number": 0, "aim": 2, "given": 1, "size": 2, "block": [[0, 0, 5, False]], "filling": []},
}  # fmt: skip


def lane_begins(lane: Any) -> EpochLeases:
    start = EpochStart(cursor=Cursor(1, 1, False, None, lane))
    return EpochLeases(list("abcd"), PLAN, [start, EpochStart()], whole(), key=5, ordered=True)


@pytest.mark.parametrize("lane", [5, "lane", [], {}])
def test_what_is_no_state_of_a_lane(lane: Any) -> None:
    """A cursor whose iterator is something else is a StateError, before a worker sees it."""
    with pytest.raises(StateError, match="the state is broken: a worker's place among the shards"):
        lane_begins(lane)


@pytest.mark.parametrize("field", LANE)
def test_broken_lanes(field: str) -> None:
    """A field that is missing, or not what it should be, is named."""
    lane_begins(LANE)
    with pytest.raises(StateError, match=f"lacks '{field}'"):
        lane_begins({name: value for name, value in LANE.items() if name != field})
    right = {("asked", None), ("blocks", None), ("dry", True), ("over", True)}
    value: Any
    for value in ("x", -2, 1.5, True, [5], [[9, 0, None, False]], [[0]], {}, None):
        if isinstance(value, bool | None) and (field, value) in right:
            lane_begins(LANE | {field: value})
            continue
        with pytest.raises(StateError, match="the state is broken"):
            lane_begins(LANE | {field: value})


@pytest.mark.parametrize("field", LANE["blocks"])
def test_broken_blocks(field: str) -> None:
    """So are those of the shuffle buffer; and one that gave out more than it held is none."""
    for value in ("x", -2, True, [[9, 0, None, False]], None):
        with pytest.raises(StateError, match="the state is broken"):
            lane_begins(LANE | {"blocks": LANE["blocks"] | {field: value}})
    with pytest.raises(StateError, match="3 of a block of 2 samples"):
        lane_begins(LANE | {"blocks": LANE["blocks"] | {"given": 3}})


def test_states_of_another_shuffle_buffer() -> None:
    """A lane's block is of use to a buffer of the same size only."""
    with pytest.raises(StateError, match="shuffled differently"):
        EpochLeases(list("abcd"), PLAN, [EpochStart(), EpochStart()], whole(), key=5, ordered=True, shuffle=8)
