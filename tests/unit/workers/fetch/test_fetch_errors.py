"""Samples of map datasets that raise: batches without them, with substitutes, or with a function's results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncloader.workers.fetch.sample_errors import ErrorPolicy, NoSamples, SkippedSample
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
    reader,
)


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
