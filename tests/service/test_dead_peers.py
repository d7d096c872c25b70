"""A node ends the connection of a loader whose machine has died, and keeps that of a loader that does not read."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncloader.service.protocol import dead_peers
from asyncloader.service.protocol.dead_peers import end_when_dead, is_dead
from tests.helpers.running import run_async
from tests.service.namespace import namespace, namespaces_work

PEER = """
import signal, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    signal.pause()
"""


def info(probes: int = 0, unacked: int = 0, data: int = 0, acknowledged: int = 0) -> bytes:
    head = struct.pack("=8B6I", 1, 0, 0, probes, 0, 0, 0, 0, 0, 0, 0, 0, unacked, 0)
    return head + struct.pack("=7I", 0, 0, 0, data, 0, 0, acknowledged)


def test_who_is_dead() -> None:
    """A peer is dead if its kernel has acknowledged nothing for a long time, although bytes were sent."""
    assert is_dead(info(unacked=3, data=12_000, acknowledged=20_000))
    assert is_dead(info(probes=3, data=20_000, acknowledged=20_000))
    alive = [
        info(data=90_000, acknowledged=90_000),  # nothing was sent
        info(probes=1, data=90_000, acknowledged=90_000),  # a probe of a window that has been closed for long
        info(unacked=3, data=100, acknowledged=20_000),  # sent just now
        info(unacked=3, data=90_000, acknowledged=30_000),  # repeated, and refused each time
        info(unacked=3, data=12_000, acknowledged=13_000),
        info(probes=3, unacked=3, data=12_000, acknowledged=30_000)[:40],  # the shorter structure of another kernel
    ]
    assert not any(map(is_dead, alive))


def quickly(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Check connections five times a second, with short limits. Returns a list of the observed times."""
    seen: list[tuple[int, ...]] = []

    def noting(info: bytes) -> bool:
        seen.append(dead_peers._INFO.unpack_from(info))
        return is_dead(info)

    for name, value in {"_EVERY_S": 0.2, "_SILENT_MS": 700, "_UNANSWERED_MS": 100, "is_dead": noting}.items():
        monkeypatch.setattr(dead_peers, name, value)
    return seen


async def watched(host: str, command: Sequence[str], met: Callable[[socket.socket], Any]) -> None:
    """Let a peer that reads nothing connect, and watch the connection to it."""
    loop = asyncio.get_running_loop()
    with socket.create_server((host, 0)) as server:
        port = str(server.getsockname()[1])
        line = [*command, sys.executable, "-c", PEER, host, port]
        with subprocess.Popen(line) as peer:  # noqa: ASYNC220 - nothing else runs in this loop
            try:
                server.setblocking(False)
                sock, _ = await loop.sock_accept(server)
                with sock:
                    end_when_dead(sock)
                    await met(sock)
            finally:
                peer.kill()


def fill(sock: socket.socket) -> None:
    try:
        while True:
            sock.send(bytes(1 << 16))
    except BlockingIOError:
        pass


@pytest.mark.thorough
@pytest.mark.skipif(not namespaces_work(), reason="this process may not make networks")
@pytest.mark.parametrize("closed_window", [False, True])
def test_a_machine_that_has_gone(closed_window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends within a bounded time, whether data or probes of a closed window are not acknowledged."""
    quickly(monkeypatch)
    with namespace() as far:

        async def met(sock: socket.socket) -> None:
            if closed_window:
                fill(sock)
            far.cut("to_node")
            if not closed_window:
                sock.send(b"a batch")
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""

        run_async(watched(f"{far.address[:-1]}1", far.within, met))


@pytest.mark.thorough
def test_a_loader_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's kernel answers probes: the connection stays, however long ago the last answer was."""
    seen = quickly(monkeypatch)

    async def met(sock: socket.socket) -> None:
        fill(sock)
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(sock, 1))
        while not any(silent > dead_peers._SILENT_MS for *_, silent in seen):
            assert not (await asyncio.wait([reading], timeout=0.2))[0]
        reading.cancel()

    run_async(watched("127.0.0.1", (), met))
