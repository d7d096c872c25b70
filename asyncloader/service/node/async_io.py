"""Awaits a loader's connection during its handshake: TLS, a message, room to send, and a process's answer.

Data path: connection -> [async_io] -> node.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link, Message

_SIGN_OF_LIFE_S = 5.0
_CLOSES_S = 3.0  # for a peer to close a connection that was refused
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_T = TypeVar("_T")


async def secure(sock: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    """Set keepalive, and carry out the TLS handshake if `tls` is given. Returns the socket to read from.

    Raises:
        ssl.SSLError: a side refuses the other's certificate, or the peer does not follow the protocol.
        OSError: the connection ended.
    """
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return sock
    # A loader whose machine has lost its power sends no end: without keepalive its connection would stay for ever.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if tls is None:
        return sock
    secured = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    # `wrap_socket` has detached `sock`: only `secured` can close the descriptor from here on.
    try:
        while (wants := _continue_handshake(secured)) is not None:
            await _ready(secured, read=wants)
    except ssl.SSLError:
        await _close_behind_alert(socket.socket(fileno=secured.detach()))
        raise
    except BaseException:
        secured.close()
        raise
    return secured


async def _close_behind_alert(sock: socket.socket) -> None:
    """Close a connection whose last bytes, already sent, are the reason of its end; wait until the peer has closed it.

    A socket that is closed while bytes are unread resets the connection, and the peer may lose the reason. In TLS 1.3
    it has sent its first message already when its certificate is refused.
    """
    with sock, contextlib.suppress(OSError, TimeoutError):
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_CLOSES_S):
            read = True
            while read:
                await _ready(sock, read=True)
                read = bool(sock.recv(1 << 16))


def _continue_handshake(secured: ssl.SSLSocket) -> bool | None:
    """Go on with the TLS handshake. Returns whether it waits to read (or else to write); None: it is over."""
    try:
        secured.do_handshake()
    except ssl.SSLWantReadError:
        return True
    except ssl.SSLWantWriteError:
        return False
    return None


async def wait_for(answer: Coroutine[Any, Any, _T], link: Link) -> _T:
    """Wait for a process's answer, and send the loader a PONG every few seconds."""
    task = asyncio.get_running_loop().create_task(answer)
    try:
        # Without messages the loader would take the node for dead, and a loader that hung up would not be noticed.
        while not (await asyncio.wait([task], timeout=_SIGN_OF_LIFE_S))[0]:
            link.send(frames.PONG)
        return task.result()
    finally:
        # Awaited after it is cancelled, so that it is no longer running when the caller closes the connection.
        task.cancel()
        await asyncio.wait([task])


async def message_of(link: Link, *kinds: int) -> Message:
    """Wait for a message of one of these kinds.

    Raises:
        ValueError: a message of another kind came.
        ConnectionError: the connection ended.
    """
    while True:
        for message in link.receive():
            if message.header.kind not in kinds:
                raise ValueError(f"broken stream: a message of kind {message.header.kind}, where {kinds[0]} was due")
            return message
        if link.ended:
            raise ConnectionError("the loader closed the connection")
        await _ready(link.sock, read=True)


async def send_whole(link: Link, kind: int, body: bytes) -> None:
    """Send a message, and wait until the socket has taken all of it."""
    done = link.send(kind, body)
    while not done:
        await _ready(link.sock, read=False)
        done = link.flush()


async def _ready(sock: socket.socket, *, read: bool) -> None:
    loop = asyncio.get_running_loop()
    is_ready: asyncio.Future[None] = loop.create_future()

    def done() -> None:
        # The loop may call this once more before the waiting coroutine has removed it.
        if not is_ready.done():
            is_ready.set_result(None)

    (loop.add_reader if read else loop.add_writer)(sock.fileno(), done)
    try:
        await is_ready
    finally:
        (loop.remove_reader if read else loop.remove_writer)(sock.fileno())
