"""Handling of samples that raise: dropped, replaced, or refilled by others; and its records."""

from __future__ import annotations

import asyncio
import os
import pickle
from typing import Any

import pytest

from asyncloader.base.events import SkippedSample
from asyncloader.workers.fetch.sample import run_blocking
from asyncloader.workers.fetch.sample_errors import (
    ATTEMPTS,
    DROPPED,
    ErrorPolicy,
    NoSamples,
    SampleErrorHandler,
    dropped_count,
    substitute_index,
)
from tests.unit.workers.fetch.raising import (
    MODES,
    SEEDED,
    SKIP,
    AsyncGetitems,
    AsyncMap,
    AsyncOnlyGetitems,
    AsyncStream,
    Getitems,
    Map,
    OnlyGetitems,
    Stream,
    at,
    fetch,
    indices,
    places,
    raised,
    reader,
)


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


# -------------------------------------------------------------------------------------- by the fetchers of map datasets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Map, AsyncMap, Getitems, AsyncGetitems])
async def test_a_batch_comes_without_its_bad_samples(kind: Any, mode: str) -> None:
    """The rest is in order, with a record per bad sample in the batch's order; random numbers are unchanged."""
    batch = [0, 9, 4, 3, 7]
    bad: list[SkippedSample] = []
    found = await fetch(reader(kind(9, 3), SKIP, seeded=MODES[mode]), at(mode, 20, batch), bad)
    assert indices(found) == [0, 4, 7]
    seeded = mode == "seeded"
    assert places(bad) == [(9, 21 if seeded else None, "skipped"), (3, 23 if seeded else None, "skipped")]
    assert [record.worker for record in bad] == [2, 2]
    assert [record.error for record in bad] == ["ValueError: bad 9", "ValueError: bad 3"]
    if seeded:
        single = kind if kind in (Map, AsyncMap) else (AsyncMap if kind is AsyncGetitems else Map)
        whole = await fetch(reader(single(), seeded=SEEDED), (20, batch))
        assert found == [whole[0], whole[2], whole[4]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Map, AsyncMap])
async def test_a_batch_without_any_sample_left_is_none(kind: Any, mode: str) -> None:
    """All its samples are recorded; an empty batch from the sampler stays an empty batch."""
    one = reader(kind(1, 2), SKIP, seeded=MODES[mode])
    bad: list[SkippedSample] = []
    with pytest.raises(NoSamples):
        await fetch(one, at(mode, 0, [2, 1]), bad)
    assert [record.index for record in bad] == [2, 1]
    assert await fetch(one, at(mode, 0, []), bad) == []
    alone = reader(kind(1), SKIP, seeded=MODES[mode], batch_size=None)
    with pytest.raises(NoSamples):
        await fetch(alone, at(mode, 0, 1), bad)
    assert bad[2].index == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [OnlyGetitems, AsyncOnlyGetitems])
async def test_without_getitem_the_batch_fails(kind: Any, mode: str) -> None:
    """The sample that raised cannot be found; the error of `Dataset.__getitem__` does not take the place of its own."""
    bad: list[SkippedSample] = []
    with pytest.raises(OSError, match="no batch"):
        await fetch(reader(kind(), SKIP, seeded=MODES[mode]), at(mode, 0, [2, 1]), bad)
    assert not bad


async def test_a_cancelled_fetch_is_not_skipped() -> None:
    """A cancellation comes from the loader, and is no sample's error."""
    began = asyncio.Event()

    class Waiting(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            began.set()
            await asyncio.get_running_loop().create_future()

    bad: list[SkippedSample] = []
    task = asyncio.ensure_future(reader(Waiting(), SKIP).fetch_async([1, 2], bad))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bad == []


# -------------------------------------------------------------------------------------- substitutes and functions


async def test_an_async_function_is_awaited() -> None:
    """`on_error` is awaited for map datasets and for streams."""

    async def ask(index: Any, error: Exception) -> Any:
        await asyncio.sleep(0)
        return str(error), 0

    assert indices(await reader(AsyncMap(2), ErrorPolicy(ask)).fetch_async([1, 2])) == [1, "bad 2"]
    assert indices(await reader(AsyncStream(4, 2), ErrorPolicy(ask)).fetch_async(None)) == [0, 1, "bad 2", 3]
    for dataset in (Map(), Stream(3)):
        with pytest.raises(TypeError, match="on_error gives a coroutine"):
            reader(dataset, ErrorPolicy(ask))


@pytest.mark.parametrize("kind", [Map, AsyncMap, Getitems, AsyncGetitems, Stream, AsyncStream])
async def test_what_a_function_raises_fails_the_batch(kind: Any) -> None:
    """The error's cause is the sample's exception, with a note on the sample; earlier replacements are recorded."""

    def ask(index: Any, error: Exception) -> Any:
        if "3" in str(error):
            raise LookupError("enough")
        return None, None

    stream = issubclass(kind, Stream)
    one = reader(kind(4, 1, 3) if stream else kind(1, 3), ErrorPolicy(ask))
    bad: list[SkippedSample] = []
    with pytest.raises(LookupError, match="enough") as caught:
        await fetch(one, [0, 1, 2, 3], bad)
    assert isinstance(caught.value.__cause__, ValueError)
    where = (
        "reading sample number 3 of worker 2's stream" if stream else "fetching sample index 3 (item 3 of the batch)"
    )
    assert caught.value.__notes__ == [f"while {where}"]
    # A concurrent sample that was not ready yet is cancelled, as in a batch without a policy.
    assert [record.action for record in bad] == ([] if one.asynchronous and not stream else ["replaced"])
