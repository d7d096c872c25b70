"""Handling of samples that raise: dropped, replaced, or refilled by others; and its records."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest

from asyncloader.workers.fetch.sample import run_blocking
from asyncloader.workers.fetch.sample_errors import (
    ATTEMPTS,
    DROPPED,
    ErrorPolicy,
    SampleErrorHandler,
    SkippedSample,
    dropped_count,
    substitute_index,
)
from tests.unit.workers.fetch.raising import raised


def handler(policy: ErrorPolicy, *, asynchronous: bool = False) -> SampleErrorHandler:
    return SampleErrorHandler(policy, 3, 2, asynchronous=asynchronous)


class Hidden:
    """Returns a coroutine, but does not look like a coroutine function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, index: Any, error: Exception) -> Any:
        return self.function(index, error)


REFILL = ErrorPolicy("skip", refill=True, length=50, seed=9)


class Nasty(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


# ------------------------------------------------------------------------------------------------- records


def test_a_record_says_what_where_and_why() -> None:
    """The record has everything needed to find the sample; it pickles."""
    bad: list[SkippedSample] = []
    assert run_blocking(handler(ErrorPolicy()).handle("a.jpg", None, raised(ValueError("bad jpeg")), bad)) is DROPPED
    (record,) = bad
    assert record[:5] == ("a.jpg", None, 3, os.getpid(), "ValueError: bad jpeg")
    assert (record.action, record.substitute) == ("skipped", None)
    assert record.traceback.startswith("Traceback (most recent call last):")
    assert "in raised" in record.traceback
    assert record.traceback.endswith("ValueError: bad jpeg\n")
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(), "ValueError"),
        (Nasty(), "Nasty: <its text raised RuntimeError>"),
        (KeyError("x" * 5000), "KeyError: '" + "x" * 989),
    ],
    ids=["no text", "no __str__", "long"],
)
def test_texts_are_bounded_and_always_there(error: Exception, text: str) -> None:
    """The exception has no text, raises when asked for it, or has a text that is far too long."""
    bad: list[SkippedSample] = []
    run_blocking(handler(ErrorPolicy()).handle(0, None, raised(error), bad))
    assert bad[0].error == text
    assert 0 < len(bad[0].traceback) <= 16_000


# ----------------------------------------------------------------------------------------------- functions


def test_a_function_gives_the_substitute() -> None:
    """The function gets the index and the exception; None and any other result may be a sample."""
    error = raised(ValueError("bad"))
    seen: list[Any] = []

    def ask(index: Any, error: Exception) -> Any:
        seen.append((index, error))

    bad: list[SkippedSample] = []
    assert run_blocking(handler(ErrorPolicy(ask)).handle(7, 5, error, bad)) is None
    assert seen == [(7, error)]
    assert (bad[0].index, bad[0].position, bad[0].action) == (7, 5, "replaced")


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_a_function_raises_is_raised(asynchronous: bool) -> None:
    """The error's cause is the sample's exception, unless it is that or has a cause. Nothing is recorded."""
    error = raised(ValueError("bad"))

    async def lose(ask: Any) -> Exception:
        bad: list[SkippedSample] = []
        one = handler(ErrorPolicy(ask), asynchronous=asynchronous)
        with pytest.raises(Exception) as caught:
            await one.handle(7, None, error, bad)
        assert bad == []
        assert isinstance(caught.value, Exception)
        return caught.value

    def same(index: Any, error: Exception) -> Any:
        raise error

    def another(index: Any, error: Exception) -> Any:
        raise LookupError(index)

    def caused(index: Any, error: Exception) -> Any:
        raise LookupError(index) from OSError("mine")

    assert await lose(same) is error
    assert error.__cause__ is None
    found = await lose(another)
    assert isinstance(found, LookupError)
    assert found.__cause__ is error
    assert isinstance((await lose(caused)).__cause__, OSError)


