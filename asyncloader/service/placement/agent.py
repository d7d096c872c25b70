"""Starts a node in a process of its own, for an engine, and tells it what to serve.

Data path: none; before a node of a service is there.

The actor that an engine runs on a machine uses this. It imports little, to be there soon: `agent_node.py` is the node.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from asyncloader.service.node.server import DRAIN_S
from asyncloader.service.placement.engine import Credentials
from asyncloader.service.placement.scaling import Load
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel

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


_ANSWER_S = 30.0
"""Seconds that a node may take to answer, besides those in which it drains."""
_START_S = 100.0  # it imports torch, perhaps from a file system that is slow at first


class AgentNode:
    """A node in a process of its own. All of this blocks; any thread may call it, and waits for the others.

    A node that does not answer in time is killed: it may have stopped for good, and its engine starts another one.

    Raises:
        OSError: it cannot be started; and from each method, it has ended.
    """

    def __init__(self, setup: AgentSetup) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._lock = threading.Lock()  # one question at a time
        with theirs:
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.service.placement.agent_node", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        try:
            self._channel.send_all(wire.pack(SETUP, pickle.dumps(setup)))
            self.addresses: tuple[str, ...] = pickle.loads(self._answer(READY, _START_S))
        except BaseException:
            self.close()
            raise
        """Where it is: for all machines first, then for this one alone, if there is such an address."""

    def serve(self, data: bytes) -> None:
        """Have it serve this pickled definition. Returns once it does."""
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            self._ask(SERVE, SERVING, file.fileno())

    def load(self) -> Load:
        """What its processes have done so far."""
        load: Load = pickle.loads(self._ask(LOOK, LOAD))
        return load

    def drain(self) -> None:
        """Have it finish what is in work, and send its loaders elsewhere. Returns once it has, some seconds at most."""
        self._ask(DRAIN, DRAINED, more=DRAIN_S)

    def _ask(self, question: int, due: int, fd: int = -1, more: float = 0.0) -> bytes:
        with self._lock:
            self._channel.send_all(wire.pack(question), () if fd < 0 else (fd,))
            return self._answer(due, _ANSWER_S + more)

    def _answer(self, due: int, seconds: float) -> bytes:
        deadline, poll = monotonic() + seconds, select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while not self._channel.ended:
            if not poll.poll(1000 * max(0.0, deadline - monotonic())):
                self.process.kill()  # a late answer would be taken for that of the next question
                self.process.wait()
                raise ConnectionError(f"the node did not answer for {seconds:.0f} seconds, and was ended")
            for kind, body in self._channel.receive():
                assert kind == due
                return body
        raise ConnectionError(f"the node has ended (exit code {self._exit_code()}); its log says why")

    def _exit_code(self) -> int | None:
        """Of a node that has closed its end. One that lives on regardless is killed."""
        try:
            return self.process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """End it, and wait for that."""
        self._channel.close()
        self._exit_code()
