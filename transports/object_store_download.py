"""The bytes of one object over as many requests as it takes. Data path: obstore -> [download] -> transport's caller.

A download that breaks goes on where it broke, by a range and ``If-Match``, if the store had given a strong ETag;
all three stores do. Without one, a read whose bytes nobody has seen begins again, and a stream fails. An object
that changed is an error.

obstore could go on by itself. It is told not to: it would not count what it repeats, its time would run out
while the caller of a stream is busy with other things, and it would report a changed object as a broken one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.checks import check_size, check_start
from asyncloader.transports.errors import RangeOutOfBounds, ReadFailed
from asyncloader.transports.http_trouble import Broken
from asyncloader.transports.object_store_client import StoreClient
from asyncloader.transports.object_store_session import Scope
from asyncloader.transports.object_store_trouble import status_of
from asyncloader.transports.retry import Attempts

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

__all__ = ["Download", "strong_etag"]

_R = TypeVar("_R")

# Bytes that count as progress, so that the budget of the retries starts again. See `Attempts.progressed`.
_PROGRESS = 1 << 16

# Up to this a body is taken in one wait. A larger one comes in parts, so that one that breaks is resumed.
_SMALL = 1 << 20
_PART = 1 << 20


class Download:
    """One object, or one range of it. `rest` gives it whole, `part` in pieces; `close` when it is left early.

    Args:
        client: sends the requests.
        path: the object.
        start: the first byte.
        length: bytes, above 0; None for all up to the end of the object.
        max_bytes: with `length` None, refuse an object that is larger.
    """

    def __init__(
        self, client: StoreClient, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.info: ObjectInfo | None = None  # of the version that is read; the ETag only if it is strong
        self._tag: str | None = None  # the ETag as it came
        self._client = client
        self._path = path
        self._start = start
        self._length = length
        self._max_bytes = max_bytes
        self._position = start  # of the next byte that is given
        self._end = None if length is None else start + length
        self._mark = start  # where the retries' budget started
        self._done = False
        self._slots: asyncio.Semaphore | None = None  # while one of them is ours
        self._body: AsyncIterator[bytes] | None = None
        self._spare = b""  # arrived, and too much for the part that was asked for
        self._attempts: Attempts | None = None
        self._paused_at = 0.0
        self._queued_s = 0.0  # waited for a slot since the last failure; no part of an outage
        self._parts: list[bytes] = []

    async def rest(self) -> bytes:
        """Give all bytes."""
        try:
            await self._run(self._read_all)
        finally:
            self.close()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def part(self, most: int) -> bytes:
        """Give the next bytes, `most` at most; none at the end."""
        if self._attempts is not None:
            # What the caller did meanwhile is no part of the outage.
            self._attempts.paused(asyncio.get_running_loop().time() - self._paused_at)
        data = await self._run(lambda scope: self._next(scope, most), keep=True)
        self._paused_at = asyncio.get_running_loop().time()
        return data

    def close(self) -> None:
        """Drop the answer, and with it the connection if it was not read to its end; give the slot back."""
        self._body = None
        self._spare = b""
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
                self.close()
                broken = self._client.trouble(error, self._path)
                if broken is None:
                    raise
                if broken.kind == "status 412":
                    raise self._changed() from error
                proved = self.info is not None and self.info.etag is not None
                if keep and self._position > self._start and not proved:
                    raise self._client.failure(
                        self._path,
                        broken,
                        f"{self._position - self._start:,} bytes were given already, and the store sends no strong "
                        "ETag by which to go on safely",
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
        self.info = self._tag = None
        self._parts.clear()

    async def _read_all(self, scope: Scope) -> None:
        if self._attempts is None:
            await self._read_small(scope)
        while data := await self._next(scope, 0):
            self._parts.append(data)

    async def _read_small(self, scope: Scope) -> None:
        """Take a small body in one wait: half the trips to obstore's threads and back."""
        result = await self._open(scope)
        if result is None:
            return
        assert self._end is not None
        if self._end - self._position > _SMALL:
            self._body = aiter(result.stream(_PART))
            return
        data = (await result.bytes_async()).to_bytes()
        if self._position + len(data) != self._end:
            raise Broken("short body", f"the answer ended at byte {self._position + len(data):,} of {self._end:,}")
        self._position = self._end
        self._parts.append(data)
        self._finish()

    async def _next(self, scope: Scope, most: int) -> bytes:
        """Give the next bytes, `most` at most (0: as they come); none at the end."""
        if self._done:
            return b""
        if self._body is None:
            result = await self._open(scope)
            if result is None:
                return b""
            # Half of it at least, so that what comes as one piece with the rest of a packet seldom needs a cut.
            self._body = aiter(result.stream(max(1, most // 2) if most else _PART))
        data, self._spare = self._spare, b""
        while not data:
            try:
                data = await anext(self._body)
            except StopAsyncIteration:
                raise Broken(
                    "short body", f"the answer ended at byte {self._position:,} of {self._end or 0:,}"
                ) from None
        if most and len(data) > most:
            data, self._spare = data[:most], data[most:]
        self._position += len(data)
        if self._position == self._end:
            self._finish()
        return data

    def _finish(self) -> None:
        self._done = True
        self.close()

    async def _open(self, scope: Scope) -> GetResult | None:
        """Take a slot and ask for what is left; None when nothing is."""
        slots = self._client.owner.use().slots
        if slots.locked():
            loop = asyncio.get_running_loop()
            began = loop.time()
            await slots.acquire()
            self._queued_s += loop.time() - began
        else:
            await slots.acquire()  # does not wait
        self._slots = slots
        options: GetOptions = {}
        if self._end is not None and (self._length is not None or self._position):
            options["range"] = (self._position, self._end)
        elif self._position:
            options["range"] = {"offset": self._position}
        if self._position > self._start and self.info is not None:
            options["if_match"] = self.info.etag
        try:
            result = await self._client.get(scope, self._path, options)
        except Exception as error:
            if status_of(error) != 416:
                raise
            await self._accept_nothing(scope, error)
            return None
        try:
            if self._accept(result.meta, result.range):
                return result
        except BaseException:
            # Takes the body out and drops it. To drop `result` would not do: the error's traceback may keep it, and
            # obstore's threads give back what they hold of it no sooner than at their next call.
            result.stream()
            raise
        self._finish()
        return None

    def _accept(self, meta: ObjectMeta, given: tuple[int, int]) -> bool:
        """Check the head of an answer; False when nothing is left to read."""
        size, tag = meta["size"], meta["e_tag"]
        if self.info is None:
            self.info, self._tag = ObjectInfo(size, strong_etag(tag)), tag
        elif (size, tag) != (self.info.size, self._tag):
            raise self._changed()
        if self._length is not None:
            assert self._end is not None
            if self._end > size:
                raise self._out_of_bounds(size)
        else:
            check_size(self._path, size, self._max_bytes)
            check_start(self._path, size, self._start)
            self._end = size
        if given != (self._position, self._end):
            raise Broken("wrong range", f"bytes {self._position:,} to {self._end:,} were asked for, not {given}")
        return self._position < self._end

    async def _accept_nothing(self, scope: Scope, error: Exception) -> None:
        """See what it means that the store has no bytes from the position on."""
        if self._position > self._start:
            raise self._changed() from error
        if self._length is not None:
            raise self._out_of_bounds(None) from error
        meta = await self._client.head(scope, self._path)
        check_start(self._path, meta["size"], self._start)
        if meta["size"] > self._start:
            raise Broken("status 416", f"bytes from {self._start:,} on were asked for, and it has {meta['size']:,}")
        self._finish()  # the stream begins where the object ends

    def _changed(self) -> ReadFailed:
        return ReadFailed(
            f"reading {self._path!r} failed: {self._client.place.url}: the object changed while it was read; the bytes "
            "of two versions are never mixed. Read it again, and write objects under new names instead of replacing "
            "them",
            path=self._path,
        )

    def _out_of_bounds(self, size: int | None) -> RangeOutOfBounds:
        has = "it ends before" if size is None else f"it has {size:,} bytes"
        return RangeOutOfBounds(
            f"bytes {self._start:,} to {self._start + (self._length or 0):,} of {self._path!r} were asked for, but "
            f"{has}; the index that named the range may belong to another version of the object",
            path=self._path,
            size=size,
        )


def strong_etag(tag: str | None) -> str | None:
    """Give an ETag that stands for the bytes, None when it does not (a weak one) or there is none."""
    return None if not tag or tag.startswith(("W/", "w/")) else tag