def test_a_coroutine_function_needs_an_async_dataset() -> None:
    """The error is raised at once if possible, else at the first sample; no coroutine is left unawaited."""

    async def ask(index: Any, error: Exception) -> Any:
        return index

    with pytest.raises(TypeError, match="on_error gives a coroutine, but the dataset is not asynchronous"):
        handler(ErrorPolicy(ask))
    bad: list[SkippedSample] = []
    hidden = handler(ErrorPolicy(Hidden(ask)))
    with pytest.raises(TypeError, match="on_error gives a coroutine"):
        run_blocking(hidden.handle(1, None, raised(ValueError("bad")), bad))
    assert bad == []


# -------------------------------------------------------------------------------------------------- refill


def test_substitutes_do_not_change_between_versions() -> None:
    """Runs that are to be repeated depend on them."""
    assert [substitute_index(1, 2, 3, attempt, 1000) for attempt in range(4)] == [234, 388, 915, 276]


def make(good: set[int], made: list[int]) -> Any:
    def one(index: int) -> Any:
        made.append(index)
        if index not in good:
            raise OSError(f"bad {index}")
        return -index

    return one


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_substitutes_are_tried_in_their_order(asynchronous: bool) -> None:
    """The first substitute that can be made is used. Failed substitutes before it have records of their own."""
    order = [substitute_index(9, 2, 40, attempt, 50) for attempt in range(ATTEMPTS)]
    made: list[int] = []
    one = make({order[2]}, made)
    bad: list[SkippedSample] = []
    error = raised(ValueError("bad"))
    if asynchronous:

        async def later(index: int) -> Any:
            return one(index)

        sample = await handler(REFILL, asynchronous=True).handle(7, 40, error, bad, later)
    else:
        sample = run_blocking(handler(REFILL).handle(7, 40, error, bad, one))
    assert sample == -order[2]
    assert made == order[:3]
    assert [(r.index, r.position, r.action, r.substitute) for r in bad] == [
        (7, 40, "refilled", order[2]),
        (order[0], 40, "skipped", None),
        (order[1], 40, "skipped", None),
    ]
    assert [r.error for r in bad] == ["ValueError: bad", f"OSError: bad {order[0]}", f"OSError: bad {order[1]}"]


def test_places_are_counted_and_not_records() -> None:
    """A position whose substitutes failed, too, counts once; a refilled position does not count, whatever failed."""
    bad: list[SkippedSample] = []
    one = handler(REFILL)
    run_blocking(one.handle(7, 40, raised(ValueError("bad")), bad, make(set(), [])))
    good = substitute_index(9, 2, 41, 1, 50)
    run_blocking(one.handle(8, 41, raised(ValueError("bad")), bad, make({good}, [])))
    run_blocking(one.handle(9, 42, raised(ValueError("bad")), bad))
    assert len(bad) == 17 + 2 + 1
    assert dropped_count(bad) == 2
    bad = []
    for index in (1, 2, 2):
        run_blocking(handler(ErrorPolicy()).handle(index, None, raised(ValueError("bad")), bad))
    assert dropped_count(bad) == 3
    run_blocking(handler(ErrorPolicy(lambda index, error: 0)).handle(3, None, raised(ValueError("bad")), bad))
    assert dropped_count(bad) == 3


def test_after_16_substitutes_the_sample_is_skipped() -> None:
    """A dataset all of whose samples raise does not occupy the worker for long."""
    made: list[int] = []
    bad: list[SkippedSample] = []
    assert run_blocking(handler(REFILL).handle(7, 40, raised(ValueError("bad")), bad, make(set(), made))) is DROPPED
    assert len(made) == ATTEMPTS == 16
    assert [record.action for record in bad] == ["skipped"] * 17
    assert [record.index for record in bad] == [7, *made]


@pytest.mark.parametrize(
    ("policy", "position"),
    [(REFILL._replace(refill=False), 1), (REFILL._replace(length=0), 1), (REFILL, None)],
    ids=["short", "empty", "no position"],
)
def test_nothing_is_substituted_where_it_cannot_be(policy: ErrorPolicy, position: int | None) -> None:
    """No substitute is made if it is not asked for, or without a length or a position."""
    made: list[int] = []
    assert (
        run_blocking(handler(policy).handle(7, position, raised(ValueError("bad")), [], make(set(range(50)), made)))
        is DROPPED
    )
    assert made == []
