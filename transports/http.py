"""`HttpTransport`: reads objects from a web server, ``http://`` and ``https://``.

Data path: dataset -> [http] -> http_client -> server.

`http_client` sends the requests, and `http_answers` interprets the responses. The object stores use `download`,
`network_client` and `retry`, too.

A broken download continues with ``Range`` and ``If-Range``, if the server sent a strong ETag or an old enough date of
modification; the answer must have the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncloader.transports.checks import check_limits, check_path, check_prefix, check_size, check_start
from asyncloader.transports.download import Download, NetworkTransport
from asyncloader.transports.errors import InvalidPath, RangesIgnored, ReadFailed, SizeUnknown, TransportError
from asyncloader.transports.http_answers import content_length, foreign_encoding, parse_content_range, safe_url
from asyncloader.transports.http_client import HeaderSource, HttpClient
from asyncloader.transports.network_client import Scope
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed, RetryPolicy

if TYPE_CHECKING:
    from asyncloader.transports.http_client import Response


# Responses to HEAD of servers that do support GET: not allowed, not implemented, or the URL is signed for GET only.
_NO_HEAD = frozenset({403, 405, 501})


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

    async def version(self, path: str) -> Version:
        """Return an object's version, by HEAD, or by a GET of one byte if HEAD fails."""
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


