"""Objects of a web server, ``http://`` and ``https://``. Data path: dataset -> [http] -> sample.

`HttpTransport` is the contract of `base.py`; below it lie, in this order: `http_download` (one object over as
many requests as it takes), `http_client` (addresses, redirects, retries), `http_session` (aiohttp's
connections, by loop and process), and the pure `http_answers`, `http_trouble` and `retry`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from math import isfinite
from typing import Any, Self
from urllib.parse import urlsplit

from asyncloader.transports.base import ObjectInfo, Transport
from asyncloader.transports.checks import check_chunk_size, check_path, check_prefix, check_size, check_start
from asyncloader.transports.errors import InvalidPath, ReadFailed, TransportError
from asyncloader.transports.http_answers import safe_url
from asyncloader.transports.http_client import HeaderSource, HttpClient
from asyncloader.transports.http_download import Download
from asyncloader.transports.ranges import ByteRange
from asyncloader.transports.retry import RetryCounts, RetryPolicy

__all__ = ["HttpTransport"]


class HttpTransport(Transport):
    """The objects below a URL. Failures that heal are retried (`retry`); `retries` counts them.

    Proxies come from the environment (``https_proxy``, ``no_proxy``). Redirects are followed, ten at most.

    Args:
        root: ``https://host/directory``. A user and password in it are sent as basic authentication. A query
            (``?sig=...``) is added to every object's URL. Neither is shown in texts.
        headers: sent to the root's own host with every request, for example
            ``{"Authorization": "Bearer ..."}``; or a function that gives them, plain or async, and is asked
            before every attempt, so that it can renew a token. It must pickle if the transport is to.
        listing: path of an object with one path on each line, in UTF-8, which `list` reads: HTTP itself has
            no listing. None: `list` raises.
        retry: what is tried again and for how long. Default: `RetryPolicy()`.
        requests: requests in progress at most, and so connections; an open stream is one. Default 256.
        connect_s: seconds for an address to accept a connection. Default 10.
        first_byte_s: seconds for a request's answer to begin, the connection included. Default 60.
        stalled_s: seconds without one more byte after which an answer counts as broken. Default 30.
        encoded: take a body with a ``Content-Encoding`` as the object's bytes as they come, without decoding.
            Default False: refuse it, because sizes and ranges would be those of other bytes.
        verify: compare whole objects with the digest that the server declares (``Repr-Digest``,
            ``x-goog-hash``, ``Content-MD5``), if it does. Default True.

    Raises:
        ValueError: the URL is no http or https URL, or a number is out of bounds.
        InvalidPath: `listing` is not a canonical path.
    """

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
        encoded: bool = False,
        verify: bool = True,
    ) -> None:
        _check_root(root)
        if requests < 1:
            raise ValueError(f"requests must be at least 1, got {requests}")
        for name, seconds in {"connect_s": connect_s, "first_byte_s": first_byte_s, "stalled_s": stalled_s}.items():
            if not (isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be above 0 seconds, got {seconds}")
        if listing is not None:
            check_path(listing)
        options: dict[str, Any] = {
            "headers": headers,
            "retry": RetryPolicy() if retry is None else retry,
            "requests": requests,
            "connect_s": connect_s,
            "first_byte_s": first_byte_s,
            "stalled_s": stalled_s,
            "encoded": encoded,
            "verify": verify,
        }
        self._root = root
        self._listing = listing
        self._options = options
        self._client = HttpClient(root, range_gap=self.range_gap, **options)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport for ``http://...`` or ``https://...``; the options are the constructor's."""
        return cls(url, **options)

    def __repr__(self) -> str:
        state = "closed" if self._client.owner.closed else "open"
        return f"<HttpTransport {self._client.root!r} requests={self._options['requests']} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return partial(type(self), listing=self._listing, **self._options), (self._root,)

    @property
    def retries(self) -> RetryCounts:
        """What was tried again so far, by this transport in this process."""
        return self._client.counts

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object; a download that breaks is resumed. As `Transport.read`."""
        check_path(path)
        check_size(path, 0, max_bytes)
        return await Download(self._client, path, max_bytes=max_bytes).rest()

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range. As `Transport.read_range`."""
        check_path(path)
        block = _checked(start, length)
        if not length:
            self._client.owner.use()
            return b""
        return await Download(self._client, path, *block).rest()

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, near ones in one request, all of one version of the object. As `Transport.read_ranges`.

        Raises:
            ReadFailed: also when the object changed between the requests.
        """
        check_path(path)
        plan = self._plan(ranges)
        self._client.owner.use()
        slots = asyncio.Semaphore(self.range_requests)
        downloads = [Download(self._client, path, *block) for block in plan.blocks]

        async def fetch(download: Download) -> bytes:
            async with slots:
                return await download.rest()

        if len(downloads) <= 1:
            return plan.cut([await download.rest() for download in downloads])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch(download)) for download in downloads]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        versions = [download.version for download in downloads if download.version is not None]
        if any(versions[0].differs(each) for each in versions):
            raise ReadFailed(
                f"{path!r} in {self._client.root} changed between the requests for its parts; read it again, and "
                "write objects under new names instead of replacing them",
                path=path,
            )
        return plan.cut([task.result() for task in tasks])

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks as they arrive; a download that breaks is resumed. As `Transport.stream`.

        A server without byte ranges sends the bytes before `start` as well; they are passed over.

        Raises:
            ReadFailed: also when it breaks, and the server sends no strong ETag by which to resume.
        """
        check_path(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        download = Download(self._client, path, start)
        try:
            while chunk := await download.part(chunk_size):
                yield chunk
        finally:
            download.close()

    async def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Give the paths of the `listing` object, sorted, each once. As `Transport.list`.

        Raises:
            TransportError: the transport was made without `listing`.
            InvalidPath: the listing holds a line that is no path.
        """
        check_prefix(prefix)
        self._client.owner.use()
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
            self._client.owner.use()

    async def size(self, path: str) -> int:
        """Give an object's size, by HEAD, or by a GET of one byte where that fails. As `Transport.size`."""
        check_path(path)
        return (await Download(self._client, path).info()).size

    async def info(self, path: str) -> ObjectInfo:
        """Give an object's size and version, with the request that `size` makes. As `Transport.info`.

        The version is a strong ETag, or where there is none a ``Last-Modified`` that is a minute old or more.
        """
        check_path(path)
        return await Download(self._client, path).info()

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version in one request. As `Transport.read_with_info`."""
        check_path(path)
        check_size(path, 0, max_bytes)
        download = Download(self._client, path, max_bytes=max_bytes)
        data = await download.rest()
        return data, ObjectInfo(len(data), download.version and download.version.validator)

    async def aclose(self) -> None:
        """End calls in progress with TransportClosed, and close the connections. As `Transport.aclose`."""
        await self._client.owner.aclose()

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


def _checked(start: int, length: int) -> ByteRange:
    if start < 0 or length < 0:
        raise ValueError(f"a byte range needs start and length of 0 or more, got start={start}, length={length}")
    return ByteRange(start, length)


def _check_root(root: str) -> None:
    try:
        parts = urlsplit(root)
        host = parts.hostname
        parts.port  # noqa: B018 - raises on a port that is none
    except ValueError as error:
        raise ValueError(f"{safe_url(root)!r} is malformed: {error}") from None
    if parts.scheme.lower() not in {"http", "https"} or not host:
        raise ValueError(f"{safe_url(root)!r} is not an http or https URL; write https://host/directory")
    if parts.fragment:
        raise ValueError(f"{safe_url(root)!r} had a bare '#', which begins a fragment; escape it as %23")
