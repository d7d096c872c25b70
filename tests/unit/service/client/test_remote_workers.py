"""The loader's handling of descriptors that a node passes, and its report of a worker that it had to kill."""

from __future__ import annotations

import gc
import os
import select
import socket
import ssl
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncloader.service.client.remote_workers import RemoteWorker, ServiceWorkers
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.frames import HEADER_BYTES, pack_header
from asyncloader.workers.ipc import wire
from tests.helpers.running import PATIENCE_S
from tests.service.certificates import make_authority


def a_pipe() -> int:
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


PASSED: dict[str, Callable[[], int]] = {
    "a pipe": a_pipe,
    "zeros": lambda: os.open("/dev/zero", os.O_RDWR),
    "a socket that is connected to nothing": lambda: socket.socket(socket.AF_UNIX).detach(),
    "a socket of datagrams": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
    "a socket of another family": lambda: socket.socket(socket.AF_INET).detach(),
}


@pytest.mark.network
@pytest.mark.parametrize("passed", PASSED.values(), ids=PASSED)
def test_a_descriptor_that_is_no_connection(passed: Callable[[], int]) -> None:
    """The descriptor is closed, and is an error when the worker is opened, not when the first task is sent."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours)
        link.fds.append(passed())
        with pytest.raises(OSError):
            RemoteWorker(0, 99, "unix:/node", link, lambda worker, why: None)
        link.close()


@pytest.mark.network
def test_a_worker_that_the_loader_kills() -> None:
    """The worker's death names its node, also if the node never reports the death."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours)
        worker: Any = RemoteWorker(0, 99, "tcp://node:1", link, lambda worker, why: None)
        worker.kill_for("It hung.")
        assert worker.kill_reason == "It was at tcp://node:1. It hung."
        worker.release()


@pytest.mark.network
def test_a_report_that_cannot_be_read() -> None:
    """The connection counts as lost, with the bytes as the reason."""
    ended: list[str] = []
    (ours, theirs), (channel, process) = socket.socketpair(), socket.socketpair()
    with theirs, process:
        link = Link(ours)
        link.fds.append(channel.detach())
        worker = RemoteWorker(0, 99, "unix:/node", link, lambda worker, why: ended.append(why))
        theirs.sendall(b"HTTP".ljust(HEADER_BYTES))
        text = str(worker.death())
        assert worker.lost
        assert "b'HTTP" in text
        assert "b'HTTP" in ended[0]
        worker.release()


@pytest.mark.network
@pytest.mark.parametrize(
    "end",
    [RemoteWorker.request_stop, RemoteWorker.kill, lambda worker: object.__new__(ServiceWorkers).hang_up([worker])],
    ids=["request_stop", "kill", "hang_up"],
)
def test_a_worker_that_is_ended_over_tls(end: Callable[[Any], None], tmp_path: Path) -> None:
    """Answers that have come are still decrypted, and nothing is sent unencrypted."""
    files = make_authority(tmp_path)
    node_side, loader_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    node_side.num_tickets = 0  # so that the first bytes after the handshake are those of the message
    node_side.load_cert_chain(files["node_cert"], files["node_key"])
    loader_side.load_verify_locations(files["ca"])
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        ours = socket.create_connection(server.getsockname())
        accepted = threads.submit(node_side.wrap_socket, server.accept()[0], server_side=True)
        link = Link(loader_side.wrap_socket(ours, server_hostname="localhost"))
    worker = RemoteWorker(0, 99, "tcp://node:1", link, lambda worker, why: None)
    with accepted.result() as node:
        node.sendall(pack_header(wire.COUNTS, 4) + b"body")
        assert select.select([link], [], [], PATIENCE_S)[0]
        end(worker)
        assert list(worker.channel.receive()) == [(wire.COUNTS, b"body")]
        assert worker.channel.why == "the node closed the connection"
    worker.release()


@pytest.mark.network
@pytest.mark.parametrize("direct", [False, True])
def test_a_released_worker_is_freed_at_once(direct: bool) -> None:
    """It refers to the loader's service, which keeps the nodes of an engine."""
    (ours, theirs), (channel, process) = socket.socketpair(), socket.socketpair()
    gc.disable()
    try:
        with theirs, process, channel:
            link = Link(ours)
            if direct:
                link.fds.append(os.dup(channel.fileno()))
            worker = RemoteWorker(0, 99, "unix:/node", link, lambda worker, why: None)
            worker.release()
            left = [weakref.ref(worker), weakref.ref(worker.channel)]
            del worker, link
            assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
