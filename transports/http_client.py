"""Sends requests to one web server: URLs, headers, redirects, connections, and the classification of errors.

Data path: http_download -> [http_client: HttpClient, SessionOwner] -> http_session -> server.

Redirects are followed here: credentials are sent to the root's own origin only, and a redirect from
https to http is refused.

`SessionOwner` owns the connections (see `client_owner`). After a fork the child opens another session: parent and
child share the inherited sockets and, with epoll, the set of descriptors that the parent's loop watches.

`classify_error` translates aiohttp's errors and decides which of them are retryable.
"""

from __future__ import annotations

import base64
import inspect
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from asyncloader.transports.client_owner import ClientOwner
from asyncloader.transports.errors import ReadFailed, TransportError
from asyncloader.transports.http_answers import Headers, Version, safe_url, status_error
from asyncloader.transports.http_session import MOST_ORIGINS, HttpSession, url_of
from asyncloader.transports.retry import RequestFailed, RetryPolicy, asked_delay, is_retryable
from asyncloader.transports.retrying_client import RetryingClient

if TYPE_CHECKING:
    from yarl import URL

    from asyncloader.transports.http_session import Origin, Response


class SessionOwner(ClientOwner[HttpSession]):
    """The connections of one transport, and its calls in progress.

    Args:
        name: the transport's name for texts, without secrets.
        requests: maximum number of concurrent requests, at least 1.
        connect_s: seconds for an address to accept a connection.
    """

    def __init__(self, name: str, requests: int, connect_s: float) -> None:
        super().__init__(name, requests)
        self._connect_s = connect_s

    def open_client(self) -> HttpSession:
        """Open a session. Raises TransportError if aiohttp is missing."""
        try:
            return HttpSession(self._connect_s)
        except ImportError as error:
            raise TransportError(
                "http and https need aiohttp, which is not installed; install it by: pip install 'asyncloader[http]'"
            ) from error

    async def close_client(self, client: HttpSession) -> None:
        """Close all connections."""
        await client.close()

    @staticmethod
    def leave_to_parent(client: HttpSession) -> object:
        """Keep the connections open, because they are also the parent's, like `ClientOwner.leave_to_parent`."""
        return client.detach()


