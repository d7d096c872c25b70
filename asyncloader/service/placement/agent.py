"""Starts a node in a separate process, for an engine, and sends it the definitions to serve.

The actor that an engine runs on a machine uses this. `agent_node.py` is the program of the node.
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
"""Requests to the node and their answers, in pairs: an `AgentSetup`, and the node's addresses; the descriptor of a file
with a pickled definition, and nothing; nothing, and the node's `Load`; nothing, and nothing once it has drained."""


class AgentSetup(NamedTuple):
    """The options of a node.

    Attributes:
        host: the address of its machine in the engine's network.
        workers: processes for each dataset.
        credentials: the token and the certificates of the service.
    """

    host: str
    workers: int
    credentials: Credentials


_ANSWER_S = 30.0
"""Seconds that a node may take to answer, besides the time for draining."""
_START_S = 100.0  # it imports torch, perhaps from a file system that is slow at first


class AgentNode:
    """A node in a separate process. All methods block. Any thread may call them, and requests wait for each other;
    `close` waits for none, and is called last.

    A node that does not answer in time is killed, and its engine starts another.

    Raises:
        OSError: the node cannot be started; and from each method, the node has ended.
    """

    def __init__(self, setup: AgentSetup) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        # One request at a time: answers have no number, so the next answer must be that of this request.
        self._lock = threading.Lock()
        with theirs:  # the child has its own copy; with another copy open here, the end of the child would not be seen
            # The node unpickles objects of modules that this process finds, perhaps in its current folder.
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.service.placement.agent_node", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        try:
            self._channel.send_all(wire.pack(SETUP, pickle.dumps(setup)))
            self.addresses: tuple[str, ...] = pickle.loads(self._answer(READY, _START_S))
            """First the address for all machines, then, on Linux, one for this machine alone."""
        except BaseException:
            self.close()
            raise

    def serve(self, data: bytes) -> None:
        """Have the node serve this pickled definition, and wait until it does."""
        # In a file: a dataset may be larger than the largest frame.
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            self._ask(SERVE, SERVING, file.fileno())

    def load(self) -> Load:
        """Ask for the totals of the node's processes."""
        load: Load = pickle.loads(self._ask(LOOK, LOAD))
        return load

    def drain(self) -> None:
        """Have the node finish its tasks and send its loaders elsewhere. Waits for that, `DRAIN_S` at most."""
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
                self.process.kill()  # a late answer would be taken for the answer to the next request
                self.process.wait()
                raise ConnectionError(f"the node did not answer for {seconds:.0f} seconds, and was ended")
            for kind, body in self._channel.receive():
                assert kind == due
                return body
        raise ConnectionError(f"the node has ended (exit code {self._exit_code()}); its log says why")

    def _exit_code(self) -> int | None:
        """Wait for the end of a node whose connection is closed, and return its exit code."""
        # A closed connection is no proof of an end: a node that hangs while it ends is killed.
        try:
            return self.process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """End the node, and wait for its end."""
        self._channel.close()  # the node ends with its channel
        self._exit_code()
