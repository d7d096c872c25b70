"""Serves the view of a loader: lines at a Unix socket, and the page at a port of this machine.

Data path: loader -> reading -> snapshot -> [live_server] -> terminal view, browser.

It runs in one event loop's thread. The number of connections, the size and the time of a request, and the bytes that
wait for a slow reader are bounded. No request changes anything. A connection to the Unix socket gets lines of JSON.
Each connection that follows the run has a feed of its own; without a connection no line is made.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from asyncloader.base.socket_folder import bind_socket
from asyncloader.live.http_requests import MOST_HEAD, AnswerError, answer
from asyncloader.service.protocol.sockets import check_peer

_log = logging.getLogger("asyncloader")

_REQUEST_S = 5.0
_SLOW_S = 30.0  # for a reader to take a line; then it is disconnected
_END_S = 1.0  # for the last bytes of a connection to leave
_MOST_CONNECTIONS = 32
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
        feed: begins to make lines, for one connection.
    """

    def __init__(self, feed: Callable[[], AsyncGenerator[bytes]]) -> None:
        self._feed = feed
        self._token = secrets.token_urlsafe(24)
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._waiting: dict[asyncio.Task[None], None] = {}  # those without a request that is granted, the oldest first
        self.over = asyncio.Event()
        """Set once a feed has ended by itself: no more lines come."""
        self.path: Path | None = None
        """The Unix socket, once `listen_at_socket` was called."""
        self.url = ""
        """The page's address, once `listen_at_port` was called."""

    async def listen_at_socket(self) -> None:
        """Serve lines at a Unix socket. Raises OSError."""
        listener, self.path = bind_socket()
        connected = partial(self._connected, self._serve_lines)
        self._servers.append(await asyncio.start_unix_server(connected, sock=listener, limit=MOST_HEAD))

    async def listen_at_port(self, port: int) -> None:
        """Serve the page at a port of the loopback interface; 0: any. Raises OSError."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"the page cannot be served at port {port}: {error.strerror}") from None
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{self._token}/"
        connected = partial(self._connected, self._serve_http)
        self._servers.append(await asyncio.start_server(connected, sock=listener, limit=MOST_HEAD))

    def _connected(self, serve: _Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A duplicate: uvloop's socket of a connection has no options.
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
                if sock.family == socket.AF_UNIX:
                    check_peer(sock)
        except OSError as error:
            _log.warning("a connection to the view of a loader is closed: %s", error)
            writer.transport.abort()
            return
        if len(self._connections) >= _MOST_CONNECTIONS:
            # A request with the secret comes at once, so the oldest connection without one sends nothing, or slowly on
            # purpose, or was refused. Without such a connection all are in use.
            if not self._waiting:
                writer.transport.abort()
                return
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._connections.pop(oldest).transport.abort()
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(serve, reader, writer))
        self._connections[task] = writer
        self._waiting[task] = None
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        self._waiting.pop(task, None)

    async def _serve(self, serve: _Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One line at most waits: the next is made once it has left.
        writer.transport.set_write_buffer_limits(0)
        try:
            with suppress(asyncio.CancelledError):  # of `close`: the last bytes may leave
                await serve(reader, writer)
            writer.close()
            async with asyncio.timeout(_END_S):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the connection was reset or slow, or the request was cut off, or too long
        finally:
            writer.transport.abort()

    async def _serve_lines(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._follow(writer, b"", b"\n", b"")

    async def _follow(self, writer: asyncio.StreamWriter, before: bytes, after: bytes, end: bytes) -> None:
        """Write each line of a feed between `before` and `after`, and `end` when no more come."""
        # The connection is granted: another connection does not take its place.
        self._waiting.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        try:
            async with aclosing(self._feed()) as lines:
                async for line in lines:
                    if writer.is_closing():  # uvloop would raise a RuntimeError
                        return
                    writer.write(before + line + after)
                    async with asyncio.timeout(_SLOW_S):
                        await writer.drain()
            self.over.set()
        except OSError:  # of the connection; also TimeoutError
            raise
        except Exception:
            _log.exception("the view of a loader ends")
        finally:
            # A part of a line that has not left would come before it, and be cut off.
            if not writer.is_closing() and not writer.transport.get_write_buffer_size():
                writer.write(end)

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_REQUEST_S):
            head = await reader.readuntil(b"\r\n\r\n")
        found = answer(head, self._token)
        if found == "events":
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{_HEADERS}\r\n".encode())
            await self._follow(writer, b"data: ", b"\n\n", b"event: end\ndata: \n\n")
            return
        writer.write(_text(found) if isinstance(found, AnswerError) else _page())
        writer.write_eof()
        # Read to the end: if bytes are unread when a socket is closed, the kernel resets the connection, and the client
        # may lose the answer.
        async with asyncio.timeout(_REQUEST_S):
            while await reader.read(MOST_HEAD):
                pass

    def descriptors(self) -> list[int]:
        """The descriptors of all sockets, for a forked child."""
        connected = [writer.get_extra_info("socket") for writer in list(self._connections.values())]
        return [sock.fileno() for sock in [*connected, *(each for server in self._servers for each in server.sockets)]]

    async def close(self) -> None:
        """End all connections, and listen no more. Idempotent."""
        # First: the name must not lead to a socket at which no process listens.
        if self.path is not None:
            with suppress(OSError):  # the folder may be gone, or closed to this user by now
                self.path.unlink(missing_ok=True)
        for server in self._servers:
            server.close()
        self._servers.clear()
        await asyncio.sleep(0)  # connections that were accepted at this moment come to `_connected`
        # The last lines are on their way when this returns; readers that are slow lose them.
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
