"""Serves the view of a loader or a node: lines at a Unix socket, and the page at a port of this machine.

Data path: loader -> reading -> snapshot -> [live_server] -> terminal view, browser.

It runs in one event loop's thread. The number of connections, the size and the time of a request, and the bytes that
wait for a slow reader are bounded. No request changes anything. A connection to the Unix socket gets lines of JSON.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from asyncloader.base.socket_folder import bind_socket
from asyncloader.live.broadcast import EVENTS, LINES, Broadcast
from asyncloader.live.http_requests import MOST_HEAD, AnswerError, answer
from asyncloader.service.protocol.sockets import check_peer

_log = logging.getLogger("asyncloader")

_REQUEST_S = 5.0
_MOST_CONNECTIONS = 32
_SEND_BYTES = 1 << 16  # that the kernel keeps for a connection; a reader that is slower gets fewer lines
_PAUSE_S = 0.1  # without new connections after one could not be accepted
_HEADERS = (
    "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\nConnection: close\r\n"
)

PAGE = Path(__file__).with_name("page.html").read_bytes()
"""The page: HTML with its style and script, and nothing from elsewhere."""

_Serve: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class LiveServer:
    """Serves the lines of a feed.

    Args:
        feed: see `Broadcast`.
    """

    def __init__(self, feed: Callable[[], AsyncGenerator[bytes]]) -> None:
        self.broadcast = Broadcast(feed)
        self._token = secrets.token_urlsafe(24)
        self._listeners: list[socket.socket] = []
        self._connections: dict[asyncio.Task[None], socket.socket] = {}  # the oldest first
        self._waiting: dict[asyncio.Task[None], None] = {}  # those without a request that is granted, the oldest first
        self.path: Path | None = None
        """The Unix socket, once `listen_at_socket` was called."""
        self.url = ""
        """The page's address, once `listen_at_port` was called."""

    async def listen_at_socket(self) -> None:
        """Serve lines at a Unix socket. Raises OSError."""
        listener, self.path = bind_socket()
        self._listen(listener, self._serve_lines)

    async def listen_at_port(self, port: int) -> None:
        """Serve the page at a port of the loopback interface; 0: any. Raises OSError."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(_MOST_CONNECTIONS)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"the page cannot be served at port {port}: {error.strerror}") from None
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{self._token}/"
        self._listen(listener, self._serve_http)

    def _listen(self, listener: socket.socket, serve: _Serve) -> None:
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener, serve)

    def _accept(self, listener: socket.socket, serve: _Serve) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock = listener.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionError):  # the peer has closed it already
            return
        except OSError as error:
            # No descriptor is left. The listener stays readable: without a pause the loop would do nothing else.
            _log.warning("a connection could not be accepted: %s", error)
            loop.remove_reader(listener.fileno())
            loop.call_later(_PAUSE_S, self._accept_again, listener, serve)
            return
        try:
            if sock.family == socket.AF_UNIX:
                check_peer(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        except OSError as error:
            _log.warning("a connection to the view of a loader is closed: %s", error)
            sock.close()
            return
        if len(self._connections) >= _MOST_CONNECTIONS:
            # A request with the secret comes at once, so the oldest connection without one sends nothing, or slowly on
            # purpose, or was refused. Without such a connection all are in use.
            if not self._waiting:
                sock.close()
                return
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.cancel()
        task = loop.create_task(self._serve(sock, serve))
        self._connections[task] = sock
        self._waiting[task] = None
        task.add_done_callback(partial(self._served, sock))

    def _accept_again(self, listener: socket.socket, serve: _Serve) -> None:
        if listener in self._listeners:  # the server may have been closed since
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener, serve)

    def _served(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        self._waiting.pop(task, None)
        sock.close()  # a task that was cancelled before it began has not closed it

    async def _serve(self, sock: socket.socket, serve: _Serve) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(MOST_HEAD)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock)
        # One line at most waits: `Broadcast` writes the next only if this is 0.
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await serve(reader, writer)
            writer.close()
            async with asyncio.timeout(_REQUEST_S):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the connection was reset or slow, or the request was cut off, or too long
        finally:
            transport.abort()

    async def _serve_lines(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._in_use()
        await self.broadcast.follow(reader, writer, LINES)

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_REQUEST_S):
            head = await reader.readuntil(b"\r\n\r\n")
        found = answer(head, self._token)
        if not isinstance(found, AnswerError):
            self._in_use()
        if found == "events":
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{_HEADERS}\r\n".encode())
            await self.broadcast.follow(reader, writer, EVENTS)
            return
        writer.write(_text(found) if isinstance(found, AnswerError) else _page())
        writer.write_eof()
        # Read to the end: if bytes are unread when a socket is closed, the kernel resets the connection, and the client
        # may lose the answer.
        async with asyncio.timeout(_REQUEST_S):
            while await reader.read(MOST_HEAD):
                pass

    def _in_use(self) -> None:
        """The connection is granted: another connection does not take its place."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.pop(task, None)

    def descriptors(self) -> list[int]:
        """The descriptors of all sockets, for a forked child."""
        return [sock.fileno() for sock in [*self._listeners, *list(self._connections.values())]]

    async def close(self) -> None:
        """End all connections, and listen no more. Idempotent."""
        loop = asyncio.get_running_loop()
        # First: the name must not lead to a socket at which no process listens.
        if self.path is not None:
            with suppress(OSError):  # the folder may be gone, or closed to this user by now
                self.path.unlink(missing_ok=True)
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        # The last lines are on their way when this returns; readers that are slow lose them.
        await self.broadcast.close()
        for task in [*self._connections]:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)


def _head(status: str, kind: str, nbytes: int, more: str = "") -> bytes:
    return (f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {nbytes}\r\n{more}{_HEADERS}\r\n").encode()


def _text(found: AnswerError) -> bytes:
    data = f"{found.text}\n".encode()
    place = f"Location: {found.location}\r\n" if found.location else ""
    return _head(found.status, "text/plain", len(data), place) + data


def _page() -> bytes:
    """The page, with the header by which a browser uses its own script and style alone, and its own stream."""
    policy = (
        f"default-src 'none'; script-src {_hashes(b'script')}; style-src {_hashes(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _head("200 OK", "text/html; charset=utf-8", len(PAGE), f"Content-Security-Policy: {policy}\r\n") + PAGE


def _hashes(tag: bytes) -> str:
    parts = re.findall(rb"<" + tag + rb">(.*?)</" + tag + rb">", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(each).digest()).decode() for each in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
