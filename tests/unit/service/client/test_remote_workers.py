"""The loader's handling of descriptors that a node passes, and its report of a worker that it had to kill."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from asyncloader.service.client.remote_workers import RemoteWorker
from asyncloader.service.protocol.connection import Link


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
