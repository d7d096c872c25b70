"""The node's end of a lane, on real sockets."""

from __future__ import annotations

import asyncio
import socket

from asyncloader.service import frames
from asyncloader.service.handshake import read_record
from asyncloader.service.host_process import Death
from asyncloader.service.link import Link, Message
from asyncloader.service.node_lanes import ForwardedLane
from asyncloader.service.session import Session
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import channel_pair


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
