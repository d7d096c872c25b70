"""A node's HTTP endpoint: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for load balancers.

It answers GET with one of three short texts and closes the connection. This takes no web framework.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from asyncloader.base.bridge import in_thread
from asyncloader.service.protocol.sockets import host_and_port

if TYPE_CHECKING:
    from asyncloader.service.node.server import Node

_REQUEST_S = 5.0
_MOST_CONNECTIONS = 64
_MOST_REQUEST = 1 << 15  # bytes
_HELP = {
    "sessions": "Loaders that read here.",
    "lanes": "Logical workers of all loaders.",
    "refused": "Loaders that were refused since the start.",
    "processes": "Worker processes that are ready.",
    "deaths": "Worker processes that died since the start.",
    "tasks": "Tasks that were carried out, of blocking datasets.",
    "busy_seconds": "Seconds that processes were at these tasks.",
}
_COUNTERS = ("refused", "deaths", "tasks", "busy_seconds")


class MetricsEndpoint:
    """Serves a node's figures.

    Args:
        node: the node.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._server: asyncio.Server | None = None
        self._writers: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self.ready = False
        """Whether loaders may come."""
        self.address = ""
        """The URL at which it listens."""

    async def listen(self, address: str) -> None:
        """Listen at ``host:port``. Raises OSError."""
        parts = urlsplit(f"//{address}")
        if parts.port is None:
            raise ValueError(f"--metrics {address}: give host:port")
        # Looked up in a thread of ours: asyncio would use the loop's default executor.
        flags = socket.AI_PASSIVE
        look_up = partial(socket.getaddrinfo, parts.hostname, parts.port, type=socket.SOCK_STREAM, flags=flags)
        hosts = list(dict.fromkeys(str(place[0]) for *_, place in await in_thread(look_up)))
        self._server = await asyncio.start_server(self._answer, hosts, parts.port, limit=_MOST_REQUEST)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"http://{host_and_port(host, port)}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = None
        if len(self._writers) > _MOST_CONNECTIONS:
            # Not the newest: a probe is answered at once, so the oldest connection sends nothing, or slowly on purpose.
            self._abort(next(iter(self._writers)))
        try:
            async with asyncio.timeout(_REQUEST_S):
                request = await reader.readuntil(b"\r\n\r\n")
                status, text = self._page(request.partition(b"\r\n")[0].split())
                data = text.encode()
                head = (
                    f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(data)}\r\n"
                )
                if writer.is_closing():
                    return
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
                writer.write_eof()
                # Read to the end: if bytes are unread when a socket is closed, the kernel resets the connection, and
                # the client may lose the answer.
                while await reader.read(_MOST_REQUEST):
                    pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the connection was reset or slow, or the request was cut off or too long
        finally:
            self._abort(writer)

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection without waiting for its peer. Idempotent."""
        self._writers.pop(writer, None)
        writer.transport.abort()

    def _page(self, request: list[bytes]) -> tuple[str, str]:
        if len(request) != 3 or request[0] != b"GET":
            return "405 Method Not Allowed", "GET only\n"
        if request[1] == b"/healthz":
            return "200 OK", "ok\n"
        if request[1] == b"/readyz":
            problem = self._node.problem() or ("" if self.ready else "not ready")
            return ("503 Service Unavailable", f"{problem}\n") if problem else ("200 OK", "ready\n")
        if request[1] != b"/metrics":
            return "404 Not Found", "there are /metrics, /healthz and /readyz\n"
        lines = []
        for name, value in self._node.figures().items():
            kind, full = (
                ("counter", f"asyncloader_node_{name}_total")
                if name in _COUNTERS
                else ("gauge", f"asyncloader_node_{name}")
            )
            lines += [f"# HELP {full} {_HELP[name]}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return "200 OK", "\n".join([*lines, ""])

    async def close(self) -> None:
        """Stop listening."""
        for writer in list(self._writers):
            self._abort(writer)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
