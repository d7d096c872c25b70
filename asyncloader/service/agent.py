"""The node that an engine's agent starts on a machine: `python -m asyncloader.service.agent DESCRIPTOR`.

Data path: as of `node.py`.

The descriptor is a socket to the agent. The agent is trusted: what comes over this socket is unpickled. The node ends
with the socket, so with the agent, however that ended. `AgentNode` is the agent's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asyncloader.service.engine import Credentials
from asyncloader.service.node import Node
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.served_definitions import Served
from asyncloader.service.sockets import server_tls
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.worker import serve_async

__all__ = ["AgentNode", "AgentSetup"]

_SETUP, _READY, _SERVE, _SERVING = 1, 2, 3, 4


class AgentSetup(NamedTuple):
    """What a node is started with.

    Attributes:
        host: the address of its machine in the engine's network.
        workers: processes for each dataset.
        credentials: what loaders must have, and what it shows.
    """

    host: str
    workers: int
    credentials: Credentials


class AgentNode:
    """A node in a process of its own. All of this blocks.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, setup: AgentSetup) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.service.agent", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        self._channel.send_all(wire.pack(_SETUP, pickle.dumps(setup)))
        self.addresses: tuple[str, ...] = pickle.loads(self._answer(_READY))
        """Where it is: for all machines first, then for this one alone, if there is such an address."""

    def serve(self, data: bytes) -> None:
        """Have it serve this pickled definition. Returns once it does.

        Raises:
            OSError: the node has ended.
        """
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            self._channel.send_all(wire.pack(_SERVE), [file.fileno()])
        self._answer(_SERVING)

    def _answer(self, due: int) -> bytes:
        while not self._channel.ended:
            for kind, body in self._channel.receive(wait=True):
                assert kind == due
                return body
        raise ConnectionError(f"the node has ended (exit code {self.process.wait()}); its log says why")

    def close(self) -> None:
        """End it, and wait for that."""
        self._channel.close()
        self.process.wait()


def _main(argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    channel = Channel(socket.socket(fileno=int(argv[0])))
    setup: AgentSetup | None = None
    while setup is None and not channel.ended:
        for _, body in channel.receive(wait=True):
            setup = pickle.loads(body)
    if setup is not None:
        serve_async(partial(_serve, setup, channel))


async def _serve(setup: AgentSetup, channel: Channel) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    token, ca, cert, key = setup.credentials
    node = Node([], setup.workers, token, None if cert is None else server_tls(cert, key, ca))

    def readable() -> None:
        for _ in channel.receive():
            with os.fdopen(channel.take_fd(), "rb") as file:
                file.seek(0)
                definition = PickledDefinition(file.read())
            node.serve(Served(definition.name, definition, open=True))
            channel.send_all(wire.pack(_SERVING))
        if channel.ended:
            loop.remove_reader(channel.fileno())
            ended.set()

    try:
        host = f"[{setup.host}]" if ":" in setup.host else setup.host
        addresses = [await node.listen(f"tcp://{host}:0")]
        if sys.platform == "linux":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = f"asyncloader-{secrets.token_hex(8)}"
            sock.bind(f"\0{name}")
            sock.listen(1024)
            node.listen_at(sock)
            addresses.append(f"unix:@{name}")
        loop.add_reader(channel.fileno(), readable)
        with contextlib.suppress(ConnectionError):
            channel.send_all(wire.pack(_READY, pickle.dumps(tuple(addresses))))
            await ended.wait()
    finally:
        await node.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
