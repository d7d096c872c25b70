"""The bytes of one object over as many requests as it takes. Data path: server -> [download] -> transport's caller.

A download that breaks goes on where it broke, by ``Range`` and ``If-Range``, as long as the server proves that
the object is still the same one: by a strong ETag, or by a date of modification long past. Without a proof, a
read whose bytes nobody has seen begins again, and a stream fails. An object that did change is an error.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.checks import check_size, check_start
from asyncloader.transports.errors import RangeOutOfBounds, ReadFailed
from asyncloader.transports.http_answers import (
    Version,
    content_length,
    declared_digest,
    foreign_encoding,
    parse_content_range,
)
from asyncloader.transports.http_session import Scope
from asyncloader.transports.http_trouble import Broken
from asyncloader.transports.retry import Attempts

if TYPE_CHECKING:
    import aiohttp

    from asyncloader.transports.http_client import HttpClient

__all__ = ["Download"]

_R = TypeVar("_R")

# Bytes that count as progress, so that the budget of the retries starts again. See `Attempts.progressed`.
_PROGRESS = 1 << 16

# Answers to HEAD of servers that do serve GET: not allowed, not implemented, or an URL that is signed for GET alone.
_NO_HEAD = frozenset({403, 405, 501})


class Download:
    """One object, or one range of it. `rest` gives it whole, `part` in pieces; `close` when it is left early.

    Args:
        client: sends the requests.
        path: the object.
        start: the first byte.
        length: bytes; None for all up to the end of the object.
        max_bytes: with `length` None, refuse an object that is larger.
    """

    def __init__(
        self, client: HttpClient, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.version: Version | None = None
        self._client = client
        self._path = path
        self._start = start
        self._length = length
        self._max_bytes = max_bytes
        self._position = start  # of the next byte that is given
        self._end = None if length is None else start + length
        self._mark = start  # where the retries' budget started
        self._skip = 0  # bytes of this answer that lie before the position
        self._done = False
        self._response: aiohttp.ClientResponse | None = None
        self._slots: asyncio.Semaphore | None = None  # while one of them is ours
        self._attempts: Attempts | None = None
        self._paused_at = 0.0
        self._queued_s = 0.0  # waited for a slot since the last failure; no part of an outage
        self._digest: tuple[Any, bytes] | None = None
        self._parts: list[bytes] = []

    async def rest(self) -> bytes:
        """Give all bytes."""
        await self._run(self._read_all)
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def part(self, most: int) -> bytes:
        """Give the next bytes, `most` at most; none at the end."""
        if self._attempts is not None:
            # What the caller did meanwhile is no part of the outage.
            self._attempts.paused(asyncio.get_running_loop().time() - self._paused_at)
        data = await self._run(lambda scope: self._next(scope, most), keep=True)
        self._paused_at = asyncio.get_running_loop().time()
        return data

    async def info(self) -> ObjectInfo:
        """Give the object's size and version; reads none of its bytes, or one."""
        return await self._run(self._measure)

    def close(self) -> None:
        """Drop the connection, unless the answer has been read to its end, and give the slot back."""
        if self._response is not None:
            self._response.release()  # keeps the connection only if the answer was read to its end
            self._response = None
        if self._slots is not None:
            self._slots.release()
            self._slots = None

    async def _run(self, step: Callable[[Scope], Awaitable[_R]], *, keep: bool = False) -> _R:
        """Do `step` until it succeeds, or fails in a way that does not heal. `keep`: bytes given stay given."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._queued_s = 0.0
        while True:
            try:
                async with self._client.owner.scope() as scope:
                    return await step(scope)
            except BaseException as error:
                answering = self._response is not None
                self.close()
                broken = Broken.of(error, answering)
                if broken is None:
                    raise
                proved = self.version is not None and self.version.validator is not None
                if keep and self._position > self._start and not proved:
                    raise self._client.failure(
                        self._path,
                        broken,
                        f"{self._position - self._start:,} bytes were given already, and the server sends no "
                        "strong ETag by which to go on safely",
                    ) from broken.cause
                if self._attempts is None:
                    self._attempts = self._client.attempts(began)
                self._attempts.paused(self._queued_s)
                self._queued_s = 0.0
                if proved and self._position - self._mark >= _PROGRESS:
                    self._attempts.progressed(loop.time())
                    self._mark = self._position
                delay = self._client.judge(self._path, broken, self._attempts, loop.time())
            if not proved:
                self._restart()
            elif self._position > self._start:
                self._client.counts.resume()
            await self._client.owner.sleep(delay)

    def _restart(self) -> None:
        self._position = self._mark = self._start
        self._end = None if self._length is None else self._start + self._length
        self.version = self._digest = None
        self._parts.clear()

    async def _read_all(self, scope: Scope) -> None:
        while data := await self._next(scope, 0):
            self._parts.append(data)

    async def _measure(self, scope: Scope) -> ObjectInfo:
        response = await self._request(scope, "HEAD")
        self._response = response
        size = self._stated_size(response)
        if size is None and (response.status in _NO_HEAD or response.status == 200):
            self.close()
            self._response = response = await self._request(scope, "GET")
            size = self._stated_size(response)
        if size is not None:
            self.close()
            # What describes an answer of 416 is not the object.
            known = response.status != 416
            return ObjectInfo(size, Version.of(response.headers, size).validator if known else None)
        if response.status not in {200, 206}:
            raise self._client.bad_status(self._path, response)
        raise self._client.refused(self._path, response, "it does not state the object's size")

    def _stated_size(self, response: aiohttp.ClientResponse) -> int | None:
        if response.status in {200, 206}:
            self._refuse_encoding(response)
        if response.status in {206, 416}:
            answered = parse_content_range(response.headers.get("Content-Range"))
            return None if answered is None else answered.total
        return content_length(response.headers) if response.status == 200 else None

    async def _next(self, scope: Scope, most: int) -> bytes:
        """Give the next bytes, `most` at most (0: as they come); none at the end."""
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
            if not content.is_eof():  # else all has arrived, and nothing below waits
                scope.limit(self._client.stalled_s)
            data = await (content.read(most) if most else content.readany())
            if not data:
                if self._end is not None and self._position < self._end:
                    raise Broken.short(self._position, self._end)
                if self._skip:
                    self._refuse_end(self._position - self._skip, self._response)
                break
            if data := self._take(data):
                return data
        self._finish()
        return b""

    def _take(self, data: bytes) -> bytes:
        """Give what is wanted of `data`, and see whether that was all."""
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        if self._end is not None and self._position + len(data) > self._end:
            data = data[: self._end - self._position]
        self._position += len(data)
        if self._length is None:
            check_size(self._path, self._position, self._max_bytes)
        if self._digest is not None:
            self._digest[0].update(data)
        if self._position == self._end:
            self._finish()
        return data

    def _finish(self) -> None:
        if self._done:
            return
        if self._digest is not None and self._digest[0].digest() != self._digest[1]:
            name = self._digest[0].name
            self.version = None  # nothing of this is worth keeping
            raise Broken.corrupt(name)
        self._done = True
        self.close()

    async def _request(self, scope: Scope, measure: str = "") -> aiohttp.ClientResponse:
        """Take a slot and ask for what is left, or, with `measure` the method, for the object's size."""
        _, slots = self._client.owner.use()
        if slots.locked():
            loop = asyncio.get_running_loop()
            began = loop.time()
            await slots.acquire()
            self._queued_s += loop.time() - began
        else:
            await slots.acquire()  # does not wait
        self._slots = slots
        scope.limit(self._client.first_byte_s)
        headers: dict[str, str] = {}
        if measure:
            if measure == "GET":
                headers["Range"] = "bytes=0-0"
            return await self._client.request(measure, self._path, headers)
        if self._length is not None or self._position:
            headers["Range"] = f"bytes={self._position}-{'' if self._end is None else self._end - 1}"
            if self._position > self._start and self.version is not None and self.version.validator is not None:
                headers["If-Range"] = self.version.validator
        return await self._client.request("GET", self._path, headers)

    def _accept(self, response: aiohttp.ClientResponse) -> bool:
        """Check the head of an answer; False when it says that nothing is left to read."""
        headers, status = response.headers, response.status
        if status not in {200, 206}:
            raise self._client.bad_status(self._path, response)
        self._refuse_encoding(response)
        length = content_length(headers)
        answered = parse_content_range(headers.get("Content-Range"))
        if status == 206:
            if answered is None or answered.start != self._position or answered.end is None:
                raise self._client.refused(
                    self._path, response, f"bytes from {self._position:,} on were asked for, and it gives "
                    f"{headers.get('Content-Range', 'no Content-Range')[:80]!r}"
                )  # fmt: skip
            if length is not None and length != answered.end - self._position:
                raise self._client.refused(self._path, response, "its Content-Length and Content-Range disagree")
            total, self._skip = answered.total, 0
        else:
            total, self._skip = length, self._position
        self._compare(Version.of(headers, total), response)
        if self._length is not None:
            assert self._end is not None
            if total is not None and self._end > total:
                raise self._out_of_bounds(total)
            if self._position == self._start and self._skip > self._client.range_gap:
                raise self._client.refused(
                    self._path, response, "it ignores Range; read whole objects, or use a server with byte ranges"
                )
        elif total is not None:
            check_size(self._path, total, self._max_bytes)
            check_start(self._path, total, self._start)
            self._end = total
        elif status == 206 and self._position == self._start:
            raise self._client.refused(
                self._path, response, "it gives a part and does not state the object's size, so that nobody knows "
                "whether the part reaches to its end"
            )  # fmt: skip
        elif status == 200 and headers.get("Transfer-Encoding", "").lower() != "chunked":
            raise self._client.refused(
                self._path, response, "it states neither Content-Length nor chunks, so that a broken connection would "
                "look like the object's end"
            )  # fmt: skip
        if status == 200 and self._position == self._start == 0 and self._length is None and self._client.verify:
            declared = declared_digest(headers)
            self._digest = declared and (hashlib.new(declared[0], usedforsecurity=False), declared[1])
        return self._end is None or self._position < self._end

    def _refuse_end(self, size: int, response: aiohttp.ClientResponse) -> None:
        """Refuse an object that was over before the position was reached."""
        check_start(self._path, size, self._start)
        raise self._changed(response)

    def _refuse_encoding(self, response: aiohttp.ClientResponse) -> None:
        if (encoding := foreign_encoding(response.headers)) and not self._client.encoded:
            raise self._client.refused(
                self._path, response, f"its bytes are encoded ({encoding[:40]!r}) although they were asked for as they "
                "are; turn the encoding off in the server, or pass encoded=True to take them as the object's"
            )  # fmt: skip

    async def _accept_nothing(self, scope: Scope, response: aiohttp.ClientResponse) -> bool:
        """See what it means that the server has no bytes from the position on; as `_accept`."""
        answered = parse_content_range(response.headers.get("Content-Range"))
        size = None if answered is None else answered.total
        if self._position == self._start:
            if self._length is not None:
                raise self._out_of_bounds(size)
            if not self._start:
                raise self._client.bad_status(self._path, response)
            if size is None:
                self.close()
                size = (await self._measure(scope)).size
            if size > self._start:
                raise self._client.refused(
                    self._path, response, f"bytes from {self._start:,} on were asked for, and it has {size:,}"
                )
            check_start(self._path, size, self._start)
            return False  # the stream begins where the object ends
        if size == self._position and self._end is None:
            return False  # it broke behind the last byte
        raise self._changed(response)

    def _compare(self, version: Version, response: aiohttp.ClientResponse) -> None:
        if self.version is None:
            self.version = version
        elif self.version.differs(version) or (self._skip and not self.version.proves(version)):
            raise self._changed(response)

    def _changed(self, response: aiohttp.ClientResponse) -> ReadFailed:
        return self._client.refused(
            self._path, response, "the object changed while it was read; the bytes of two versions are never mixed. "
            "Read it again, and write objects under new names instead of replacing them"
        )  # fmt: skip

    def _out_of_bounds(self, size: int | None) -> RangeOutOfBounds:
        has = "it ends before" if size is None else f"it has {size:,} bytes"
        return RangeOutOfBounds(
            f"bytes {self._start:,} to {self._start + (self._length or 0):,} of {self._path!r} were asked for, but "
            f"{has}; the index that named the range may belong to another version of the object",
            path=self._path,
            size=size,
        )
