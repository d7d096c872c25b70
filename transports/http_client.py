"""Sends requests to one web server: URLs, headers, redirects, connections, and the classification of errors.

Data path: http -> [http_client: HttpClient] -> aiohttp's session -> server.

Redirects are followed here: credentials are sent to the root's own origin only, and a redirect from
https to http is refused.

The session belongs to one loop and process (see `network_client`). After a fork the child opens another session: parent
and child share the inherited sockets and, with epoll, the set of descriptors that the parent's loop watches.

`classify_error` translates aiohttp's errors and decides which of them are retryable.
"""

from __future__ import annotations

import base64
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from asyncloader.base.bridge import in_thread
from asyncloader.transports.errors import ReadFailed, TransportError
from asyncloader.transports.http_answers import Headers, safe_url, status_error, version_of
from asyncloader.transports.network_client import NetworkClient
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed, asked_delay

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult
    from yarl import URL

    Response: TypeAlias = aiohttp.ClientResponse

HeaderSource = Mapping[str, str] | Callable[[], Mapping[str, str] | Awaitable[Mapping[str, str]]]
"""Headers, or a function that returns them before each request, plain or async."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 10

# The characters that a path may have unescaped by RFC 3986. Some CDNs sign the URL as it is written.
PATH_SAFE = "/!$&'()*+,;=:@~"

_MOST_ORIGINS = 1000  # of which the proxy is remembered: redirects may name any number of them
_BUFFERED = 1 << 18  # bytes of a response that wait to be read; twice as many stop the connection

# The visible characters of ASCII. All others would break the request's first line.
_VISIBLE = bytes(range(0x21, 0x7F)).decode()


class HttpClient(NetworkClient["aiohttp.ClientSession"]):
    """Requests below one root URL. The options are those of `HttpTransport`, by name."""

    encoding_advice = "turn the encoding off in the server, or pass encoded=True to take them as the object's"
    """What to do about a body that is encoded, for an error's text."""

    # A server that is sent more connections at once than its accept queue takes, such as the five of Python's
    # ``http.server``, drops them without a word, and TCP tries again only after a second, two seconds, and so on.
    first_requests = 5

    asks_if_range = True
    """Whether a download continues only if the server finds the version unchanged."""

    def __init__(self, root: str, options: Mapping[str, Any], range_gap: int) -> None:
        parts = urlsplit(root)
        self.root = safe_url(root)
        super().__init__(
            f"the http transport of {self.root}", options["requests"], options["retry"], options["min_bytes_per_s"]
        )
        self.first_byte_s: float = options["first_byte_s"]
        self.stalled_s: float = options["stalled_s"]
        self.encoded: bool = options["encoded"]
        self.range_gap = range_gap
        headers: HeaderSource | None = options["headers"]
        self._connect_s: float = options["connect_s"]
        self._headers = headers
        host = parts.netloc.rpartition("@")[2].lower()
        # aiohttp sends the host of an encoded URL as it is.
        server = (parts.scheme.lower(), host if host.isascii() else host.encode("idna").decode())
        folder = parts.path if parts.path.lower().endswith("%2f") else parts.path.rstrip("/") + "/"
        self._base = urlunsplit((*server, escape(folder), "", ""))
        site = urlsplit(self._base)
        self._origin = (site.scheme, site.hostname or "", site.port or {"http": 80, "https": 443}[site.scheme])
        self._query = f"?{escape(parts.query)}" if parts.query else ""
        self._own = {"Authorization": _basic(parts.username, parts.password)} if parts.username is not None else {}
        if isinstance(headers, Mapping):
            self._own.update(headers)
        self._proxies: dict[Origin, str | None] = {}

    def open_client(self) -> aiohttp.ClientSession:
        """Open a session. Raises TransportError if aiohttp is missing."""
        try:
            import aiohttp
        except ImportError as error:
            raise TransportError(
                "http and https need aiohttp, which is not installed; install it by: pip install 'asyncloader[http]'"
            ) from error

        class Connector(aiohttp.TCPConnector):
            process = os.getpid()

            async def connect(self, *args: Any, **options: Any) -> aiohttp.connector.Connection:
                while True:
                    connection = await super().connect(*args, **options)
                    if connection.protocol is None or not connection.protocol.should_close:
                        return connection
                    # It has received something while it was idle, which would be taken for this request's response.
                    connection.close()

            def __del__(self, *args: Any) -> None:
                # In a forked child it would close the parent's connections.
                if self.process == os.getpid():
                    super().__del__(*args)

        # No limit here: the slots limit the connections, and a wait for a slot does not count for the time-outs.
        return aiohttp.ClientSession(
            connector=Connector(limit=0, resolver=cast("AbstractResolver", SystemResolver())),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            headers={"Accept-Encoding": "identity", "User-Agent": "asyncloader"},
            read_bufsize=_BUFFERED,
        )

    async def close_client(self, client: aiohttp.ClientSession) -> None:
        """Close all connections."""
        await client.close()

    @staticmethod
    def leave_to_parent(client: aiohttp.ClientSession) -> object:
        """Keep the connections open, because they are also the parent's, like `NetworkClient.leave_to_parent`."""
        connector = client.connector
        client.detach()
        return client, connector

    def url(self, path: str) -> str:
        """Return an object's URL, without userinfo."""
        return self._base + quote(path, PATH_SAFE, errors="surrogateescape") + self._query

    def where(self, path: str | None) -> str:
        """Return the URL of an object, or of the root, without secrets, like `RetryingClient.where`."""
        return self.root if path is None else safe_url(self.url(path))

    async def request(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Send a request, follow redirects, and return the response, whatever its status; the caller releases it."""
        from yarl import URL

        # `encoded`: the target is percent-encoded already, and a signature may cover the way in which it is.
        return await self._send(
            method, path, URL(self.url(path).partition("#")[0], encoded=True), self._origin, headers
        )

    async def follow(self, method: str, path: str, url: URL, headers: Mapping[str, str]) -> Response:
        """Send a request for an object to this URL, like `request`."""
        return await self._send(method, path, url, origin_of(url), headers)

    async def _send(self, method: str, path: str, url: URL, origin: Origin, headers: Mapping[str, str]) -> Response:
        session = self.use()
        secret: Mapping[str, str] = {}
        if origin == self._origin:
            secret = await self._call_headers() if callable(self._headers) else self._own
        # Followed here, not by aiohttp: `secret` must not be sent to another origin.
        for redirect in count(1):
            sent = {**headers, **secret} if secret and origin == self._origin else headers
            proxy = self._proxies[origin] if origin in self._proxies else self._find_proxy(origin)
            try:
                response = await session.request(method, url, headers=sent, allow_redirects=False, proxy=proxy)
            except UnicodeError:  # from the name look-up: a label is empty, or longer than 63 letters
                text = f"{safe_url(str(url))} has a host that is no legal name"
                raise RequestFailed("request", text, retryable=False) from None
            self.widen()
            self.answered(busy=response.status in self._retry.statuses)
            if response.status not in _REDIRECTS or "Location" not in response.headers:
                return response
            response.release()
            if redirect > _MOST_REDIRECTS:
                raise self.refusal(path, response, f"that is redirect number {redirect}, which looks endless")
            url = self._redirect(path, response)
            origin = origin_of(url)
        raise AssertionError("count() does not end")

    def _redirect(self, path: str, response: Response) -> URL:
        """Return the URL that a response redirects to. Raises ReadFailed if it must not be followed."""
        from yarl import URL

        try:
            location = URL(escape(response.headers["Location"]), encoded=True)
            target = response.url.join(location).with_fragment(None).with_user(None)
        except ValueError:
            target = URL()
        if target.scheme not in {"http", "https"} or not target.raw_host:
            raise self.refusal(path, response, "it redirects to what is no http or https URL")
        if response.url.scheme == "https" and target.scheme == "http":
            raise self.refusal(path, response, f"it redirects from https to {safe_url(str(target))}")
        return target

    def is_own(self, url: URL) -> bool:
        """Whether a URL has the root's origin, to which credentials may be sent."""
        return origin_of(url) == self._origin

    def version_of(self, headers: Headers, size: int | None) -> Version:
        """Return the version of an object of `size` bytes (None: not stated), from the headers of a response."""
        return version_of(headers, size)

    # --- failures

    def classify_error(self, error: BaseException, answering: bool) -> RequestFailed | None:
        """Classify an error by the function `classify_error`, with the policy's statuses."""
        return classify_error(error, answering, self._retry.statuses)

    def bad_status(self, path: str, response: Response) -> RequestFailed:
        """Classify a response that does not contain the object."""
        status = response.status
        note = "the server reports success without the object" if status < 300 else ""
        final = status_error(status, response.reason, str(response.url), path, note)
        return RequestFailed(
            f"status {status}",
            f"status {status} {(response.reason or '')[:80]}".rstrip(),
            retryable=status in self._retry.statuses,
            retry_after=asked_delay(response.headers),
            final=final,
        )

    def refusal(self, path: str, response: Response, why: str, kind: type[ReadFailed] = ReadFailed) -> ReadFailed:
        """Make the error for a response that must not be used."""
        where = safe_url(str(response.url))
        return kind(f"reading {path!r} failed: {where} answered {response.status}, but {why}", path=path)

    # --- headers and proxies

    async def _call_headers(self) -> Mapping[str, str]:
        assert callable(self._headers)
        try:
            given = self._headers()
            return {**self._own, **(await given if inspect.isawaitable(given) else given)}
        except Exception as error:  # of any kind: it says nothing about the object, or about the connection to it
            text = f"the function of headers= raised {type(error).__name__}"
            of_network = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError)
            raise RequestFailed("headers", text, retryable=of_network, cause=error) from error

    def _find_proxy(self, origin: Origin) -> str | None:
        """Return the proxy that the environment names for an origin (``https_proxy``, ``no_proxy`` and so on)."""
        from urllib.request import getproxies, proxy_bypass

        found = getproxies().get(origin[0])
        if found and "://" not in found:  # "host:port", which curl and requests take, too
            found = f"http://{found}"
        if len(self._proxies) == _MOST_ORIGINS:
            self._proxies.clear()
        self._proxies[origin] = proxy = found if found and not proxy_bypass(origin[1]) else None
        return proxy


