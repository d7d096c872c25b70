"""Starts a node in a process of its own, for an engine, and tells it what to serve.

Data path: none; before a node of a service is there.

The actor that an engine runs on a machine uses this. It imports little, to be there soon: `agent_node.py` is the node.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from asyncloader.service.engine import Credentials
from asyncloader.service.scaling import Load
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel

__all__ = ["DRAIN", "DRAINED", "LOAD", "LOOK", "READY", "SERVE", "SERVING", "AgentNode", "AgentSetup"]

SETUP, READY, SERVE, SERVING, LOOK, LOAD, DRAIN, DRAINED = range(1, 9)
"""Frames to the node, each with its answer: an `AgentSetup`, and where the node is; a pickled definition, in a file
whose descriptor comes along, and that it is served; a look, and its `Load`; that it should drain, and that it has."""


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
    """A node in a process of its own. All of this blocks, and is for one thread at a time.

    Raises:
        OSError: it cannot be started; and from each method, it has ended.
    """

    def __init__(self, setup: AgentSetup) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.service.agent_node", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        try:
            self._channel.send_all(wire.pack(SETUP, pickle.dumps(setup)))
            self.addresses: tuple[str, ...] = pickle.loads(self._answer(READY))
        except BaseException:
            self.close()
            raise
        """Where it is: for all machines first, then for this one alone, if there is such an address."""

    def serve(self, data: bytes) -> None:
        """Have it serve this pickled definition. Returns once it does."""
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            self._channel.send_all(wire.pack(SERVE), [file.fileno()])
        self._answer(SERVING)

    def load(self) -> Load:
        """What its processes have done so far."""
        self._channel.send_all(wire.pack(LOOK))
        load: Load = pickle.loads(self._answer(LOAD))
        return load

    def drain(self) -> None:
        """Have it finish what is in work, and send its loaders elsewhere. Returns once it has, some seconds at most."""
        self._channel.send_all(wire.pack(DRAIN))
        self._answer(DRAINED)

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
