"""The node that an engine's agent starts: `python -m asyncloader.service.placement.agent_node DESCRIPTOR`.

The descriptor is a socket to the agent. The agent is trusted: its messages are unpickled. The node ends when the socket
is closed, so also when the agent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import sys
from collections.abc import Sequence
from functools import partial

from asyncloader.service.node.admission import Served
from asyncloader.service.node.node_log import set_up_log
from asyncloader.service.node.server import DRAIN_S, Node
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.placement.agent import DRAIN, DRAINED, LOAD, LOOK, READY, SERVE, SERVING, AgentSetup
from asyncloader.service.placement.scaling import Load
from asyncloader.service.protocol.sockets import host_and_port, server_tls
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.worker import serve_async


def _main(argv: Sequence[str]) -> None:
    set_up_log(logging.WARNING)
    channel = Channel(socket.socket(fileno=int(argv[0])))
    setup: AgentSetup | None = None
    while setup is None and not channel.ended:
        for _, body in channel.receive(wait=True):
            setup = pickle.loads(body)
    if setup is not None:
        serve_async(partial(_serve, setup, channel))


async def _serve(setup: AgentSetup, channel: Channel) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    draining: list[asyncio.Task[None]] = []
    token, ca, cert, key = setup.credentials
    node = Node([], setup.workers, token, None if cert is None else server_tls(cert, key, ca))

    async def drain() -> None:
        await node.drain(DRAIN_S)
        with contextlib.suppress(ConnectionError):
            channel.send_all(wire.pack(DRAINED))

    def readable() -> None:
        for kind, _ in channel.receive():
            if kind == SERVE:
                with os.fdopen(channel.take_fd(), "rb") as file:
                    # The agent's descriptor shares its position, which is behind the bytes that it wrote.
                    file.seek(0)
                    definition = PickledDefinition(file.read())
                # Open: the node may end its processes when no loader reads it and another dataset needs the room.
                node.serve(Served(definition.name, definition, open=True))
                # Does not wait for the agent, nor do the answers below: it reads each answer before its next request.
                channel.send_all(wire.pack(SERVING))
            elif kind == LOOK:
                figures = node.figures()
                load = Load(figures["busy_seconds"], figures["tasks"], setup.workers)
                channel.send_all(wire.pack(LOAD, pickle.dumps(load)))
            elif kind == DRAIN:  # in a task: draining takes seconds, and this is a callback of the loop
                draining.append(loop.create_task(drain()))
        if channel.ended:
            loop.remove_reader(channel.fileno())
            ended.set()

    try:
        addresses = [await node.listen(f"tcp://{host_and_port(setup.host, 0)}")]
        # A loader on this machine may use the Unix socket. Its name is abstract, so no file is left behind, and random,
        # so two nodes never share it.
        if sys.platform == "linux":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = f"asyncloader-{secrets.token_hex(8)}"
            sock.bind(f"\0{name}")
            sock.listen(1024)
            node.listen_at(sock)
            addresses.append(f"unix:@{name}")
        loop.add_reader(channel.fileno(), readable)
        with contextlib.suppress(ConnectionError):
            channel.send_all(wire.pack(READY, pickle.dumps(tuple(addresses))))
            await ended.wait()
    finally:
        # The agent has gone: the node ends now, whether it has drained or not.
        for task in draining:
            task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)
        await node.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
