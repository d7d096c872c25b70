"""Sends requests over the connections of aiohttp's pool, in a third of the CPU time of aiohttp's own session.

Data path: http_client -> [http_session: HttpSession -> HttpResponse] -> aiohttp's connections and parser -> server.

`aiohttp.ClientSession` prepares each request for a body, cookies, redirects, time-outs and tracing: half of the CPU
time that an object of 64 KB costs. The requests of `http_client` have none of these. So a connection is taken from the
pool here, the request's head is written to it, and the response is the one that aiohttp has parsed. Names, TLS,
connecting, the pool, the parser with its limits, and flow control are aiohttp's.

Requests through a proxy are sent by aiohttp's session, and so are all requests where aiohttp's version is none of those
whose connections are known.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from asyncloader.transports.http_connecting import Connecting
from asyncloader.transports.http_names import SystemResolver

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver
    from yarl import URL

_KNOWN = (3, 11), (3, 15)  # aiohttp's versions from the first on, below the second

MOST_ORIGINS = 1000
"""Origins of which something is remembered: redirects may name any number of them."""

_FIELDS = {"Accept-Encoding": "identity", "User-Agent": "asyncloader"}
_BUFFERED = 1 << 18  # bytes of a response that wait to be read; twice as many stop the connection
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


Origin: TypeAlias = tuple[str, str]
"""Of a URL: its scheme, and its host with the port if it has one, as in the URL and without userinfo."""


class _Server(NamedTuple):
    """Whom requests are sent to.

    Attributes:
        request: by which the pool knows the server's connections, and makes more.
        fields: the headers of every request: name and value, by the name in small letters.
        lines: the same, as sent.
        connecting: the connections to it that are being opened.
    """

    request: aiohttp.ClientRequest
    fields: dict[str, tuple[str, str]]
    lines: str
    connecting: Connecting


class HttpResponse:
    """A response whose head has arrived.

    Attributes:
        status: as sent.
        reason: as sent.
        headers: names are compared without their case.
        content: the body, as it arrives.
    """

    __slots__ = ("_give_back", "_origin", "_target", "content", "headers", "reason", "status")

    def __init__(
        self, origin: Origin, target: str, message: Any, content: Any, give_back: Callable[[], object]
    ) -> None:
        self.status: int = message.code
        self.reason: str = message.reason
        self.headers: Mapping[str, str] = message.headers
        self.content: aiohttp.StreamReader = content
        self._origin = origin
        self._target = target
        self._give_back = give_back
        # At the body's end the connection is free, whoever has read how much of the body.
        content.on_eof(give_back)

    @property
    def url(self) -> URL:
        """The URL that was requested."""
        return url_of(self._origin, self._target)

    def release(self) -> None:
        """Give the connection back to the pool, which keeps it if the body has arrived to its end. Idempotent."""
        self._give_back()


Response: TypeAlias = "HttpResponse | aiohttp.ClientResponse"


class HttpSession:
    """Connections to web servers, and the requests over them. In one event loop.

    Args:
        connect_s: seconds for an address to accept a connection.

    Raises:
        ImportError: aiohttp is missing.
    """

    def __init__(self, connect_s: float) -> None:
        import aiohttp

        # No limit here: the slots limit the connections, and a wait for a slot does not count for the time-outs.
        self._connector = aiohttp.TCPConnector(limit=0, resolver=cast("AbstractResolver", SystemResolver()))
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=self._timeout,
            headers=_FIELDS,
            read_bufsize=_BUFFERED,
        )
        version = tuple(map(int, aiohttp.__version__.split(".")[:2]))
        self._known = _KNOWN[0] <= version < _KNOWN[1]
        self._servers: dict[Origin, _Server] = {}

    async def request(
        self, method: str, origin: Origin, target: str, headers: Mapping[str, str], proxy: str | None
    ) -> Response:
        """Send a request without a body, and return the response, whatever its status; the caller releases it.

        Args:
            method: GET or HEAD.
            origin: of the URL.
            target: path and query of the URL, percent-encoded.
            headers: sent besides or instead of those of every request.
            proxy: its URL; None: the server is asked itself.

        Raises:
            aiohttp.ClientError: no response came.
            ValueError: the target or a header has a control character, which would end it.
        """
        if proxy is not None or not self._known:
            url = url_of(origin, target)
            return await self._session.request(method, url, headers=headers, allow_redirects=False, proxy=proxy)
        server = self._server(origin)
        lines = server.lines
        if headers:
            lines = _lines(server.fields | _by_name(headers))
        if _CONTROL.search(target):
            # Without the query, which may hold a signature.
            raise ValueError(f"a URL with a control character: {target.partition('?')[0]!r}; escape it")
        head = f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode()
        try:
            return HttpResponse(origin, target, *await self._exchange(server, method, head))
        except Exception as error:
            # The server may have closed an idle connection just when the request was sent.
            if not _has_broken(error):
                raise
        return HttpResponse(origin, target, *await self._exchange(server, method, head))

    async def turn(self, origin: Origin) -> float:
        """Wait until a request to this server needs no new connection, or may open one. Returns the seconds."""
        server = self._server(origin)
        if self._has_idle(server) or not server.connecting.full:
            return 0.0
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._wait_for_connection(server)
        return loop.time() - began

    async def _wait_for_connection(self, server: _Server) -> bool:
        """Wait as `turn`. Returns whether the pool has a connection."""
        while not (idle := self._has_idle(server)) and server.connecting.full:
            await server.connecting.change()
        return idle

    def _has_idle(self, server: _Server) -> bool:
        return bool(self._connector._conns.get(server.request.connection_key))

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def detach(self) -> object:
        """In a forked child: leave the connections open, because they are also the parent's.

        Returns:
            An object that must never be garbage-collected in this process.
        """
        self._connector._closed = True  # its finalizer would close the parent's connections
        self._session.detach()
        return self

    async def _exchange(self, server: _Server, method: str, head: bytes) -> tuple[Any, Any, Callable[[], object]]:
        """Send a request's head. Return that of the response, its body, and what gives the connection back."""
        request, connecting = server.request, server.connecting
        # Again: other requests may have come since its `turn`, or it is a redirect.
        if await self._wait_for_connection(server):
            return await self._exchange_at(server, method, head, await self._connect(request))
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), None
        connecting.begin()
        try:
            connection = await self._connect(request)
            connecting.opened(began, loop.time())
            answer = await self._exchange_at(server, method, head, connection)
            seconds = loop.time() - began
            return answer
        finally:
            connecting.end(seconds)

    async def _connect(self, request: aiohttp.ClientRequest) -> Any:
        try:
            return await self._connector.connect(request, traces=[], timeout=self._timeout)
        except TimeoutError as error:
            import aiohttp

            raise aiohttp.ConnectionTimeoutError(f"no connection to {request.url} in time") from error

    async def _exchange_at(
        self, server: _Server, method: str, head: bytes, connection: Any
    ) -> tuple[Any, Any, Callable[[], object]]:
        """Send a request's head over this connection, as `_exchange`."""
        try:
            protocol = connection.protocol
            # A connection that has received something while it was idle: that would be taken for this response.
            if protocol is None or protocol.transport is None or protocol.should_close:
                import aiohttp

                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(
                skip_payload=method == "HEAD", read_until_eof=True, auto_decompress=False, read_bufsize=_BUFFERED
            )
            protocol.transport.write(head)
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != 101:  # the response itself follows
                message, content = await protocol.read()
        except BaseException as error:
            connection.close()
            from aiohttp import ClientResponseError
            from aiohttp.http import HttpProcessingError

            if not isinstance(error, HttpProcessingError):
                raise
            raise ClientResponseError(
                server.request.request_info, (), status=error.code, message=error.message
            ) from error
        return message, content, partial(_give_back, connection, server.connecting)

    def _server(self, origin: Origin) -> _Server:
        if (known := self._servers.get(origin)) is not None:
            return known
        import aiohttp

        if len(self._servers) == MOST_ORIGINS:
            self._servers.clear()
        url = url_of(origin, "/")
        request = aiohttp.ClientRequest("GET", url, loop=self._connector._loop, session=self._session)
        fields = _by_name({"Host": url.host_port_subcomponent or "", **_FIELDS, "Accept": "*/*"})
        made = self._servers[origin] = _Server(request, fields, _lines(fields), Connecting())
        return made


def _give_back(connection: Any, connecting: Connecting) -> None:
    connection.release()
    connecting.wake()


def url_of(origin: Origin, target: str) -> URL:
    """Return a URL of an origin."""
    from yarl import URL

    # `encoded`: the target is percent-encoded already, and a signature may cover the way in which it is.
    return URL(f"{origin[0]}://{origin[1]}{target}", encoded=True)


def _has_broken(error: Exception) -> bool:
    """Whether a connection that stood has been closed by the server, or has broken."""
    import aiohttp

    return isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError) and not isinstance(
        error, aiohttp.ClientConnectorError
    )


def _by_name(fields: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {name.lower(): (name, value) for name, value in fields.items()}


def _lines(fields: Mapping[str, tuple[str, str]]) -> str:
    for name, value in fields.values():
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise ValueError(f"the header {name!r} has a control character, which would end it; remove it")
    return "".join([f"{name}: {value}\r\n" for name, value in fields.values()])
