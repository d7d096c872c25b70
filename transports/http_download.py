"""Downloads one object over HTTP: sends range requests, checks the responses, and resumes after a break.

Data path: http -> [http_download] -> http_client -> server.

`download` has the part that is common to all downloads. A broken download continues with ``Range`` and ``If-Range``, if
the server sent a strong ETag or an old enough date of modification; the answer must have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncloader.transports.checks import check_size, check_start
from asyncloader.transports.download import Download
from asyncloader.transports.errors import RangesIgnored, ReadFailed, SizeUnknown
from asyncloader.transports.http_answers import (
    content_length,
    foreign_encoding,
    parse_content_range,
)
from asyncloader.transports.http_client import HttpClient
from asyncloader.transports.network_client import Scope
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed

if TYPE_CHECKING:
    from asyncloader.transports.http_client import Response

# Responses to HEAD of servers that do support GET: not allowed, not implemented, or the URL is signed for GET only.
_NO_HEAD = frozenset({403, 405, 501})


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
