from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any

import pytest

from asyncloader.formats.jsonl import JsonlEncoder
from asyncloader.formats.tfrecord import TFRecordEncoder
from asyncloader.loaders.writing import Samples, _IterableSource
from asyncloader.remote.shard_cutting import ShardCutter


def cutter(encoder: Any) -> ShardCutter:
    return ShardCutter(encoder, 1 << 30, None)


async def encode(samples: Samples, encoder: Any) -> bytes:
    source = _IterableSource(samples)
    try:
        first = await source.first()
        async with aclosing(source.batches(encoder, cutter(encoder))) as batches:
            found = b"".join([b"".join(each.data) async for each in batches])
        assert (first is None) == (not found)
        return found
    finally:
        await source.aclose()


async def slowly(samples: Any) -> AsyncGenerator[Any, None]:
    for sample in samples:
        await asyncio.sleep(0)
        yield sample


@pytest.mark.parametrize("kind", ["list", "generator", "async"])
@pytest.mark.parametrize("number", [0, 1, 3000])
async def test_all_samples_are_encoded_in_order(kind: str, number: int) -> None:
    """Also after the first was looked at."""
    samples = [{"a": each} for each in range(number)]
    given: Any = {"list": samples, "generator": (each for each in samples), "async": slowly(samples)}[kind]
    assert await encode(given, JsonlEncoder()) == b"".join(JsonlEncoder().encode(samples).data)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("wrap", [iter, slowly])
async def test_a_source_may_use_its_buffer_again(size: int, wrap: Any) -> None:
    """Each sample is encoded before the next is asked for."""

    def reusing() -> Generator[dict[str, Any], None, None]:
        sample: dict[str, Any] = {"record": bytearray(size)}
        for number in range(5):
            sample["record"][:] = bytes([number]) * size
            yield sample

    expected = TFRecordEncoder().encode([{"record": bytes([number]) * size} for number in range(5)])
    assert await encode(wrap(reusing()), TFRecordEncoder()) == b"".join(expected.data)


async def test_a_generator_lives_in_one_thread() -> None:
    """From its first line to its `finally`, and never in the loop's thread."""
    threads: list[int] = []

    def generator() -> Generator[dict[str, Any], None, None]:
        try:
            for _ in range(5000):
                threads.append(threading.get_ident())
                yield {}
        finally:
            threads.append(threading.get_ident())

    source = _IterableSource(generator())
    async with aclosing(source.batches(JsonlEncoder(), cutter(JsonlEncoder()))) as batches:
        async for _ in batches:
            break
    await source.aclose()
    assert len(set(threads)) == 1
    assert len(threads) < 2000, "it was closed early"
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("wrap", [iter, slowly])
async def test_an_error_of_the_source_is_raised(wrap: Any) -> None:
    """As it is."""

    def broken() -> Generator[dict[str, Any], None, None]:
        yield {}
        raise KeyError("the source's own")

    with pytest.raises(KeyError, match="the source's own"):
        await encode(wrap(broken()), JsonlEncoder())


async def test_cancelled_while_a_sample_is_awaited() -> None:
    """The asynchronous generator is closed."""
    waiting, closed = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {}
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    task = asyncio.create_task(encode(endless(), JsonlEncoder()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()
