"""`HttpTransport`: reads objects from a web server, ``http://`` and ``https://``.

Data path: dataset -> [http] -> http_download -> http_client -> server.

`http_download` reads one object by one or more requests, `http_client` sends the requests, and `http_answers`
interprets the responses. The object stores use `download`, `network_client` and `retry`, too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Self
from urllib.parse import urlsplit

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.checks import check_limits, check_path, check_prefix
from asyncloader.transports.download import NetworkTransport
from asyncloader.transports.errors import InvalidPath, TransportError
from asyncloader.transports.http_answers import safe_url
from asyncloader.transports.http_client import HeaderSource, HttpClient
from asyncloader.transports.http_download import HttpDownload
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RetryPolicy


class HttpTransport(NetworkTransport[HttpClient]):
    """The objects below a URL. Retryable failures are retried (see `retry`) and counted in `retries`.

    Proxies are taken from the environment (``https_proxy``, ``no_proxy``). Redirects are followed, ten at most. If a
    server does not support byte ranges, the bytes before a stream's `start` are received and dropped.

    Args:
        root: ``https://host/directory``. A user and password in it are sent as basic authentication. A query
            (``?sig=...``) is added to every object's URL. Neither is shown in texts. If it ends with an escaped slash
            (``%2F``), the object's path follows it like ``/``.
        headers: sent with every request to the root's own host, for example ``{"Authorization": "Bearer ..."}``; or a
            function that returns them, plain or async, which is called before every attempt, so that it can renew a
            token. It must be picklable if the transport is pickled.
        listing: path of a UTF-8 object with one path per line, which `list` reads: HTTP itself has no listing. None:
            `list` raises.
        retry: which failures are retried and for how long. Default: `RetryPolicy()`.
        requests: maximum number of concurrent requests, and so of connections; an open stream is one. Default 256.
            A server gets five at first, and one more with each answer.
        connect_s: seconds for an address to accept a connection. Default 10.
        first_byte_s: seconds until a request's response begins, including the connection. Default 60.
        stalled_s: seconds without new bytes after which a response counts as broken. Default 30.
        min_bytes_per_s: a response that brings fewer over 60 seconds of waiting counts as broken, too. The time that
            the consumer takes does not count. Default 1024, less than any usable link has; 0: no least rate.
        encoded: accept a body with a ``Content-Encoding`` as the object's bytes, without decoding it. Default False:
            refuse it, because sizes and ranges would refer to other bytes than the object's.
        verify: removed; digests that a server declares are not compared.

    Raises:
        TypeError: `retry` is no policy, `headers` no mapping and no function, or a number is none; `verify` is given.
        ValueError: the URL is no http or https URL, or a number is out of bounds.
        InvalidPath: `listing` is not a canonical path.
    """

    _client_type = HttpClient

    def __init__(
        self,
        root: str,
        *,
        headers: HeaderSource | None = None,
        listing: str | None = None,
        retry: RetryPolicy | None = None,
        requests: int = 256,
        connect_s: float = 10.0,
        first_byte_s: float = 60.0,
        stalled_s: float = 30.0,
        min_bytes_per_s: float = 1024.0,
        encoded: bool = False,
        verify: bool | None = None,
    ) -> None:
        if verify is not None:
            raise TypeError("verify= was removed: compare digests of your own in decode=, and leave verify= out")
        _check_root(root)
        check_limits(requests, min_bytes_per_s, connect_s=connect_s, first_byte_s=first_byte_s, stalled_s=stalled_s)
        if not (headers is None or callable(headers) or isinstance(headers, Mapping)):
            # Its values may be secrets.
            raise TypeError(f"headers= is a {type(headers).__name__}: give a mapping, or a function that returns one")
        if listing is not None:
            check_path(listing)
        options: dict[str, Any] = {
            "headers": headers,
            "retry": RetryPolicy.of(retry),
            "requests": requests,
            "connect_s": connect_s,
            "first_byte_s": first_byte_s,
            "stalled_s": stalled_s,
            "min_bytes_per_s": min_bytes_per_s,
            "encoded": encoded,
        }
        super().__init__(self._client_type(root, options, self.range_gap), root, {"listing": listing, **options})
        self._listing = listing

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport for ``http://...`` or ``https://...``; the options are the constructor's."""
        return cls(url, **options)

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the paths in the `listing` object, sorted, without duplicates, like `Transport.list`.

        Raises:
            TransportError: the transport was made without `listing`.
            InvalidPath: a line of the listing is not a valid path.
        """
        check_prefix(prefix)
        self._client.use()
        if self._listing is None:
            raise TransportError(
                f"HTTP has no listing, so the objects of {self._client.root} cannot be listed; name them yourself, or "
                "pass listing= the path of a text object with one path on each line"
            )
        lines: set[str] = set()
        tail = b""
        async with aclosing(self.stream(self._listing)) as chunks:
            async for chunk in chunks:
                *whole, tail = (tail + chunk).split(b"\n")
                lines.update(self._matching(whole, prefix))
        lines.update(self._matching([tail], prefix))
        for path in sorted(lines):
            yield path
            self._client.use()

    async def size(self, path: str) -> int:
        """Return an object's size, by HEAD, or by a GET of one byte if HEAD fails, like `Transport.size`."""
        return (await self.info(path)).size

    async def info(self, path: str) -> ObjectInfo:
        """Return an object's size and version, with the same request as `size`, like `Transport.info`.

        The version is a strong ETag, otherwise a ``Last-Modified`` date that is at least a minute old.
        """
        version = await self.version(path)
        assert version.size is not None
        return ObjectInfo(version.size, version.name)

    async def version(self, path: str) -> Version:
        """Return an object's version, with the same request as `info`."""
        check_path(path)
        return await self._download(path).measure()

    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> HttpDownload:
        return HttpDownload(self._client, path, start, length, max_bytes)

    def _matching(self, lines: Iterable[bytes], prefix: str) -> Iterable[str]:
        for line in lines:
            try:
                path = line.rstrip(b"\r").decode()
            except UnicodeDecodeError as error:
                raise InvalidPath(f"the listing {self._listing!r} is not UTF-8: {line[:80]!r}", path=None) from error
            if path:
                check_path(path)
                if path.startswith(prefix):
                    yield path


def _check_root(root: str) -> None:
    try:
        parts = urlsplit(root)
        host = parts.hostname
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError as error:
        raise ValueError(f"{safe_url(root)!r} is malformed: {error}") from None
    if parts.scheme.lower() not in {"http", "https"} or not host:
        raise ValueError(f"{safe_url(root)!r} is not an http or https URL; write https://host/directory")
    if parts.fragment:
        raise ValueError(f"{safe_url(root)!r} had a bare '#', which begins a fragment; escape it as %23")
