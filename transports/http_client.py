"""One server's requests: addresses, headers, redirects and retries. Data path: download -> [client] -> session.

Redirects are followed here, not by aiohttp: what authorises us goes to the root's own origin and to no other,
and never from https to http.
"""

from __future__ import annotations

import base64
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from asyncloader.transports.broken import Broken
from asyncloader.transports.errors import ReadFailed
from asyncloader.transports.http_answers import safe_url, status_error
from asyncloader.transports.http_session import SessionOwner
from asyncloader.transports.http_trouble import trouble_of
from asyncloader.transports.retry import RetryPolicy, parse_retry_after
from asyncloader.transports.retrying_client import RetryingClient

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

__all__ = ["HeaderSource", "HttpClient", "escaped", "origin_of"]

HeaderSource = Mapping[str, str] | Callable[[], Mapping[str, str] | Awaitable[Mapping[str, str]]]
"""Headers, or what gives them, plain or async, before each request."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 10

# RFC 3986: what a path may hold unescaped. Signatures of some CDNs are over the URL as it is written.
PATH_SAFE = "/!$&'()*+,;=:@~"

# All of ASCII that can be seen. The rest would break the request's first line.
_VISIBLE = bytes(range(0x21, 0x7F)).decode()


class HttpClient(RetryingClient["aiohttp.ClientSession"]):
    """Requests below one root URL. The arguments are `HttpTransport`'s."""

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
        encoded: bool,
        verify: bool,
        range_gap: int,
    ) -> None:
        parts = urlsplit(root)
        self.root = safe_url(root)
        super().__init__(SessionOwner(f"the http transport of {self.root}", requests, connect_s), retry)
        self.first_byte_s = first_byte_s
        self.stalled_s = stalled_s
        self.encoded = encoded
        self.verify = verify
        self.range_gap = range_gap
        self._headers = headers
        self._origin = (parts.scheme.lower(), parts.netloc.rpartition("@")[2].lower())
        folder = parts.path if parts.path.lower().endswith("%2f") else parts.path.rstrip("/") + "/"
        self._base = urlunsplit((*self._origin, escaped(folder), "", ""))
        self._query = f"?{escaped(parts.query)}" if parts.query else ""
        self._own = {"Authorization": _basic(parts.username, parts.password)} if parts.username is not None else {}
        if isinstance(headers, Mapping):
            self._own.update(headers)
        self._proxies: dict[tuple[str, str], str | None] = {}

    def url(self, path: str) -> str:
        """Give an object's URL, without userinfo."""
        return self._base + quote(path, PATH_SAFE, errors="surrogateescape") + self._query

    def where(self, path: str | None) -> str:
        """Give the URL of an object, or of the root, without secrets. As `RetryingClient.where`."""
        return self.root if path is None else safe_url(self.url(path))

    async def request(self, method: str, path: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Send a request, follow redirects, and give the answer, whatever its status; the caller releases it."""
        from yarl import URL

        session = self.owner.use()
        secret = await self._asked_headers() if callable(self._headers) else self._own
        # The query's values are percent-encoded already, and a signature may cover how.
        url, origin = URL(self.url(path), encoded=True), self._origin
        sent = {**headers, **secret} if secret else headers
        for redirect in count(1):
            proxy = self._proxies[origin] if origin in self._proxies else self._find_proxy(origin, url.raw_host)
            try:
                response = await session.request(method, url, headers=sent, allow_redirects=False, proxy=proxy)
            except UnicodeError:  # of the look-up: a part of the name is empty, or longer than 63 letters
                text = f"{safe_url(str(url))} has a host that is no legal name"
                raise Broken("request", text, heals=False) from None
            if response.status not in _REDIRECTS or "Location" not in response.headers:
                return response
            response.release()
            if redirect > _MOST_REDIRECTS:
                raise self.refused(path, response, f"that is redirect number {redirect}, which looks endless")
            try:
                location = URL(escaped(response.headers["Location"]), encoded=True)
                target = url.join(location).with_fragment(None).with_user(None)
            except ValueError:
                target = URL()
            if target.scheme not in {"http", "https"} or not target.raw_host:
                raise self.refused(path, response, "it redirects to what is no http or https URL")
            if url.scheme == "https" and target.scheme == "http":
                raise self.refused(path, response, f"it redirects from https to {safe_url(str(target))}")
            url, origin = target, (target.scheme, target.raw_authority.lower())
            sent = {**headers, **secret} if origin_of(target) == origin_of(URL(self._base, encoded=True)) else headers
        raise AssertionError("count() does not end")

    # --- failures

    def trouble(self, error: BaseException, answering: bool) -> Broken | None:
        """As `trouble_of`."""
        return trouble_of(error, answering, self._retry.statuses)

    def bad_status(self, path: str, response: aiohttp.ClientResponse) -> Broken:
        """Say what an answer without an object means."""
        status = response.status
        note = "the server reports success without the object" if status < 300 else ""
        final = status_error(status, response.reason, str(response.url), path, note)
        return Broken(
            f"status {status}",
            f"status {status} {(response.reason or '')[:80]}".rstrip(),
            heals=status in self._retry.statuses,
            retry_after=parse_retry_after(response.headers.get("Retry-After"), time.time()),
            final=final,
        )

    def refused(
        self, path: str, response: aiohttp.ClientResponse, why: str, kind: type[ReadFailed] = ReadFailed
    ) -> ReadFailed:
        """Make the error for an answer that must not be used."""
        where = safe_url(str(response.url))
        return kind(f"reading {path!r} failed: {where} answered {response.status}, but {why}", path=path)

    # --- headers and proxies

    async def _asked_headers(self) -> Mapping[str, str]:
        assert callable(self._headers)
        given = self._headers()
        return {**self._own, **(await given if inspect.isawaitable(given) else given)}

    def _find_proxy(self, origin: tuple[str, str], host: str | None) -> str | None:
        """Give the proxy that the environment names for an origin (``https_proxy``, ``no_proxy`` and so on)."""
        from urllib.request import getproxies, proxy_bypass

        found = getproxies().get(origin[0])
        self._proxies[origin] = proxy = found if found and not proxy_bypass(host or "") else None
        return proxy


def escaped(text: str) -> str:
    """Give the text of a URL, or of a part of one, with spaces and letters beyond ASCII escaped, and nothing else."""
    return quote(text, safe=_VISIBLE, errors="surrogateescape")


def origin_of(url: URL) -> tuple[str, str, int | None]:
    """Give the origin of a URL (RFC 6454): ``https://host`` and ``https://HOST:443`` have the same."""
    return url.scheme, (url.raw_host or "").lower(), url.port


def _basic(user: str, password: str | None) -> str:
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()
