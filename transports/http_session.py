"""Sends requests over the connections of aiohttp's pool, in a third of the CPU time of aiohttp's own session.

Data path: http_client -> [http_session: HttpSession -> HttpResponse] -> aiohttp's connections and parser -> server.

`aiohttp.ClientSession` prepares each request for a body, cookies, redirects, time-outs and tracing: half of the CPU
time that an object of 64 KB costs. The requests of `http_client` have none of these. So a connection is taken from the pool
here, the request's head is written to it, and the response is the one that aiohttp has parsed. Names, TLS, connecting,
the pool, the parser with its limits, and flow control are aiohttp's as before.

Requests through a proxy are sent by aiohttp's session, and so are all requests where aiohttp's version is none of those
whose connections are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from asyncloader.transports.http_names import SystemResolver

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver
    from multidict import CIMultiDict, CIMultiDictProxy
    from yarl import URL

_KNOWN = (3, 11), (3, 15)  # aiohttp's versions from the first on, below the second

_FIELDS = {"Accept-Encoding": "identity", "User-Agent": "asyncloader"}
_BUFFERED = 1 << 18  # bytes of a response that wait to be read; twice as many stop the connection
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class HttpResponse:
    """A response whose head has arrived.

    Attributes:
        url: as requested.
        status: as sent.
        reason: as sent.
        headers: names are compared without their case.
        content: the body, as it arrives.
    """

    __slots__ = ("_connection", "content", "headers", "reason", "status", "url")

    def __init__(self, url: URL, message: Any, content: aiohttp.StreamReader, connection: Any) -> None:
        self.url = url
        self.status: int = message.code
        self.reason: str = message.reason
        self.headers: CIMultiDictProxy[str] = message.headers
        self.content = content
        self._connection = connection
        # At the body's end the connection is free, whoever has read how much of the body.
        content.on_eof(connection.release)

    def release(self) -> None:
        """Give the connection back to the pool, which keeps it if the body has arrived to its end. Idempotent."""
        self._connection.release()


Response: TypeAlias = "HttpResponse | aiohttp.ClientResponse"


class _Server(NamedTuple):
    """Whom requests are sent to.

    Attributes:
        request: by which the pool knows the server's connections, and makes more.
        fields: the headers of every request.
        lines: the same, as sent.
    """

    request: aiohttp.ClientRequest
    fields: CIMultiDict[str]
    lines: str


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
        self._servers: dict[tuple[str, str], _Server] = {}

    async def request(self, method: str, url: URL, headers: Mapping[str, str], proxy: str | None) -> Response:
        """Send a request without a body, and return the response, whatever its status; the caller releases it.

        Args:
            method: GET or HEAD.
            url: where to; percent-encoded, without userinfo and fragment.
            headers: sent besides or instead of those of every request.
            proxy: its URL; None: the server is asked itself.

        Raises:
            aiohttp.ClientError: no response came.
            ValueError: a header has a character that would end it.
        """
        if proxy is not None or not self._known:
            return await self._session.request(method, url, headers=headers, allow_redirects=False, proxy=proxy)
        import aiohttp

        server = self._servers.get((url.scheme, url.raw_authority)) or self._server(url)
        head = _head(method, url.raw_path_qs, server, headers)
        try:
            return await self._exchange(server, method, url, head)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            pass  # the server may have closed an idle connection just when the request was sent
        return await self._exchange(server, method, url, head)

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

    async def _exchange(self, server: _Server, method: str, url: URL, head: bytes) -> HttpResponse:
        import aiohttp
        from aiohttp.http import HttpProcessingError

        try:
            connection = await self._connector.connect(server.request, traces=[], timeout=self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {server.request.url} in time") from error
        try:
            protocol = connection.protocol
            # A connection that has received something while it was idle: that would be taken for this response.
            if protocol is None or protocol.transport is None or protocol.should_close:
                raise aiohttp.ServerDisconnectedError
            protocol.set_response_params(
                skip_payload=method == "HEAD", read_until_eof=True, auto_decompress=False, read_bufsize=_BUFFERED
            )
            protocol.transport.write(head)
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != 101:  # more of this response follows
                message, content = await protocol.read()
            return HttpResponse(url, message, content, connection)
        except HttpProcessingError as error:
            connection.close()
            info, status = server.request.request_info, error.code
            raise aiohttp.ClientResponseError(info, (), status=status, message=error.message) from error
        except BaseException:
            connection.close()
            raise

    def _server(self, url: URL) -> _Server:
        import aiohttp
        from multidict import CIMultiDict
        from yarl import URL

        origin = URL.build(scheme=url.scheme, authority=url.raw_authority, path="/", encoded=True)
        request = aiohttp.ClientRequest("GET", origin, loop=self._connector._loop, session=self._session)
        fields = CIMultiDict({"Host": origin.host_port_subcomponent or "", **_FIELDS, "Accept": "*/*"})
        made = _Server(request, fields, _lines(fields))
        self._servers[url.scheme, url.raw_authority] = made
        return made


def _head(method: str, target: str, server: _Server, headers: Mapping[str, str]) -> bytes:
    lines = server.lines
    if headers:
        fields = server.fields.copy()
        fields.update(headers)
        lines = _lines(fields)
    if _CONTROL.search(target):
        raise ValueError(f"a URL with a control character: {target!r}")
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode()


def _lines(fields: Mapping[str, str]) -> str:
    for name, value in fields.items():
        if _CONTROL.search(name) or _CONTROL.search(value):
            raise ValueError(f"the header {name!r} has a control character, which would end it; remove it")
    return "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