HeaderSource = Mapping[str, str] | Callable[[], Mapping[str, str] | Awaitable[Mapping[str, str]]]
"""Headers, or a function that returns them before each request, plain or async."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 10

# The characters that a path may have unescaped by RFC 3986. Some CDNs sign the URL as it is written.
PATH_SAFE = "/!$&'()*+,;=:@~"

# The visible characters of ASCII. All others would break the request's first line.
_VISIBLE = bytes(range(0x21, 0x7F)).decode()


class HttpClient(RetryingClient[HttpSession]):
    """Requests below one root URL. The arguments are those of `HttpTransport`."""

    encoding_advice = "turn the encoding off in the server, or pass encoded=True to take them as the object's"
    """What to do about a body that is encoded, for an error's text."""

    asks_if_range = True
    """Whether a download continues only if the server finds the version unchanged."""

    def __init__(
        self,
        root: str,
        *,
        headers: HeaderSource | None,
        retry: RetryPolicy,
        requests: int,
        connect_s: float,
        first_byte_s: float,
        stalled_s: float,
        min_bytes_per_s: float,
        encoded: bool,
        verify: bool,
        range_gap: int,
    ) -> None:
        parts = urlsplit(root)
        self.root = safe_url(root)
        super().__init__(
            SessionOwner(f"the http transport of {self.root}", requests, connect_s), retry, min_bytes_per_s
        )
        self.first_byte_s = first_byte_s
        self.stalled_s = stalled_s
        self.encoded = encoded
        self.verify = verify
        self.range_gap = range_gap
        self._headers = headers
        host = parts.netloc.rpartition("@")[2].lower()
        # aiohttp sends the host of an encoded URL as it is.
        self._origin = (parts.scheme.lower(), host if host.isascii() else host.encode("idna").decode())
        folder = parts.path if parts.path.lower().endswith("%2f") else parts.path.rstrip("/") + "/"
        self._site = "{}://{}".format(*self._origin)
        self._base = urlunsplit((*self._origin, escape(folder), "", ""))
        self._query = f"?{escape(parts.query)}" if parts.query else ""
        self._own = {"Authorization": _basic(parts.username, parts.password)} if parts.username is not None else {}
        if isinstance(headers, Mapping):
            self._own.update(headers)
        self._proxies: dict[Origin, str | None] = {}

    def url(self, path: str) -> str:
        """Return an object's URL, without userinfo."""
        return self._base + quote(path, PATH_SAFE, errors="surrogateescape") + self._query

    def where(self, path: str | None) -> str:
        """Return the URL of an object, or of the root, without secrets, like `RetryingClient.where`."""
        return self.root if path is None else safe_url(self.url(path))

    async def turn(self) -> float:
        """Wait until a request needs no new connection to the root's server, or may open one. Returns the seconds."""
        return await self.owner.use().turn(self._origin)

    async def request(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Send a request, follow redirects, and return the response, whatever its status; the caller releases it."""
        target = self.url(path)[len(self._site) :].partition("#")[0]
        return await self._send(method, path, self._origin, target, headers)

    async def follow(self, method: str, path: str, url: URL, headers: Mapping[str, str]) -> Response:
        """Send a request for an object to this URL, like `request`."""
        return await self._send(method, path, (url.scheme, url.raw_authority), url.raw_path_qs, headers)

    async def _send(self, method: str, path: str, origin: Origin, target: str, headers: Mapping[str, str]) -> Response:
        session = self.owner.use()
        secret: Mapping[str, str] = {}
        if origin == self._origin or self.is_own(url_of(origin, "/")):
            secret = await self._call_headers() if callable(self._headers) else self._own
        sent = {**headers, **secret} if secret else headers
        # Followed here, not by aiohttp: `secret` must not be sent to another origin.
        for redirect in count(1):
            proxy = self._proxies[origin] if origin in self._proxies else self._find_proxy(origin)
            try:
                response = await session.request(method, origin, target, sent, proxy)
            except UnicodeError:  # from the name look-up: a label is empty, or longer than 63 letters
                text = f"{safe_url(str(url_of(origin, target)))} has a host that is no legal name"
                raise RequestFailed("request", text, retryable=False) from None
            self.answered(busy=response.status in self._retry.statuses)
            if response.status not in _REDIRECTS or "Location" not in response.headers:
                return response
            response.release()
            if redirect > _MOST_REDIRECTS:
                raise self.refusal(path, response, f"that is redirect number {redirect}, which looks endless")
            url = self._redirect(path, response)
            origin, target = (url.scheme, url.raw_authority), url.raw_path_qs
            sent = {**headers, **secret} if self.is_own(url) else headers
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
        return origin_of(url) == origin_of(url_of(self._origin, "/"))

    def version_of(self, headers: Headers, size: int | None) -> Version:
        """Return the version of an object of `size` bytes (None: not stated), from the headers of a response."""
        return Version.of(headers, size)

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
            retry_after=asked_delay(response.headers, time.time()),
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
            failed = self.classify_error(error, answering=False)
            text = f"the function of headers= raised {type(error).__name__}"
            retryable = failed is not None and failed.retryable
            raise RequestFailed("headers", text, retryable=retryable, cause=error) from error

    def _find_proxy(self, origin: Origin) -> str | None:
        """Return the proxy that the environment names for an origin (``https_proxy``, ``no_proxy`` and so on)."""
        from urllib.request import getproxies, proxy_bypass

        found = getproxies().get(origin[0])
        if found and "://" not in found:  # "host:port", which curl and requests take, too
            found = f"http://{found}"
        if len(self._proxies) == MOST_ORIGINS:
            self._proxies.clear()
        self._proxies[origin] = proxy = (
            found if found and not proxy_bypass(url_of(origin, "/").raw_host or "") else None
        )
        return proxy


def escape(text: str) -> str:
    """Escape spaces and non-ASCII characters in a URL or a part of one, and nothing else."""
    return quote(text, safe=_VISIBLE, errors="surrogateescape")


def origin_of(url: URL) -> tuple[str, str, int | None]:
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
            return RequestFailed("connection", text, retryable=is_retryable(inner), cause=inner)
        case aiohttp.ServerTimeoutError() | TimeoutError():
            text = "the answer stalled" if answering else "no answer came in time"
            return RequestFailed("stalled" if answering else "no answer", text)
        case aiohttp.ClientPayloadError():
            return RequestFailed("broken body", "the connection broke in the middle of the answer", cause=error)
        case aiohttp.ClientHttpProxyError():  # https through a proxy: the answer to CONNECT, not to the request
            text = f"the proxy answered {error.status} {error.message[:80]}".rstrip()
            after = None if error.headers is None else asked_delay(error.headers, time.time())
            return RequestFailed(f"proxy {error.status}", text, retryable=error.status in statuses, retry_after=after)
        case aiohttp.ClientResponseError():
            # Its own text contains the whole URL.
            return RequestFailed("not http", f"the answer is not legal HTTP: {error.message[:200]!r}", retryable=False)
        case aiohttp.ClientOSError():
            retryable = is_retryable(error) or isinstance(error.__cause__, ssl.SSLEOFError)
            return RequestFailed(
                "connection", f"the connection broke: {_words(error)}", retryable=retryable, cause=error
            )
        case aiohttp.ClientConnectionError():
            return RequestFailed("connection", f"the connection broke: {type(error).__name__}", cause=error)
        case aiohttp.ClientError():
            return RequestFailed("request", f"the request cannot be made: {type(error).__name__}", retryable=False)
        case OSError():
            return RequestFailed(
                "connection", f"the connection broke: {error}", retryable=is_retryable(error), cause=error
            )
        case _:
            return None


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
