"""Downloads an object by one or more requests, and decides which failed requests are retried.

Data path: http, object_store -> [download] -> http_client, object_store_client -> server.

`Download` reads one object or range: it keeps the position, a request slot and the retries. How a request is sent and a
response understood is up to its subclasses, `HttpDownload` and `StoreDownload`. `NetworkTransport` is the part of a
transport that all networks share.

*One version.* A download that breaks continues where it broke, if the validator of the new answer proves that the
object is unchanged: a server may ignore ``If-Range``. Without such a proof a read begins again, with the object as it
is now, and a stream that has returned bytes raises.

*A slow peer.* A response that brings fewer than `min_bytes_per_s` over `SLOW_S` seconds of waiting is given up, like a
response that stalls: a server that sends a byte now and then would keep a read going for ever. Only waiting for the
network counts, not the time that a consumer takes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from asyncloader.telemetry.counters import count, span
from asyncloader.transports.base import ObjectInfo, PinnedReader, Transport, changed_error, gather_all, overrides
from asyncloader.transports.checks import check_chunk_size, check_path, check_size, check_start
from asyncloader.transports.errors import RangeOutOfBounds, ReadFailed
from asyncloader.transports.network_client import NetworkClient
from asyncloader.transports.object_version import Version
from asyncloader.transports.pinned import PinnedObject
from asyncloader.transports.retry import RequestFailed

if TYPE_CHECKING:
    from asyncloader.transports.network_client import Scope
    from asyncloader.transports.retry import Attempts, RetryCounts

SLOW_S = 60.0  # seconds of waiting over which the rate of a response is measured

_R = TypeVar("_R")

_CHANGED = (
    "the object changed while it was read, or nothing proves that it did not; the bytes of two versions are never "
    "mixed. Read it again, and write objects under new names instead of replacing them"
)
_PROGRESS = 1 << 16  # bytes after which the budget of the retries starts again: `Attempts.progressed`
_NO_PROGRESS = frozenset({"slow", "changed", "unproved"})  # failures that would otherwise be retried for ever
_ANEW = frozenset({"changed", "unproved"})  # failures after which a read begins again

_K = TypeVar("_K", bound=NetworkClient[Any])


class Download(ABC, Generic[_K]):
    """Reads one object, or one range of it: `rest` at once, `part` in chunks. If it is left early, `close` must be
    called.

    Args:
        client: sends the requests.
        path: the object.
        start: the first byte.
        length: bytes, above 0; None for all up to the end of the object.
        max_bytes: with `length` None, refuse an object that is larger.

    Attributes:
        version: the version of the bytes returned so far; None until the first response.
    """

    def __init__(
        self, client: _K, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.version: Version | None = None
        self._client = client
        self._path = path
        self._start = start
        self._length = length
        self._max_bytes = max_bytes
        self._position = start  # of the next byte to return
        self._returned = start  # the position after the bytes that `part` has returned
        self._end: int | None = None if length is None else start + length  # None: not known yet
        self._stop: int | None = None  # as of `ask_to`
        self._until: int | None = None  # the present response ends here, and the object does not
        self._mark = start  # the position when the retry budget last started
        self._done = False
        # Set while this download holds a slot, which is released to the same semaphore: `NetworkClient` makes another
        # semaphore when it opens a client for another loop or process.
        self._slots: asyncio.Semaphore | None = None
        self._attempts: Attempts | None = None
        self._paused_at = 0.0
        self._requested = 0.0  # when it got that slot
        self._parts: list[bytes] = []
        self._skip = 0  # bytes of this response that lie before the position
        self._waited_s = 0.0  # for the network, since the rate was last checked
        self._waited_bytes = 0

    def ask_to(self, stop: int | None) -> None:
        """Request the bytes from `stop` on only when `part` asks for them. Called before it, and without `length`."""
        self._stop = stop if stop is not None and stop > self._start else None

    async def rest(self) -> bytes:
        """Return all bytes."""
        try:
            await self._run(self._read_all)
            return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        finally:
            # The traceback of a retried failure refers to this download, and to itself by the failure: it would keep
            # the bytes in memory until the garbage collector runs.
            self._parts = []

    async def part(self, most: int) -> bytes:
        """Return the next bytes, at most `most`; none at the end."""
        if self._attempts is not None:
            # Time that the caller spent between two calls is not part of the outage.
            self._attempts.paused(asyncio.get_running_loop().time() - self._paused_at)
        data = await self._run(lambda scope: self._next(scope, most))
        self._returned = self._position
        self._paused_at = asyncio.get_running_loop().time()
        return data

    def close(self) -> None:
        """Drop the response, and its connection unless it was read to its end; release the slot."""
        self._drop()
        if self._slots is not None:
            self._slots.release()
            self._slots = None
            span("read", perf_counter() - self._requested)

    # --- implemented by subclasses

    @abstractmethod
    async def _next(self, scope: Scope, most: int) -> bytes:
        """Return the next bytes, at most `most` (0: as they arrive); none at the end. Calls `_finish` there."""

    @abstractmethod
    def _classify_error(self, error: BaseException) -> RequestFailed | None:
        """Classify an error; None if it does not come from the store. Called before the response is dropped."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the response, if any."""

    def _finish(self) -> None:
        """Note that all bytes were returned."""
        self._done = True
        self.close()

    def _asked_end(self) -> int | None:
        """Return where the next request ends; None: where the object does, which is not known yet."""
        if self._stop is None or self._position >= self._stop:
            return self._end
        return self._stop if self._end is None else min(self._stop, self._end)

    def _end_response(self) -> None:
        """Finish, or release the response, if its last byte was returned."""
        if self._position == self._end:
            self._finish()
        elif self._position == self._until:
            self.close()

    # --- common to all subclasses

    async def _run(self, step: Callable[[Scope], Awaitable[_R]]) -> _R:
        """Repeat `step` until it succeeds or must not be retried."""
        return await self._client.until_done(
            self._path, step, self._classify, recover=self._recover, attempts=self._attempts
        )

    def _classify(self, error: BaseException) -> RequestFailed | None:
        try:
            return self._classify_error(error)
        finally:
            # The slot is not held during the delay that follows: other requests may need it.
            self.close()

    def _recover(self, failed: RequestFailed, attempts: Attempts) -> bool:
        """Prepare the next request: for the bytes behind those that arrived, or for all. Return whether it is no retry,
        because only the request was too short.
        """
        self._attempts = attempts
        given = self._returned > self._start
        # Only with a validator can the next answer prove that it continues this version.
        proved = self.version is not None and self.version.validator is not None
        if given and not proved and failed.retryable:
            failed.retryable, failed.final = False, self._changed(failed.text)
        if proved and failed.kind not in _NO_PROGRESS and self._position - self._mark >= _PROGRESS:
            attempts.progressed(asyncio.get_running_loop().time())
            self._mark = self._position
        if given:
            self._position = self._returned
        elif not proved or failed.kind in _ANEW or self._position == self._start:
            # Nothing has reached the caller: the object is read as it is now.
            self._position = self._mark = self._start
            self._end = None if self._length is None else self._start + self._length
            self.version = None
            self._parts.clear()
        if failed.retryable and self._position > self._start:
            self._client.counts.resume()
        return failed.kind == "unproved"

    async def _wait(self, arriving: Awaitable[bytes], most_s: float) -> bytes:
        """Wait for the next bytes of a response, and measure its rate. A wait counts as `most_s` seconds at most: after
        that it would have timed out, if the loop had not been blocked.

        Raises:
            RequestFailed: the response is too slow.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        data = await arriving
        self._waited_s += min(loop.time() - began, most_s)
        self._waited_bytes += len(data)
        if data and self._waited_s >= SLOW_S:
            seconds, nbytes = self._waited_s, self._waited_bytes
            self._waited_s, self._waited_bytes = 0.0, 0
            if nbytes < self._client.min_bytes_per_s * seconds:
                least = self._client.min_bytes_per_s
                rate = f"{nbytes / seconds:,.1f} bytes per second over {seconds:.0f} s"
                raise RequestFailed("slow", f"the answer came at {rate}, which is below min_bytes_per_s={least:g}")
        return data

    def _check_version(self, first: int, version: Version) -> None:
        """Check that a response, whose bytes begin at `first`, continues the bytes that were returned so far.

        Raises:
            RequestFailed: its version is not proved, and nothing was returned yet; the next attempt begins again.
            ReadFailed: it is of another version, or the version cannot be proved.
        """
        self._waited_s, self._waited_bytes = 0.0, 0
        self._skip = self._position - first
        if self.version is None:
            if self._stop is not None and version.validator is None:
                # Nothing could prove that the bytes behind the stop are of this version: all are asked for at once.
                self._stop = None
                raise RequestFailed("unproved", "nothing identifies the version")
            self.version = version
        elif not self.version.proves(version):
            raise self._changed_error()

    def _drop_skipped(self, data: bytes) -> bytes:
        """Return the part of the arrived bytes that lies after the position."""
        dropped = min(self._skip, len(data))
        self._skip -= dropped
        return data[dropped:]

    def _advance(self, nbytes: int) -> None:
        """Note that the next bytes of the object have arrived."""
        self._position += nbytes
        count("bytes", nbytes)

    def _changed_error(self) -> ReadFailed | RequestFailed:
        """Make the error for another version of the object; if nothing was returned yet, it is read from its start."""
        if self._returned == self._start:
            return RequestFailed("changed", "the object changed while it was read, or its answer names no version")
        return self._changed("")

    def _changed(self, why: str) -> ReadFailed:
        where = f"{self._client.where(self._path)}: {why}{'; ' if why else ''}"
        return ReadFailed(f"reading {self._path!r} failed: {where}{_CHANGED}", path=self._path)

    async def _read_all(self, scope: Scope) -> None:
        while not self._done and (data := await self._next(scope, 0)):
            self._parts.append(data)

    async def _take_slot(self) -> None:
        """Wait until a request may be sent; `close` releases the slot. Called within a scope, which has made the
        semaphore that belongs to this loop.
        """
        slots = self._client.slots
        await slots.acquire()
        self._slots = slots
        self._requested = perf_counter()
        count("requests")

    def _out_of_bounds(self, size: int | None) -> RangeOutOfBounds:
        has = "it ends before" if size is None else f"it has {size:,} bytes"
        return RangeOutOfBounds(
            f"bytes {self._start:,} to {self._start + (self._length or 0):,} of {self._path!r} were asked for, but "
            f"{has}; the index that named the range may belong to another version of the object",
            path=self._path,
            size=size,
        )


async def read_blocks(
    client: NetworkClient[Any], path: str, downloads: Sequence[Download[Any]], requests: int
) -> list[bytes]:
    """Read ranges of one object, at most `requests` at the same time; in order.

    Raises:
        ReadFailed: the object changed between the requests.
        The error of the first download that fails; the others are cancelled.
    """
    if len(downloads) <= 1:
        return [await download.rest() for download in downloads]
    slots = asyncio.Semaphore(requests)

    async def fetch(download: Download[Any]) -> bytes:
        async with slots:
            return await download.rest()

    blocks = await gather_all(fetch(download) for download in downloads)
    # Checked when all answers have come: a download knows only the version of its own answer.
    versions = [download.version for download in downloads if download.version is not None]
    if any(map(versions[0].differs, versions)):
        raise changed_error(path)
    if not all(map(versions[0].resembles, versions)):
        raise ReadFailed(
            f"{path!r} in {client.where(None)} has answers with neither ETag nor Last-Modified, so that parts, read by "
            "several requests, may be of several versions; read it as a whole, or have the server send one of them",
            path=path,
        )
    return blocks


class NetworkTransport(Transport, Generic[_K]):
    """A transport that reads objects by downloads with retries; `retries` counts them.

    Args:
        client: sends the requests.
        root: the URL as it was given; the first argument of the subclass's constructor.
        options: its other arguments, by name.
    """

    # Raises InvalidPath for paths that cannot name an object of this store.
    _check = staticmethod(check_path)

    def __init__(self, client: _K, root: str, options: Mapping[str, Any]) -> None:
        self._client = client
        self._root = root
        self._options = options

    def __repr__(self) -> str:
        state = "closed" if self._client.closed else "open"
        return f"<{type(self).__name__} {self._client.where(None)!r} requests={self._options['requests']} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return partial(type(self), **self._options), (self._root,)

    @property
    def requests(self) -> int:
        """Maximum number of concurrent requests in one process."""
        return int(self._options["requests"])

    @property
    def retries(self) -> RetryCounts:
        """Retry statistics of this transport in this process."""
        return self._client.counts

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport for a URL; the options are the constructor's."""
        make: Any = cls  # a subclass, which takes a URL in place of a client
        made: Self = make(url, **options)
        return made

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object, like `Transport.read`; a download that breaks is resumed."""
        return (await self.read_with_info(path, max_bytes=max_bytes))[0]

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version in one request, like `Transport.read_with_info`."""
        self._check(path)
        check_size(path, 0, max_bytes)
        download = self._download(path, max_bytes=max_bytes)
        data = await download.rest()
        return data, ObjectInfo(len(data), download.version and download.version.name)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range, like `Transport.read_range`."""
        return (await self.read_ranges(path, [(start, length)]))[0]

    async def size(self, path: str) -> int:
        """Return an object's size, by the request of `info`, like `Transport.size`."""
        return (await self.info(path)).size

    async def info(self, path: str) -> ObjectInfo:
        """Return an object's size and version, like `Transport.info`: a strong ETag, or a date that is old enough."""
        version = await self.version(path)
        assert version.size is not None  # otherwise SizeUnknown was raised
        return ObjectInfo(version.size, version.name)

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, nearby ranges in one request, like `Transport.read_ranges`. All bytes are of one version.

        Raises:
            ReadFailed: also if the object changed between the requests.
        """
        data, _ = await self.read_ranges_with_versions(path, ranges)
        return data

    async def read_ranges_with_versions(
        self, path: str, ranges: Iterable[tuple[int, int]]
    ) -> tuple[Sequence[bytes], list[Version]]:
        """Read ranges like `read_ranges`, and return the version of each request's answer."""
        self._check(path)
        plan = self._plan(ranges)
        self._client.use()
        downloads = [self._download(path, block.start, block.length) for block in plan.blocks]
        blocks = await read_blocks(self._client, path, downloads, self.range_requests)
        return plan.cut(blocks), [download.version for download in downloads if download.version is not None]

    def pinned(self, path: str) -> PinnedReader:
        """Return a reader that compares the answers' versions, without further requests, like `Transport.pinned`."""
        return super().pinned(path) if overrides(self, NetworkTransport) else PinnedObject(self, path)

    @abstractmethod
    async def version(self, path: str) -> Version:
        """Return an object's version, with the request and the errors of `info`."""

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks as they arrive, like `Transport.stream`; a download that breaks is resumed.

        Raises:
            ReadFailed: also if the download breaks and the object has changed when it is resumed.
        """
        async with aclosing(self.stream_with_versions(path, start, chunk_size)) as chunks:
            async for chunk, _ in chunks:
                yield chunk

    async def stream_with_versions(
        self, path: str, start: int, chunk_size: int, stop: int | None = None
    ) -> AsyncGenerator[tuple[bytes, Version], None]:
        """Read an object like `stream`, and return each chunk with its version. The bytes from `stop` on are requested
        only when they are wanted: a response that is left before its end costs its connection.
        """
        self._check(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        download = self._download(path, start)
        download.ask_to(stop)
        try:
            while chunk := await download.part(chunk_size):
                assert download.version is not None  # there was a response
                yield chunk, download.version
        finally:
            download.close()

    async def aclose(self) -> None:
        """Interrupt calls in progress with TransportClosed, and close the connections, like `Transport.aclose`."""
        await self._client.aclose()

    @abstractmethod
    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> Download[_K]:
        """Make a download with this transport's client. `path` has been checked; the arguments are `Download`'s."""
