"""One lane by itself: what it asks for and when, bad samples, cancellation, and the places that it saves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from asyncloader.errors import ShardError, StateError
from asyncloader.formats import Located, OnBad, ShardFormat
from asyncloader.remote.assignment import LaneStart, LeaseBook, Ledger
from asyncloader.remote.catalog import Piece, Shard
from asyncloader.remote.worker_stream import Lane, LocalLeases, merged
from asyncloader.workers.fetch.assignment_client import LeaseAnswer

UNIT = 1 << 20  # bytes of a sample


class Store:
    """Shards of so many samples; sample `i` of shard `s` is ``{"n": 100 * s + i}``.

    Args:
        sizes: samples of each shard.
        bad: numbers of samples that are stepped over.
        broken: numbers at which a shard cannot be read on.
        wait: reading waits for this before each sample.
    """

    def __init__(
        self, *sizes: int, bad: Sequence[int] = (), broken: Sequence[int] = (), wait: asyncio.Event | None = None
    ) -> None:
        self.sizes = sizes
        self.shards = [Shard(f"s{at}", ShardFormat("jsonl", None), size * UNIT) for at, size in enumerate(sizes)]
        self.plan = [(Piece(shard),) for shard in range(len(sizes))]
        self._bad, self._broken, self._wait = bad, broken, wait

    async def open(self, shard: Shard, piece: Piece, on_bad: OnBad) -> AsyncGenerator[list[Located], None]:
        stop = self.sizes[piece.shard] if piece.stop is None else piece.stop // UNIT
        for place in range(piece.start // UNIT, stop):
            number = 100 * piece.shard + place
            if self._wait is not None:
                await self._wait.wait()
            if number in self._broken:
                raise ShardError("broken", url=shard.url, offset=place * UNIT)
            if number in self._bad:
                on_bad(ShardError("bad", url=shard.url, offset=place * UNIT, resume=(place + 1) * UNIT))
            else:
                yield [Located({"n": number}, (place + 1) * UNIT)]


class Leases(LocalLeases):
    """Those of one lane, which notes what is asked: number, batch, and samples that would be given back."""

    def __init__(self, store: Store, state: Any = None) -> None:
        start = LaneStart() if state is None else LaneStart(taken=state["taken"])
        done = 0 if state is None else state["taken"]
        super().__init__(LeaseBook(Ledger(store.plan, done), [start]), 3)
        self.asked: list[tuple[int, int, Any]] = []

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> LeaseAnswer:
        self.asked.append((number, batch, left))
        return await super().ask(number, batch, left)


async def batches_of(lane: Lane, size: int, most: int = 100) -> list[list[int]]:
    batches: list[list[int]] = []
    while len(batches) < most:
        lane.next_batch()
        try:
            batches.append([sample["n"] for sample in await lane.take(size)])
        except StopAsyncIteration:
            break
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


async def test_shards_one_after_the_other() -> None:
    """In full batches over their borders; the last one is short, and then there is no more."""
    store = Store(3, 0, 4)
    lane = Lane(store.shards, store.open, Leases(store), 0)
    assert await batches_of(lane, 2) == [[0, 1], [2, 200], [201, 202], [203]]
    assert await batches_of(lane, 2) == []
    await lane.aclose()


async def test_the_next_lease_is_asked_for_before_the_end() -> None:
    """When 12 MiB are left of the present one; small ones at their beginning."""
    store = Store(20, 2, 2)
    leases = Leases(store)
    lane = Lane(store.shards, store.open, leases, 0)
    await batches_of(lane, 4)
    assert [(number, left) for number, _, left in leases.asked] == [(0, None), (1, None), (2, None), (3, None), (3, [])]
    assert next(batch for number, batch, _ in leases.asked if number == 1) == 1  # 8 of 20 samples are taken
    await lane.aclose()


@pytest.mark.parametrize("shuffle", [0, 5])
async def test_bad_samples_are_raised_once_each(shuffle: int) -> None:
    """Before what comes behind them; what was taken for the batch is in the next one."""
    store = Store(6, 5, bad=(2, 3), broken=(103,))
    lane = Lane(store.shards, store.open, Leases(store), shuffle)
    got: list[int] = []
    offsets: list[int | None] = []
    while True:
        lane.next_batch()
        try:
            got += [sample["n"] for sample in await lane.take(4)]
        except ShardError as error:
            offsets.append(error.offset)
        except StopAsyncIteration:
            break
    assert sorted(got) == [0, 1, 4, 5, 100, 101, 102]
    assert offsets == [2 * UNIT, 3 * UNIT, 3 * UNIT]
    await lane.aclose()


@pytest.mark.parametrize("shuffle", [0, 5])
async def test_cancelled_reading_loses_nothing(shuffle: int) -> None:
    """`take` is cancelled while it waits for a sample, again and again: each comes once."""
    gate = asyncio.Event()
    store = Store(5, 4, wait=gate)
    lane = Lane(store.shards, store.open, Leases(store), shuffle)
    got: list[int] = []
    ended, cancelled = False, 0
    while not ended:
        lane.next_batch()
        for ticks in range(7):
            gate.clear()
            if ticks == 6:
                gate.set()
            waiting = asyncio.ensure_future(lane.take(2))
            for _ in range(ticks):
                await asyncio.sleep(0)
            if ticks < 6:
                waiting.cancel()
            await asyncio.wait([waiting])
            if waiting.cancelled():
                cancelled += 1
                continue
            try:
                got += [sample["n"] for sample in waiting.result()]
            except StopAsyncIteration:
                ended = True
            break
    assert cancelled > 10
    assert sorted(got) == [0, 1, 2, 3, 4, 100, 101, 102, 103]
    await lane.aclose()


@pytest.mark.parametrize("shuffle", [0, 1, 5])
@pytest.mark.parametrize("steps", range(1, 7))
async def test_states(shuffle: int, steps: int) -> None:
    """After any batch: plain values, with which another lane goes on; and its state is the same until it does."""
    store = Store(7, 6, bad=(3,))

    async def rest(lane: Lane) -> list[list[int]]:
        batches: list[list[int]] = []
        while True:
            lane.next_batch()
            got: list[int] = []
            try:
                while len(got) < 2:
                    try:
                        samples = await lane.take(2 - len(got))
                    except ShardError:
                        continue
                    got += [sample["n"] for sample in samples]
            except StopAsyncIteration:
                return [*batches, got] if got else batches
            batches.append(got)
            if len(batches) == limit:
                return batches

    limit = 0
    lane = Lane(store.shards, store.open, Leases(store), shuffle)
    whole = await rest(lane)
    await lane.aclose()
    limit = steps
    first = Lane(store.shards, store.open, Leases(store), shuffle)
    head = await rest(first)
    state = json.loads(json.dumps(first.state_dict()))
    await first.aclose()
    limit = 0
    second = Lane(store.shards, store.open, Leases(store, state), shuffle)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert head + await rest(second) == whole
    await second.aclose()


async def test_shards_that_are_not_what_they_were() -> None:
    """The shuffle buffer is filled again from its places: if these hold less than then, it is a StateError."""
    store = Store(12)
    lane = Lane(store.shards, store.open, Leases(store), 8)
    await batches_of(lane, 2, most=3)
    state = lane.state_dict()
    await lane.aclose()
    other = Store(12, bad=(3,))
    again = Lane(other.shards, other.open, Leases(other, state), 8)
    again.load_state_dict(state)
    again.next_batch()
    with pytest.raises(StateError, match="the shards are not the same"):
        await again.take(2)
    await again.aclose()


def test_merged_pieces() -> None:
    """Neighbours become one; what has a gap, or is of another shard, does not."""
    pieces = [Piece(0, 0, 5), Piece(0, 5, 9), Piece(0, 10, 12), Piece(1, 12, 13)]
    assert merged(pieces) == [Piece(0, 0, 9), Piece(0, 10, 12), Piece(1, 12, 13)]
    assert merged([]) == []
