from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.base.events import Cursor, PackedCursor
from asyncloader.epoch.resume_points import ResumePoints
from asyncloader.workers.fetch.dataset_state import pickle_cursor
from asyncloader.workers.fetch.setup import EpochStart

BEGIN = EpochStart(shared_seed=9, epoch=4, epoch_set=True)


def cursor(batches: int, problem: str = "") -> Cursor:
    return Cursor(batches, 3 * batches, False, None, {"at": batches}, problem)


def resume_points(*starts: EpochStart, iterable: bool = True, replays: bool = False) -> ResumePoints:
    return ResumePoints(starts or (BEGIN,), iterable=iterable, replays=replays)


def answer(where: ResumePoints, *cursors: PackedCursor | None, worker: int = 0) -> None:
    for each in cursors:
        where.answered(worker, each)


# ------------------------------------------------------------------------------------- streams with a state


def test_a_worker_that_answered_nothing_begins_again() -> None:
    """No batch was delivered: the replacement begins as the worker before did, stateful or not."""
    began = BEGIN._replace(cursor=cursor(7), skip=2)
    for start in (BEGIN, began):
        where = resume_points(start)
        assert where.obstacle(0) == ""
        assert where.start(0) == start


def test_a_resumed_stream_counts_from_where_it_was_resumed() -> None:
    """The cursor and the skipped batches of the loaded state count, too."""
    where = resume_points(BEGIN._replace(cursor=cursor(10), skip=3))
    answer(where, None, None)
    assert where.obstacle(0) == ""
    assert where.start(0) == BEGIN._replace(cursor=cursor(10), skip=5)
    answer(where, pickle_cursor(cursor(16)), None)
    assert where.start(0) == BEGIN._replace(cursor=cursor(16), skip=1)


# ---------------------------------------------------------------------------------- streams without a state


def test_a_stream_without_a_state_is_an_obstacle() -> None:
    """The stream cannot be read on: the text names the missing methods and the two ways out."""
    where = resume_points()
    answer(where, None)
    text = where.obstacle(0)
    for words in (
        "not replaced",
        "state_dict and load_state_dict",
        "asyncloader.Stateful",
        "Recovery(allow_replay=True)",
    ):
        assert words in text


def test_a_state_that_could_not_be_taken_is_an_obstacle() -> None:
    """The text has the error of `state_dict()`."""
    where = resume_points()
    answer(where, pickle_cursor(cursor(1, "TypeError: cannot pickle 'generator' object")))
    text = where.obstacle(0)
    assert "state_dict() TypeError: cannot pickle 'generator' object" in text
    assert "Recovery(allow_replay=True)" in text


def test_replay_in_a_resumed_epoch_skips_what_was_delivered_before_too() -> None:
    """The stream is read from its beginning, so the batches of the run before count, too."""
    where = resume_points(BEGIN._replace(skip=8), replays=True)
    answer(where, None, None)
    assert where.start(0) == BEGIN._replace(skip=10)


def test_replay_ignores_a_state_that_could_not_be_taken() -> None:
    """The state is treated as missing, even after an earlier state that could be taken."""
    where = resume_points(BEGIN._replace(cursor=cursor(4), skip=1), replays=True)
    answer(where, pickle_cursor(cursor(6, "ValueError: no")))
    assert where.obstacle(0) == ""
    assert where.start(0) == BEGIN._replace(cursor=None, skip=6)


# ------------------------------------------------------------------------------------------ batches that raised


