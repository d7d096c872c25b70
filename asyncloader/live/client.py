"""Reads the snapshots of loaders in other processes, from their sockets.

Data path: live_server -> [client] -> terminal view, page.

Both ends check that the other is this user's. A snapshot has a bounded size, and is checked to be one of this version.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from asyncloader.base.socket_folder import folder, sockets
from asyncloader.errors import LoaderError
from asyncloader.live.snapshot import VERSION
from asyncloader.service.protocol.sockets import check_peer

_MOST_LINE = 1 << 22
_CONNECT_S = 5.0


class NotWatched(LoaderError):
    """No loader can be watched at this place."""


class LoaderSocket:
    """A connection to a loader.

    Args:
        path: its socket.

    Raises:
        NotWatched: no process listens there, or it is another user's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[str, Any] | None = None
        """The newest snapshot."""
        self.ended = False
        """Whether the loader was closed, or its process has ended."""
        self._received = bytearray()
        self._sock = _connect(path)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def receive(self) -> None:
        """Read once, when there is something to read.

        Raises:
            NotWatched: these are no snapshots that this version understands.
        """
        try:
            data = self._sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.ended = not data
        self._received += data
        *lines, rest = self._received.split(b"\n")
        if len(rest) > _MOST_LINE:
            raise NotWatched(f"{self.path} sends a line of more than {_MOST_LINE >> 20} MiB: it is no loader's socket")
        self._received = bytearray(rest)
        if lines:
            self.latest = _checked(bytes(lines[-1]), self.path)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._sock.close()


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect(str(path))
        check_peer(sock)
    except OSError as error:
        sock.close()
        if isinstance(error, ConnectionRefusedError) and path.parent == folder() and not _runs(path):
            path.unlink(missing_ok=True)  # its process was killed
        raise NotWatched(f"{path} cannot be read: {error.strerror or error}") from error
    return sock


def _runs(path: Path) -> bool:
    """Whether the process of a socket runs: it may be about to listen."""
    number = path.name.partition("-")[0]
    try:
        os.kill(int(number), 0)
    except (ValueError, OverflowError, OSError):  # PermissionError: another user's process has the number now
        return False
    return True


def _checked(line: bytes, path: Path) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and found.get("version") == VERSION:
            return found
    raise NotWatched(f"{path} sends other snapshots than this version of asyncloader reads: use its own version")


def open_sockets(path: Path | None) -> list[LoaderSocket]:
    """Connect to a loader; None: to all loaders of this user, the newest first.

    Raises:
        NotWatched: no loader of this user can be watched.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise NotWatched("Python has no Unix sockets on this system: see the page of loader.dashboard() instead")
    if path is not None:
        return [LoaderSocket(path)]
    found = []
    for each in sockets():
        with suppress(NotWatched):
            found.append(LoaderSocket(each))
    if not found:
        raise NotWatched(
            f"no loader can be watched: {folder()} has no socket of a running loader. Start the program with "
            "ASYNCLOADER_TOP=1 in its environment, or call loader.dashboard() in it"
        )
    return found


def receive_all(opened: Sequence[LoaderSocket], seconds: float) -> None:
    """Receive from each of these, until all have a newer snapshot or have ended; for `seconds` at most.

    Raises:
        NotWatched: as `LoaderSocket.receive`.
    """
    deadline = monotonic() + seconds
    before = {each: each.latest for each in opened}
    while left := [each for each in opened if not each.ended and each.latest is before[each]]:
        ready, _, _ = select.select(left, [], [], max(0.0, deadline - monotonic()))
        if not ready:
            return
        for each in ready:
            each.receive()


async def relay(path: Path) -> AsyncGenerator[bytes]:
    """Yield the lines of a loader's socket, for a page that another process serves. Ends with the loader.

    Raises:
        NotWatched: these are no snapshots that this version understands.
    """
    try:
        sock = _connect(path)
    except NotWatched:  # it has ended since the page was opened
        return
    sock.setblocking(False)
    # `limit` bounds the bytes of a line, and the loader does not wait for a slow reader: it leaves out lines.
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_MOST_LINE)
    try:
        while (line := await reader.readline()).endswith(b"\n"):
            _checked(line, path)
            yield line.rstrip()
    except (ConnectionError, ValueError):  # it has ended; or the line is too long
        return
    finally:
        writer.transport.abort()
