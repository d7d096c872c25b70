"""Downloads one object through obstore: sends range requests, checks the responses, and resumes after a break.

Data path: object_store -> [object_store_download] -> object_store_client -> obstore -> store.

`download` has the part that is common to all downloads. A broken download continues with a range and ``If-Match``, if
the store sent a strong ETag, as S3, GCS and Azure do; otherwise it begins again, and the bytes are compared.

obstore could retry by itself, but its retries are disabled for objects: it would not count them, its time limit would
elapse while a stream's consumer is busy, and it would report a changed object as a broken one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import TYPE_CHECKING

from asyncloader.transports.checks import check_size, check_start
from asyncloader.transports.download import Download
from asyncloader.transports.network_client import Scope
from asyncloader.transports.object_store_client import StoreClient, status_of
from asyncloader.transports.object_version import Version
from asyncloader.transports.retry import RequestFailed

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta

# A body of up to this size is read in one await. A larger body is read in parts, so that it can be resumed.
_SMALL = 1 << 20
_PART = 1 << 20


class StoreDownload(Download[StoreClient]):
    """One object of an object store, or one range of it. The arguments are those of `Download`."""

    def __init__(
        self, client: StoreClient, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__(client, path, start, length, max_bytes)
        self._body: AsyncIterator[bytes] | None = None
        self._spare = b""  # bytes received beyond those that the caller asked for

    def _classify_error(self, error: BaseException) -> RequestFailed | None:
        failed = self._client.classify_error(error, self._path)
        if isinstance(error, TimeoutError) and self._body is not None:
            text = f"the answer was slower than min_bytes_per_s={self._client.min_bytes_per_s:g}"
            return RequestFailed("slow", text, cause=error)
        if failed is not None and failed.kind == "status 412":
            changed = self._changed_error()
            if isinstance(changed, RequestFailed):
                return changed
            return RequestFailed(failed.kind, failed.text, retryable=False, cause=error, final=changed)
        return failed

    def _drop(self) -> None:
        self._body = None
        self._spare = b""

    async def _read_all(self, scope: Scope) -> None:
        if self._attempts is None:
            await self._read_small(scope)
        await super()._read_all(scope)

    async def _read_small(self, scope: Scope) -> None:
        """Read a small body in one await: half the round trips to obstore's threads."""
        result = await self._open(scope)
        if result is None:
            return
        assert self._end is not None
        if self._end - self._position > _SMALL:
            self._body = aiter(result.stream(_PART))
            return
        scope.limit(self._client.slow_s(self._end - self._position))
        data = (await result.bytes_async()).to_bytes()[: self._end - self._position]
        scope.limit(None)
        if self._position + len(data) != self._end:
            raise RequestFailed.short(self._position + len(data), self._end)
        self._advance(len(data))
        self._parts.append(data)
        self._finish()

    async def _next(self, scope: Scope, most: int) -> bytes:
        """Return the next bytes, at most `most` (0: as they arrive); none at the end."""
        if self._done:
            return b""
        if self._body is None:
            result = await self._open(scope)
            if result is None:
                return b""
            # obstore returns parts of at least the size asked for, often larger: with half of `most`, they seldom
            # exceed `most`.
            self._body = aiter(result.stream(max(1, most // 2) if most else _PART))
        data, self._spare = self._spare, b""
        # obstore returns a part when it has all of its bytes, so that only a limit can end the wait for a slow store.
        slow_s = self._client.slow_s(most or _PART)
        while not data:
            scope.limit(slow_s)
            try:
                data = self._drop_skipped(await self._wait(anext(self._body), slow_s or inf))
            except StopAsyncIteration:
                raise RequestFailed.short(self._position, self._end or 0) from None
        scope.limit(None)
        end = self._end if self._until is None else self._until
        assert end is not None
        data = data[: end - self._position]  # the body may be longer than its head states
        if most and len(data) > most:
            data, self._spare = data[:most], data[most:]
        self._advance(len(data))
        self._end_response()
        return data

    async def _open(self, scope: Scope) -> GetResult | None:
        """Take a slot and request the remaining bytes; None if nothing is left."""
        await self._take_slot()
        options: GetOptions = {}
        first, end = self._position, self._asked_end()
        if end is not None and (self._length is not None or first or end != self._end):
            options["range"] = (first, end)
        elif first:
            options["range"] = {"offset": first}
        if first > self._start and self.version is not None:
            options["if_match"] = self.version.validator
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
            # Takes the body out and drops it. Dropping `result` is not enough: the error's traceback may keep it alive,
            # and obstore's threads release their part of it only at their next call.
            result.stream()
            raise
        self._finish()
        return None

    def _accept(self, meta: ObjectMeta, given: tuple[int, int]) -> bool:
        """Check the head of a response; False if nothing is left to read."""
        size = meta["size"]
        first = self._position
        self._check_version(first, Version(meta["e_tag"], size=size))
        if self._length is not None:
            assert self._end is not None
            if self._end > size:
                raise self._out_of_bounds(size)
        else:
            check_size(self._path, size, self._max_bytes)
            check_start(self._path, size, self._start)
            self._end = size
        end = self._asked_end()
        assert end is not None
        if given != (first, end):
            raise RequestFailed("wrong range", f"bytes {first:,} to {end:,} were asked for, not {given}")
        self._until = end if end < self._end else None
        return self._position < self._end

    async def _accept_nothing(self, scope: Scope, error: Exception) -> None:
        """Interpret a response that has no bytes from the position on."""
        if self._position > self._start:
            raise self._changed_error() from error
        if self._length is not None:
            raise self._out_of_bounds(None) from error
        meta = await self._client.head(scope, self._path)
        check_start(self._path, meta["size"], self._start)
        if meta["size"] > self._start:
            raise RequestFailed(
                "status 416", f"bytes from {self._start:,} on were asked for, and it has {meta['size']:,}"
            )
        self._finish()  # the stream begins where the object ends