def test_a_stream_of_which_only_errors_came() -> None:
    """Without a state such a stream cannot be read on. With states it can, from the state that it began with.

    If that is not known, because a state of its own is sent with the first batch, it is read from its beginning.
    """
    where = resume_points()
    where.failed(0)
    assert "state_dict and load_state_dict" in where.obstacle(0)
    where = resume_points(replays=True)
    where.failed(0)
    assert where.start(0) == BEGIN._replace(skip=1)
    where = resume_points()
    where.began(0, [pickle_cursor(cursor(0))])
    where.failed(0)
    assert where.obstacle(0) == ""
    assert where.start(0) == BEGIN._replace(cursor=cursor(0), skip=1)
    where = ResumePoints([BEGIN], iterable=True, replays=False, stateful=True)
    where.failed(0)
    assert where.obstacle(0) == ""
    assert where.start(0) == BEGIN._replace(skip=1)
    answer(where, None)
    assert where.obstacle(0)


def test_a_worker_begins_the_copies_that_it_has() -> None:
    """A service's worker may send another number of cursors, which is refused before any is taken."""
    where = resume_points()
    for cursors in ([], [None, pickle_cursor(cursor(0))]):
        with pytest.raises(ValueError, match=f"{len(cursors)} cursors of 1 copies from worker 0"):
            where.began(0, cursors)
    assert where.start(0) == BEGIN
    assert where.began(0, [None]) == []


def test_errors_of_assigned_shards_are_no_batches() -> None:
    """Errors since the last batch are passed over when they are repeated; earlier errors are part of its cursor."""
    where = ResumePoints([BEGIN], iterable=True, replays=False, assigns=True)
    answer(where, pickle_cursor(cursor(1)))
    where.failed(0)
    where.failed(0)
    assert where.start(0) == BEGIN._replace(cursor=cursor(1), errors=2)
    answer(where, None)
    assert where.start(0) == BEGIN._replace(cursor=cursor(1), skip=1)


@given(
    every=st.integers(0, 4),
    began=st.integers(0, 5),
    skip=st.integers(0, 3),
    steps=st.lists(st.sampled_from(["batch", "batch", "error", "death"]), max_size=30),
)
def test_replacements_of_replacements_miss_and_repeat_nothing(
    every: int, began: int, skip: int, steps: list[str]
) -> None:
    """Several replacements, one after the other, give each batch and each error once, whenever cursors are taken."""
    start = BEGIN._replace(cursor=cursor(began) if began else None, skip=skip)
    where = resume_points(start, replays=True)
    position = expected = began + skip  # in the stream, counted in answers
    for step in steps:
        if step == "death":
            again = where.start(0)
            position = (0 if again.cursor is None else again.cursor.batches) + again.skip
        assert position == expected
        if step == "error":
            position += 1
            where.failed(0)
        elif step == "batch":
            position += 1
            where.answered(0, pickle_cursor(cursor(position)) if every and not position % every else None)
        expected = position


# -------------------------------------------------------------------------------------------- map datasets


def test_a_map_dataset_begins_anywhere() -> None:
    """The tasks of a map dataset name the samples: there is no obstacle, and nothing is skipped."""
    where = resume_points(iterable=False)
    answer(where, None, None)
    assert where.obstacle(0) == ""
    assert where.start(0) == BEGIN


def test_a_map_datasets_state_goes_with_it() -> None:
    """A stateful map dataset is restored to its last state; a state that could not be taken is left out."""
    where = resume_points(iterable=False)
    answer(where, pickle_cursor(cursor(1)), pickle_cursor(cursor(2)), None)
    assert where.start(0) == BEGIN._replace(cursor=cursor(2))
    answer(where, pickle_cursor(cursor(4, "ValueError: no")))
    assert where.obstacle(0) == ""
    assert where.start(0) == BEGIN


@pytest.mark.parametrize("iterable", [False, True])
def test_starts_are_not_changed(iterable: bool) -> None:
    """`start` changes nothing: a second call gives the same result."""
    random = Random(3)
    where = resume_points(BEGIN, BEGIN, iterable=iterable, replays=True)
    for _ in range(9):
        answer(where, random.choice([None, pickle_cursor(cursor(2))]), worker=random.randrange(2))
    first: list[Any] = [where.start(0), where.start(1)]
    assert [where.start(0), where.start(1)] == first
