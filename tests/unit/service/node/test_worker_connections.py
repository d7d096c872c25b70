"""The node's end of a worker connection, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Self

import pytest

from asyncloader.service.node.sessions import MemoryQuota
from asyncloader.service.node.worker_connections import _MOST_QUEUED, RelayedConnection
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link, Message
from asyncloader.service.protocol.records import DeathReport, read_record
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.channel import Channel, channel_pair
from asyncloader.workers.ipc.layout import slot_count
from asyncloader.workers.ipc.ring import WorkerRing
from tests.helpers.running import PATIENCE_S

MOST = 8 << 20


async def test_a_loader_gets_no_more_memory_than_its_share() -> None:
    """The loader's other connections count; the refusal is a death it is blamed for, so it does not retry forever."""
    quota = MemoryQuota("one", most_bytes=1 << 21)
    theirs, ours = socket.socketpair()
    loader, (node_end, process_end) = Link(theirs), channel_pair()
    ended = asyncio.Event()
    connection = RelayedConnection(Link(ours), node_end, 4, quota, ended.set, lambda: None)
    quota.hold(1 << 21)
    try:
        loader.send(wire.TASK, b"index", epoch=0, task=0)
        loader.send(wire.TASK, b"index", epoch=0, task=1)  # later tasks are ignored
        said: list[Message] = []
        while not said:
            await asyncio.sleep(0)
            said += loader.receive()
        death: DeathReport = read_record(DeathReport, said[0].body)
        assert said[0].header.kind == frames.DIED
        assert death.blamed
        assert "the most for one loader" in death.reason
        loader.close()
        await ended.wait()
        quota.hold(-(1 << 21))
        quota.hold(1 << 21)  # the connection itself holds no memory any more
    finally:
        connection.close()
        loader.close()
        process_end.close()


