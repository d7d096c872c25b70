"""The node's end of a worker connection that shares its epochs, whose loader does not follow the protocol."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from asyncloader.service.node.epoch_cache import EpochCache
from asyncloader.service.node.memory_quota import MemoryQuota
from asyncloader.service.node.shared_epoch_connection import SharedEpochConnection
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.handshake import Opening
from asyncloader.workers.fetch.setup import SeededSetup, WorkerSetup
from asyncloader.workers.ipc.channel import channel_pair

SETUP = WorkerSetup(
    *(None, False, True, 4, list, False, 0, None, 2, 1, (), 0),
    seeded=SeededSetup(0, 1, 0, seed_collate=False),
)


async def test_a_start_that_cannot_be_read() -> None:
    """The event loop knows neither socket: both are closed, and the next connection's sockets get their numbers."""
    loop = asyncio.get_running_loop()
    theirs, ours = socket.socketpair()
    node_end, process_end = channel_pair()
    with theirs, node_end, process_end, closing(Link(ours)) as link:
        opening = Opening("one", 0, 4, share=True, setup=SETUP, start=b"\xc1", catalog=None)
        with pytest.raises(ValueError, match="an epoch's start that cannot be read"):
            SharedEpochConnection(
                link, node_end, opening, MemoryQuota("one", None), lambda: None, lambda: None, EpochCache(0), "dataset"
            )
        assert not loop.remove_reader(ours.fileno())
        assert not loop.remove_reader(node_end.fileno())