def escape(text: str) -> str:
    """Escape spaces and non-ASCII characters in a URL or a part of one, and nothing else."""
    return quote(text, safe=_VISIBLE, errors="surrogateescape")


Origin: TypeAlias = tuple[str, str, int | None]


def origin_of(url: URL) -> Origin:
    """Return the origin of a URL (RFC 6454): ``https://host`` and ``https://HOST:443`` have the same."""
    return url.scheme, (url.raw_host or "").lower(), url.port


def _basic(user: str, password: str | None) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()


def classify_error(error: BaseException, answering: bool, statuses: frozenset[int]) -> RequestFailed | None:
    """Translate an error of a request; None if it does not come from the network.

    Args:
        error: the error of the attempt.
        answering: whether the head of the response had arrived.
        statuses: the retryable statuses.
    """
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, TransportError) or not isinstance(error, Exception):
        return None
    import aiohttp

    match error:
        case aiohttp.ConnectionTimeoutError():
            return RequestFailed("connect time-out", "the server did not accept a connection in time")
        case aiohttp.ClientConnectorCertificateError():
            certificate = error.certificate_error
            text = f"the certificate of {error.host}:{error.port} is refused: {certificate}"
            return RequestFailed("certificate", text, retryable=False, cause=certificate)
        case aiohttp.ClientConnectorError():
            inner = error.os_error
            text = f"no connection to {error.host}:{error.port}: {_words(inner)}"
            return RequestFailed("connection", text, cause=inner)
        case aiohttp.ServerTimeoutError() | TimeoutError():
            text = "the answer stalled" if answering else "no answer came in time"
            return RequestFailed("stalled" if answering else "no answer", text)
        case aiohttp.ClientPayloadError():
            return RequestFailed("broken body", "the connection broke in the middle of the answer", cause=error)
        case aiohttp.ClientHttpProxyError():  # https through a proxy: the answer to CONNECT, not to the request
            text = f"the proxy answered {error.status} {error.message[:80]}".rstrip()
            after = None if error.headers is None else asked_delay(error.headers)
            return RequestFailed(f"proxy {error.status}", text, retryable=error.status in statuses, retry_after=after)
        case aiohttp.ClientResponseError():
            # Its own text contains the whole URL.
            return RequestFailed("not http", f"the answer is not legal HTTP: {error.message[:200]!r}", retryable=False)
        case OSError() | aiohttp.ClientConnectionError():
            words = _words(error) if isinstance(error, OSError) else type(error).__name__
            return RequestFailed("connection", f"the connection broke: {words}", cause=error)
        case aiohttp.ClientError():
            return RequestFailed("request", f"the request cannot be made: {type(error).__name__}", retryable=False)
        case _:
            return None


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


class SystemResolver:
    """Looks names up by the system, in a thread of its own for each name. Has the methods of `AbstractResolver`.

    aiohttp's own resolver uses the loop's default executor, whose threads may all be busy with calls of the program:
    then no request would begin.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises OSError."""
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            {"hostname": host, "host": str(place[0]), "port": port, "family": kind, "proto": protocol, "flags": flags}
            for kind, _, protocol, _, place in await in_thread(look_up)
        ]

    async def close(self) -> None:
        """Do nothing: a lookup in progress ends by itself, in its thread."""