class Played:
    """A connection whose loader and process are played by the test. For use in `async with`."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.quota = MemoryQuota("one", most_bytes)

    async def __aenter__(self) -> Self:
        theirs, ours = socket.socketpair()
        self.loader, (node_end, process_end) = Link(theirs), channel_pair()
        self.process = Channel(process_end)
        self.connection = RelayedConnection(Link(ours), node_end, 4, self.quota, lambda: None, lambda: None)
        self.memory = bytearray(MOST)
        self.loader.place = lambda header: memoryview(self.memory)[: header.payload]
        self.loader.most_payload = len(self.memory)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.connection.close()
        self.loader.close()
        self.process.close()

    async def frames_at_process(self, number: int) -> list[tuple[int, bytes]]:
        """The next frames that the process gets."""
        got: list[tuple[int, bytes]] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(got) < number:
                await asyncio.sleep(0)
                self.loader.flush()
                got += self.process.receive()
        return got

    async def messages_at_loader(self, number: int) -> list[Message]:
        """The next messages that the loader gets."""
        got: list[Message] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(got) < number:
                await asyncio.sleep(0)
                assert not self.loader.ended
                got += self.loader.receive()
        return got


async def test_the_end_of_a_stream_that_comes_late() -> None:
    """The message voids the tasks of its epoch, and not those of the next, which the loader has begun since."""
    async with Played() as played:
        played.loader.send(wire.TASK, b"index", epoch=0, task=5)
        (_, ring_body), _ = await played.frames_at_process(2)
        ring = WorkerRing(played.process.take_fd(), *wire.unpack_ring(ring_body)[1:])
        played.loader.send(wire.RESET, wire.pack_reset(wire.RESET, 1)[wire.PREFIX_BYTES :])
        played.loader.send(wire.TASK, b"index", epoch=1, task=0)
        _, (_, task) = await played.frames_at_process(2)
        played.process.send(wire.pack_answer(wire.EXHAUSTED, 0, 5, 0.0))
        await played.messages_at_loader(1)
        played.loader.send(wire.TASK, b"index", epoch=1, task=1)
        ((_, following),) = await played.frames_at_process(1)
        slots = [wire.unpack_task(body)[2] for body in (task, following)]
        assert len(set(slots)) == 2  # the slot of the first task was not given to the second
        start = ring.offset(slots[0], 3)
        ring.memory[start : start + 3] = b"abc"
        played.process.send(wire.pack_result(wire.Result(1, 0, slots[0], 3, 0, 1, 0.0, same=False), b"template"))
        ((header, _),) = await played.messages_at_loader(1)
        assert (header.epoch, header.task, bytes(played.memory[: header.payload])) == (1, 0, b"abc")


async def test_tasks_behind_the_end_of_a_stream() -> None:
    """The tasks are not answered, so a node that is asked to stop does not wait for them."""
    async with Played() as played:
        played.loader.send(wire.TASK, b"index", epoch=0, task=0)
        await played.frames_at_process(2)
        played.process.send(wire.pack_answer(wire.EXHAUSTED, 0, 0, 0.0))
        await played.messages_at_loader(1)
        played.loader.send(wire.TASK, b"index", epoch=0, task=1)  # the loader did not know of the end
        played.loader.send(frames.PING)
        ((header, _),) = await played.messages_at_loader(1)
        assert header.kind == frames.PONG  # so the task was read, too
        async with asyncio.timeout(10):
            await played.connection.drain()


GIVEN = slot_count(4)
"""The number of tasks that the process may have."""


def answered(epoch: int, task: int) -> bytes:
    """An answer of the process without a batch."""
    return wire.pack_answer(wire.ERROR, epoch, task, 0.0)


async def test_answered_tasks_make_room() -> None:
    """The slots and the bytes of the tasks' indices are free again, however many tasks an epoch has."""
    ring: WorkerRing | None = None
    async with Played() as played:
        for task in range(3 * GIVEN):
            played.loader.send(wire.TASK, bytes(_MOST_QUEUED // GIVEN), epoch=0, task=task)
            *before, (_, body) = await played.frames_at_process(1 if task else 2)
            if before:
                ring = WorkerRing(played.process.take_fd(), *wire.unpack_ring(before[0][1])[1:])
            assert ring is not None
            slot = wire.unpack_task(body)[2]
            start = ring.offset(slot, 3)
            ring.memory[start : start + 3] = b"abc"
            played.process.send(wire.pack_result(wire.Result(0, task, slot, 3, 0, 1, 0.0, same=False), b"template"))
            ((header, _),) = await played.messages_at_loader(1)
            assert (header.task, bytes(played.memory[: header.payload])) == (task, b"abc")
            assert slot >= 0
        assert played.quota.ring_bytes
        played.connection.close()
        assert not played.quota.ring_bytes


async def test_waiting_tasks_do_not_follow_the_end_of_their_epoch() -> None:
    """The process would carry them out in the next epoch."""
    async with Played() as played:
        for task in range(GIVEN + 2):
            played.loader.send(wire.TASK, b"index", epoch=0, task=task)
        played.loader.send(wire.RESET, wire.pack_reset(wire.RESET, 1)[wire.PREFIX_BYTES :])
        played.loader.send(wire.TASK, b"index", epoch=1, task=0)
        got = await played.frames_at_process(1 + GIVEN + 1)
        os.close(played.process.take_fd())
        assert [kind for kind, _ in got] == [wire.RING, *[wire.TASK] * GIVEN, wire.RESET]
        played.process.send(answered(0, 0))
        await played.messages_at_loader(1)
        played.process.send(wire.pack_reset(wire.RESET_DONE, 1))
        ((_, following),) = await played.frames_at_process(1)
        assert wire.unpack_task(following)[:2] == (1, 0)


async def test_batches_before_a_death() -> None:
    """Batches are sent before the report of the death: otherwise they would be made a second time."""
    async with Played() as played:
        for task in range(2):
            played.loader.send(wire.TASK, b"index", epoch=0, task=task)
        frames_before = await played.frames_at_process(3)
        os.close(played.process.take_fd())
        for _, body in frames_before[1:]:
            oneoff(played, body, 3)
        played.process.close()
        played.connection.died(DeathReport(1, -9, "killed", "", blamed=True, shared=False))
        got = await played.messages_at_loader(3)
        assert [header.kind for header, _ in got] == [wire.RESULT, wire.RESULT, frames.DIED]


async def test_a_node_that_drains() -> None:
    """The node answers the tasks that the process has, begins no waiting task, and sends the last message whole."""
    async with Played() as played:
        for task in range(GIVEN + 2):
            played.loader.send(wire.TASK, b"index", epoch=0, task=task)
        _, (_, last), *others = await played.frames_at_process(1 + GIVEN)
        os.close(played.process.take_fd())
        draining = asyncio.create_task(played.connection.drain())
        for _, body in others:
            played.process.send(answered(*wire.unpack_task(body)[:2]))
        kinds = {header.kind for header, _ in await played.messages_at_loader(len(others))}
        assert kinds == {wire.ERROR}
        oneoff(played, last, MOST)  # more than the socket takes at a time
        got = await played.messages_at_loader(2)
        assert [header.kind for header, _ in got] == [wire.RESULT, frames.DRAINING]
        async with asyncio.timeout(PATIENCE_S):
            await draining


# ------------------------------------------------------------------------------------------------ memory held


def oneoff(played: Played, body: bytes, nbytes: int) -> None:
    """The process answers a task with a segment of its own."""
    epoch, task = wire.unpack_task(body)[:2]
    fd = segment.create(nbytes)
    try:
        result = wire.Result(epoch, task, wire.ONEOFF, nbytes, 0, 1, 0.0, same=False)
        played.process.send(wire.pack_result(result, b"template"), [fd])
    finally:
        os.close(fd)


async def test_batches_that_are_not_read() -> None:
    """Beyond its share no batch is made for a loader until it reads; then it gets all of them."""
    async with Played(most_bytes=MOST) as played:
        number, size, given, came, turn = 60, MOST // 16, 0, 0, 0
        for task in range(number):
            played.loader.send(wire.TASK, b"index", epoch=0, task=task)
        while came < number:
            await asyncio.sleep(0)
            turn += 1
            played.loader.flush()
            for kind, body in played.process.receive():
                if kind == wire.TASK:
                    given += 1
                    oneoff(played, body, size)
            played.process.flush()
            if turn == 500:
                assert given <= MOST // size + 2 * slot_count(4)
                assert played.quota.unsent_bytes <= MOST + slot_count(4) * size + (1 << 20)
            if turn > 500:
                came += len(list(played.loader.receive()))
        assert given == number
        assert not played.quota.unsent_bytes


async def test_one_batch_that_is_larger_than_a_loaders_share() -> None:
    """The batch is refused, with a death that the loader is blamed for."""
    async with Played(most_bytes=MOST) as played:
        played.loader.send(wire.TASK, b"index", epoch=0, task=0)
        _, (_, body) = await played.frames_at_process(2)
        oneoff(played, body, MOST + 1)
        ((header, said),) = await played.messages_at_loader(1)
        assert header.kind == frames.DIED
        assert "the most for one loader" in read_record(DeathReport, said).reason


async def test_a_flood_of_pings() -> None:
    """The node stops reading the link while PONGs are not read."""
    async with Played() as played:
        node = played.connection
        while node._reads:
            for _ in range(100):
                played.loader.send(frames.PING)
            while not played.loader.flush() and node._reads:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert node._link.unsent.memory <= 2 * _MOST_QUEUED
        while not node._reads:  # once they are read, the link is read, too
            await asyncio.sleep(0)
            list(played.loader.receive())


@pytest.mark.parametrize("kind", [wire.RESET, wire.TASK])
async def test_a_flood_for_a_process_that_takes_nothing(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed, and its memory is bounded until then."""
    monkeypatch.setattr("asyncloader.service.node.worker_connections._MOST_WAITING", most := 32 << 20)
    async with Played() as played:
        body, task = bytes(1 << 20), 0
        if kind == wire.RESET:
            body = wire.pack_reset(kind, 1, body)[wire.PREFIX_BYTES :]
        node = played.connection
        while not played.loader.ended:
            with contextlib.suppress(ConnectionError):
                played.loader.send(kind, body, epoch=1, task=task)
            task += 1
            await asyncio.sleep(0)
            list(played.loader.receive())
            waiting = sum(len(index) for _, _, index in node._waiting)
            assert node._channel.unsent.memory + waiting <= most + (16 << 20)


@pytest.mark.parametrize("reason", ["", "no descriptors"])
async def test_a_connection_that_ends_while_its_process_lives(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is notified, whether the process reports a reason or not."""
    monkeypatch.setattr("asyncloader.service.node.worker_connections._SILENT_S", 0.0 if not reason else 100.0)
    async with Played() as played:
        played.process.close()
        if reason:
            played.connection.died(DeathReport(1, None, reason, "", blamed=False, shared=False))
        ((header, said),) = await played.messages_at_loader(1)
        death: DeathReport = read_record(DeathReport, said)
        assert (header.kind, death.blamed) == (frames.DIED, False)
        assert (reason or "its process lives on") in death.reason
