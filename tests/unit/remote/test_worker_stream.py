"""One worker stream: its requests and their times, bad samples, cancellation, and its states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from asyncloader.errors import ShardError
from asyncloader.formats import Located, OnBad, ShardFormat
from asyncloader.remote.assignment import AssignmentLog, ShardAssigner, StreamStart
from asyncloader.remote.catalog import Shard
from asyncloader.remote.dataset import RemoteIterableDataset
from asyncloader.remote.prefetch import AnyRange
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.worker_stream import LocalAssignments, WorkerStream, merge_ranges
from asyncloader.transports import MemoryTransport, TransportClosed
from asyncloader.workers.fetch.assignment_client import AssignmentReply
from tests.unit.remote.shards import MAKERS

UNIT = 1 << 20  # bytes of a sample


class Store:
    """Shards of given sizes; sample `i` of shard `s` is ``{"n": 100 * s + i}``.

    Args:
        sizes: samples per shard.
        bad: numbers of samples that are skipped.
        broken: numbers of samples at which reading a shard fails.
        wait: reading waits for this before each sample.
    """

    def __init__(
        self, *sizes: int, bad: Sequence[int] = (), broken: Sequence[int] = (), wait: asyncio.Event | None = None
    ) -> None:
        self.sizes = sizes
        self.shards = [Shard(f"s{at}", ShardFormat("jsonl", None), size * UNIT) for at, size in enumerate(sizes)]
        self.plan = [(CatalogRange(shard),) for shard in range(len(sizes))]
        self._bad, self._broken, self._wait = bad, broken, wait

    async def open(self, shard: Shard, shard_range: AnyRange, on_bad: OnBad) -> AsyncGenerator[list[Located], None]:
        stop = self.sizes[shard_range.shard] if shard_range.stop is None else shard_range.stop // UNIT
        for place in range(shard_range.start // UNIT, stop):
            number = 100 * shard_range.shard + place
            if self._wait is not None:
                await self._wait.wait()
            if number in self._broken:
                raise ShardError("broken", url=shard.url, offset=place * UNIT)
            if number in self._bad:
                on_bad(ShardError("bad", url=shard.url, offset=place * UNIT, resume=(place + 1) * UNIT))
            else:
                yield [Located({"n": number}, (place + 1) * UNIT)]


class Assignments(LocalAssignments):
    """The assignments of a single worker. Records each request: number, batch, and samples that would be returned."""

    def __init__(self, store: Store, state: Any = None) -> None:
        start = StreamStart() if state is None else StreamStart(taken=state["taken"])
        done = 0 if state is None else state["taken"]
        super().__init__(ShardAssigner(AssignmentLog(store.plan, done), [start]), 3)
        self.asked: list[tuple[int, int, Any]] = []

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> AssignmentReply:
        self.asked.append((number, batch, left))
        return await super().ask(number, batch, left)


async def batches_of(stream: WorkerStream, size: int, most: int = 100) -> list[list[int]]:
    batches: list[list[int]] = []
    while len(batches) < most:
        stream.next_batch()
        try:
            batches.append([sample["n"] for sample in await stream.take(size)])
        except StopAsyncIteration:
            break
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


async def test_shards_one_after_the_other() -> None:
    """Batches are full across shard boundaries; the last batch is short, and then the stream ends."""
    store = Store(3, 0, 4)
    stream = WorkerStream(store.shards, store.open, Assignments(store), 0)
    assert await batches_of(stream, 2) == [[0, 1], [2, 200], [201, 202], [203]]
    assert await batches_of(stream, 2) == []
    await stream.aclose()


async def test_the_next_assignment_is_requested_before_the_end() -> None:
    """The request is made when 12 MiB of the current assignment are left; for a small assignment, at its beginning."""
    store = Store(20, 2, 2)
    assignments = Assignments(store)
    stream = WorkerStream(store.shards, store.open, assignments, 0)
    await batches_of(stream, 4)
    assert [(number, left) for number, _, left in assignments.asked] == [
        (0, None),
        (1, None),
        (2, None),
        (3, None),
        (3, []),
    ]
    assert next(batch for number, batch, _ in assignments.asked if number == 1) == 1  # 8 of 20 samples are taken
    await stream.aclose()


@pytest.mark.parametrize("shuffle", [0, 5])
async def test_bad_samples_are_raised_once_each(shuffle: int) -> None:
    """Bad samples are raised before the samples after them; samples already taken are in the next batch."""
    store = Store(6, 5, bad=(2, 3), broken=(103,))
    stream = WorkerStream(store.shards, store.open, Assignments(store), shuffle)
    got: list[int] = []
    offsets: list[int | None] = []
    while True:
        stream.next_batch()
        try:
            got += [sample["n"] for sample in await stream.take(4)]
        except ShardError as error:
            offsets.append(error.offset)
        except StopAsyncIteration:
            break
    assert sorted(got) == [0, 1, 4, 5, 100, 101, 102]
    assert offsets == [2 * UNIT, 3 * UNIT, 3 * UNIT]
    await stream.aclose()


@pytest.mark.parametrize("go_on", [True, False])
async def test_cancelled_as_samples_arrive(*, go_on: bool) -> None:
    """At whatever step `take` is cancelled, also when a shard that was opened early has just been read: no sample is
    lost, and `aclose` closes all shards, without the garbage collector.
    """
    store = Store(1, 5)
    reading: list[int] = []

    async def open_slowly(shard: Shard, shard_range: AnyRange, on_bad: OnBad) -> AsyncGenerator[list[Located], None]:
        reading.append(shard_range.shard)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            async for located in store.open(shard, shard_range, on_bad):
                yield located
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                reading.remove(shard_range.shard)

    for steps in range(40):
        stream = WorkerStream(store.shards, open_slowly, Assignments(store), 0)
        stream.next_batch()
        taking = asyncio.ensure_future(stream.take(2))
        for _ in range(steps):
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        if not taking.cancelled():
            assert steps > 10
            await stream.aclose()
            return
        if go_on:
            assert [sample["n"] for sample in await stream.take(9)] == [0, 100, 101, 102, 103, 104]
        await stream.aclose()
        assert not reading, steps
    pytest.fail("a batch is not made in 40 steps")


@pytest.mark.parametrize("ending", ["tar", "jsonl.gz", "parquet"])
async def test_cancelled_while_it_closes(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever step a reader is cancelled, and once more: its tasks have ended and its transports are closed."""
    names = [f"memory://shards/{number}.{ending}" for number in range(3)]
    shards = {f"{number}.{ending}": MAKERS[f"a.{ending}"](range(9)) for number in range(3)}
    opened: list[MemoryTransport] = []

    def open_transport(_: str) -> MemoryTransport:
        opened.append(MemoryTransport(shards))
        return opened[-1]

    async def consume() -> None:
        async with aclosing(aiter(RemoteIterableDataset(names))) as samples:
            for _ in range(12):
                await anext(samples)

    monkeypatch.setattr("asyncloader.remote.stores.open_transport", open_transport)
    for steps in range(100):
        task = asyncio.create_task(consume())
        for _ in range(steps):
            await asyncio.sleep(0)
        ended = task.done()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        assert len(asyncio.all_tasks()) == 1
        while opened:
            with pytest.raises(TransportClosed):
                await opened.pop().read(f"0.{ending}")
        if ended:
            return


