"""Runs a node in a separate process, for an engine, and gives it the definitions to serve.

The actor that an engine runs on a machine uses `AgentNode`. The node is this module as a program, `python -m
asyncloader.service.node.agent DESCRIPTOR`, where the descriptor is a connection to the agent. The agent is
trusted: its messages are unpickled. The node ends when the connection is closed, so also when the agent is killed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncloader.base.bridge import in_thread
from asyncloader.service.node.admission import Served
from asyncloader.service.node.node_log import set_up_log
from asyncloader.service.node.server import Node
from asyncloader.service.protocol.definition import PickledDefinition
from asyncloader.service.protocol.sockets import host_and_port, server_tls
from asyncloader.workers.worker import serve_async

_ANSWER_S = 30.0
"""Seconds that a node may take to answer."""
_START_S = 100.0  # it imports torch, perhaps from a file system that is slow at first


class AgentNode:
    """A node in a separate process. All methods block. Any thread may call them, and requests wait for each other;
    `close` waits for none, and is called last.

    A node that does not answer in time is killed, and its engine starts another.

    Args:
        host: the address of its machine in the engine's network.
        workers: processes for each dataset.
        credentials: the token, and the files of the authorities, the certificate and its key; see `Service`.

    Raises:
        OSError: the node cannot be started; and from each method, the node has ended.
    """

    def __init__(self, host: str, workers: int, credentials: tuple[str | None, ...]) -> None:
        self._connection, theirs = Pipe()
        # One request at a time: answers have no number, so the next answer must be that of this request.
        self._lock = threading.Lock()
        with theirs:  # the child has its own copy; with another copy open here, the end of the child would not be seen
            # The node unpickles objects of modules that this process finds, perhaps in its current folder.
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.service.node.agent", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        try:
            self.addresses: tuple[str, ...] = self._ask((host, workers, credentials), _START_S)
            """First the address for all machines, then, on Linux, one for this machine alone."""
        except BaseException:
            self.close()
            raise

    def serve(self, data: bytes) -> None:
        """Have the node serve this pickled definition, and wait until it does."""
        self._ask(data, _ANSWER_S)

    def check(self) -> None:
        """Check that the node answers."""
        self._ask(None, _ANSWER_S)

    def _ask(self, request: Any, seconds: float) -> Any:
        with self._lock:
            try:
                self._connection.send(request)
                if self._connection.poll(seconds):
                    return self._connection.recv()
            except (EOFError, OSError):
                raise ConnectionError(f"the node has ended (exit code {self._exit_code()}); its log says why") from None
            self.process.kill()  # a late answer would be taken for the answer to the next request
            self.process.wait()
            raise ConnectionError(f"the node did not answer for {seconds:.0f} seconds, and was ended")

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
        self._connection.close()  # the node ends with its connection
        self._exit_code()


# ---------------------------------------------------------------------------------------------------- the node


def _main(argv: Sequence[str]) -> None:
    set_up_log(logging.WARNING)
    connection: Connection[Any, Any] = Connection(int(argv[0]))
    try:
        setup = connection.recv()
    except (EOFError, OSError):
        return  # the agent has ended
    serve_async(partial(_serve, connection, *setup))


async def _serve(
    connection: Connection[Any, Any], host: str, workers: int, credentials: tuple[str | None, ...]
) -> None:
    token, ca, cert, key = credentials
    node = Node([], workers, token, None if cert is None else server_tls(cert, key, ca))
    try:
        addresses = [await node.listen(f"tcp://{host_and_port(host, 0)}")]
        # A loader on this machine may use the Unix socket. Its name is abstract, so no file is left behind, and random,
        # so two nodes never share it.
        if sys.platform == "linux":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = f"asyncloader-{secrets.token_hex(8)}"
            sock.bind(f"\0{name}")
            sock.listen(1024)
            node.listen_at(sock)
            addresses.append(f"unix:@{name}")
        answer: Any = tuple(addresses)
        while True:
            try:
                # In a thread: loaders are served while the agent sends a definition, which may be large.
                request: bytes | None = await in_thread(partial(_exchange, connection, answer))
            except (EOFError, OSError):
                return  # the agent has ended
            if request is not None:
                definition = PickledDefinition(request)
                # Open: the node may end its processes when no loader reads it and another dataset needs the room.
                node.serve(Served(definition.name, definition, open=True))
            answer = None
    finally:
        await node.close()


def _exchange(connection: Connection[Any, Any], answer: Any) -> Any:
    """Send an answer, and wait for the next request."""
    connection.send(answer)
    return connection.recv()


if __name__ == "__main__":
    _main(sys.argv[1:])