class HttpDownload(Download[HttpClient]):
    """One object of a web server, or one range of it. The arguments are those of `Download`."""

    def __init__(
        self, client: HttpClient, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__(client, path, start, length, max_bytes)
        self._response: Response | None = None

    async def measure(self) -> Version:
        """Return the object's version, whose size is known; reads at most one of its bytes."""
        return await self._run(self._measure)

    def _classify_error(self, error: BaseException) -> RequestFailed | None:
        return self._client.classify_error(error, answering=self._response is not None)

    def _drop(self) -> None:
        if self._response is not None:
            self._response.release()  # keeps the connection only if the response was read to its end
            self._response = None

    async def _measure(self, scope: Scope) -> Version:
        response = await self._request(scope, "HEAD")
        self._response = response
        size = self._stated_size(response)
        if size is None and (response.status in _NO_HEAD or response.status == 200):
            self.close()
            self._response = response = await self._request(scope, "GET")
            size = self._stated_size(response)
        if size is not None:
            self.close()
            # The other headers of a 416 response do not describe the object.
            return self._client.version_of({} if response.status == 416 else response.headers, size)
        if response.status not in {200, 206}:
            raise self._client.bad_status(self._path, response)
        raise self._refusal(response, "it does not state the object's size", SizeUnknown)

    def _stated_size(self, response: Response) -> int | None:
        if response.status in {200, 206}:
            self._refuse_encoding(response)
        if response.status in {206, 416}:
            answered = parse_content_range(response.headers.get("Content-Range"))
            return None if answered is None else answered.total
        return content_length(response.headers) if response.status == 200 else None

    async def _next(self, scope: Scope, most: int) -> bytes:
        """Return the next bytes, at most `most` (0: as they arrive); none at the end."""
        while not self._done:
            if self._response is None:
                self._response = await self._request(scope)
                if not (
                    await self._accept_nothing(scope, self._response)
                    if self._response.status == 416
                    else self._accept(self._response)
                ):
                    break
            content = self._response.content
            if not content.is_eof():  # otherwise all bytes have arrived, and nothing below waits
                scope.limit(self._client.stalled_s)
            data = await self._wait(content.read(most) if most else content.readany(), self._client.stalled_s)
            if not data:
                if self._length is not None and self._response.status == 200 and _in_chunks(self._response):
                    # The server ignores Range, and the whole object has come: its last chunk says so.
                    raise self._out_of_bounds(self._position - self._skip)
                if self._end is not None and self._position < self._end:
                    raise RequestFailed.short(self._position, self._end)
                if self._skip:
                    self._refuse_end(self._position - self._skip)
                break
            if data := self._take(data):
                return data
        self._finish()
        return b""

    def _take(self, data: bytes) -> bytes:
        """Return the wanted part of `data`, and finish if it was the last."""
        data = self._drop_skipped(data)
        end = self._end if self._until is None else self._until
        if end is not None and self._position + len(data) > end:
            data = data[: end - self._position]
        self._advance(len(data))
        if self._length is None:
            check_size(self._path, self._position, self._max_bytes)
        self._end_response()
        return data

    async def _request(self, scope: Scope, measure: str = "") -> Response:
        """Take a slot and request the remaining bytes; or, with `measure` as the method, the object's size."""
        await self._take_slot()
        scope.limit(self._client.patience(self._client.first_byte_s))
        headers: dict[str, str] = {}
        if measure:
            if measure == "GET":
                headers["Range"] = "bytes=0-0"
            return await self._client.request(measure, self._path, headers)
        first, end = self._position, self._asked_end()
        if self._length is not None or first or end != self._end:
            headers["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
            validator = None if self.version is None else self.version.validator
            if first > self._start and validator is not None and self._client.asks_if_range:
                headers["If-Range"] = validator
        return await self._client.request("GET", self._path, headers)

    def _accept(self, response: Response) -> bool:
        """Check the head of a response; False if nothing is left to read."""
        headers, status = response.headers, response.status
        if status not in {200, 206}:
            raise self._client.bad_status(self._path, response)
        self._refuse_encoding(response)
        length = content_length(headers)
        answered = parse_content_range(headers.get("Content-Range")) if status == 206 else None
        first = self._position
        if status == 206:
            if answered is None or answered.start != first or answered.end is None:
                given = headers.get("Content-Range", "no Content-Range")[:80]
                raise self._refusal(response, f"bytes from {first:,} on were asked for, and it gives {given!r}")
            if length is not None and length != answered.end - first:
                raise self._refusal(response, "its Content-Length and Content-Range disagree")
            total = answered.total
        else:
            total, first = length, 0
        self._check_version(first, self._client.version_of(headers, total))
        self._until = None
        if self._length is not None:
            assert self._end is not None
            if total is not None and self._end > total:
                raise self._out_of_bounds(total)
            if self._position == self._start and self._skip > self._client.range_gap:
                raise self._refusal(
                    response,
                    "it ignores Range, so that bytes far inside an object cost all bytes before them: use a server "
                    "with byte ranges, or cache_dir=, which fetches each object once as a whole",
                    RangesIgnored,
                )
        elif total is not None:
            check_size(self._path, total, self._max_bytes)
            check_start(self._path, total, self._start)
            self._end = total
        elif status == 206 and self._end is None:
            raise self._refusal(
                response,
                "it gives a part and does not state the object's size, so that nobody knows whether the part reaches "
                "to its end",
            )
        elif status == 200 and not _in_chunks(response):
            raise self._refusal(
                response,
                "it states neither Content-Length nor chunks, so that a broken connection would look like the object's "
                "end",
            )
        if answered is not None and self._stop is not None and self._position < self._stop:
            # A part that ends before `stop` is no answer to the request: more of it is asked for like after a break.
            complete = answered.end is not None and answered.end >= self._stop and answered.end != self._end
            self._until = answered.end if complete else None
        return self._end is None or self._position < self._end

    def _refuse_end(self, size: int) -> None:
        """Refuse an object that ends before the position."""
        check_start(self._path, size, self._start)
        raise self._changed_error()

    def _refusal(self, response: Response, why: str, kind: type[ReadFailed] = ReadFailed) -> ReadFailed:
        return self._client.refusal(self._path, response, why, kind)

    def _refuse_encoding(self, response: Response) -> None:
        if (encoding := foreign_encoding(response.headers)) and not self._client.encoded:
            raise self._refusal(
                response,
                f"its bytes are encoded ({encoding[:40]!r}) although they were asked for as they are; "
                f"{self._client.encoding_advice}",
            )

    async def _accept_nothing(self, scope: Scope, response: Response) -> bool:
        """Interpret a response that has no bytes from the position on; False if nothing is left to read."""
        answered = parse_content_range(response.headers.get("Content-Range"))
        size = None if answered is None else answered.total
        if self._position == self._start:
            if self._length is not None and (size is None or size < self._start + self._length):
                raise self._out_of_bounds(size)
            if not (self._start or self._stop) or self._length is not None:
                raise self._client.bad_status(self._path, response)
            if size is None:
                self.close()
                size = (await self._measure(scope)).size
                assert size is not None
            if size > self._start:
                raise self._refusal(response, f"bytes from {self._start:,} on were asked for, and it has {size:,}")
            check_start(self._path, size, self._start)
            return False  # the stream begins where the object ends
        raise self._changed_error()


def _in_chunks(response: Response) -> bool:
    return response.headers.get("Transfer-Encoding", "").lower() == "chunked"


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
