"""The node's end of a lane, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Self

from asyncloader.service import frames
from asyncloader.service.host_process import Death
from asyncloader.service.link import Link, Message
from asyncloader.service.node_lanes import ForwardedLane
from asyncloader.service.records import read_record
from asyncloader.service.session import Session
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel, channel_pair
from asyncloader.workers.memory.ring import WorkerRing


async def test_a_loader_gets_no_more_memory_than_its_share() -> None:
    """Its other lanes count; it is told why, as of a death of its own, so it does not try for ever."""
    session = Session("one", most_bytes=1 << 21)
    theirs, ours = socket.socketpair()
    loader, (node_end, process_end) = Link(theirs), channel_pair()
    ended = asyncio.Event()
    lane = ForwardedLane(Link(ours), node_end, 4, session, ended.set, lambda: None)
    session.hold(1 << 21)
    try:
        loader.send(wire.TASK, b"index", epoch=0, task=0)
        loader.send(wire.TASK, b"index", epoch=0, task=1)  # what comes after it is of no use
        said: list[Message] = []
        while not said:
            await asyncio.sleep(0)
            said += loader.receive()
        death: Death = read_record(Death, said[0].body)
        assert said[0].header.kind == frames.DIED
        assert death.blamed
        assert "the most for one loader" in death.reason
        loader.close()
        await ended.wait()
        session.hold(-(1 << 21))
        session.hold(1 << 21)  # the lane itself holds nothing any more
    finally:
        lane.close()
        loader.close()
        process_end.close()


class Played:
    """A lane whose loader and process are played by the test. For use in `async with`."""

    async def __aenter__(self) -> Self:
        theirs, ours = socket.socketpair()
        self.loader, (node_end, process_end) = Link(theirs), channel_pair()
        self.process = Channel(process_end)
        self.lane = ForwardedLane(Link(ours), node_end, 4, Session("one", None), lambda: None, lambda: None)
        self.memory = bytearray(1 << 20)
        self.loader.place = lambda header: memoryview(self.memory)[: header.payload]
        self.loader.most_payload = len(self.memory)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.lane.close()
        self.loader.close()
        self.process.close()

    async def frames_at_process(self, number: int) -> list[tuple[int, bytes]]:
        """So many of the next frames that the process gets."""
        got: list[tuple[int, bytes]] = []
        while len(got) < number:
            await asyncio.sleep(0)
            got += self.process.receive()
        return got

    async def messages_at_loader(self, number: int) -> list[Message]:
        """So many of the next messages that the loader gets."""
        got: list[Message] = []
        while len(got) < number:
            await asyncio.sleep(0)
            got += self.loader.receive()
        return got


async def test_the_end_of_a_stream_that_comes_late() -> None:
    """Voids the tasks of its epoch, and not those of the next one, which the loader has begun meanwhile."""
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
        assert len(set(slots)) == 2  # the slot of the first one was not given to the second
        start = ring.offset(slots[0], 3)
        ring.memory[start : start + 3] = b"abc"
        played.process.send(wire.pack_result(wire.Result(1, 0, slots[0], 3, 0, 1, 0.0, same=False), b"template"))
        ((header, _),) = await played.messages_at_loader(1)
        assert (header.epoch, header.task, bytes(played.memory[: header.payload])) == (1, 0, b"abc")


async def test_tasks_behind_the_end_of_a_stream() -> None:
    """Are answered by nobody, so a node that is asked to end does not wait for them."""
    async with Played() as played:
        played.loader.send(wire.TASK, b"index", epoch=0, task=0)
        await played.frames_at_process(2)
        played.process.send(wire.pack_answer(wire.EXHAUSTED, 0, 0, 0.0))
        await played.messages_at_loader(1)
        played.loader.send(wire.TASK, b"index", epoch=0, task=1)  # it did not know
        played.loader.send(frames.PING)
        ((header, _),) = await played.messages_at_loader(1)
        assert header.kind == frames.PONG  # so the task was read, too
        async with asyncio.timeout(10):
            await played.lane.drain()