@pytest.mark.parametrize("shuffle", [0, 1, 5])
@pytest.mark.parametrize("steps", range(1, 7))
async def test_states(shuffle: int, steps: int) -> None:
    """A state after any batch is plain; another stream resumes from it, and has the same state until it reads."""
    store = Store(7, 6, bad=(3,))

    async def rest(stream: WorkerStream) -> list[list[int]]:
        batches: list[list[int]] = []
        while True:
            stream.next_batch()
            got: list[int] = []
            try:
                while len(got) < 2:
                    try:
                        samples = await stream.take(2 - len(got))
                    except ShardError:
                        continue
                    got += [sample["n"] for sample in samples]
            except StopAsyncIteration:
                return [*batches, got] if got else batches
            batches.append(got)
            if len(batches) == limit:
                return batches

    limit = 0
    stream = WorkerStream(store.shards, store.open, Assignments(store), shuffle)
    whole = await rest(stream)
    await stream.aclose()
    limit = steps
    first = WorkerStream(store.shards, store.open, Assignments(store), shuffle)
    head = await rest(first)
    state = json.loads(json.dumps(first.state_dict()))
    await first.aclose()
    limit = 0
    second = WorkerStream(store.shards, store.open, Assignments(store, state), shuffle)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert head + await rest(second) == whole
    await second.aclose()


def test_merged_ranges() -> None:
    """Adjacent ranges are joined; ranges with a gap or of different shards are not."""
    shard_ranges = [CatalogRange(0, 0, 5), CatalogRange(0, 5, 9), CatalogRange(0, 10, 12), CatalogRange(1, 12, 13)]
    assert merge_ranges(shard_ranges) == [CatalogRange(0, 0, 9), CatalogRange(0, 10, 12), CatalogRange(1, 12, 13)]
    assert merge_ranges([]) == []
