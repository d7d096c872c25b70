"""The bytes of one object over as many requests as it takes. Data path: answers -> [download] -> transport's caller.

A download that breaks goes on where it broke, as long as the store proves that the object is still the same one.
Without a proof, a read whose bytes nobody has seen begins again, and a stream fails. An object that did change is
an error.

`Download` has the positions, the slots and the retries. How an answer is asked for, read and understood is the
matter of `HttpDownload` and of `StoreDownload`.

What the transports that reach over a network share. Data path: dataset -> [transport] -> download -> server.

What becomes of requests that fail, whatever sends them. Data path: failed request -> [client] -> retry or error.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from asyncloader.transports.base import ObjectInfo, Transport, together
from asyncloader.transports.checks import check_chunk_size, check_path, check_size, check_start
from asyncloader.transports.errors import RangeOutOfBounds, ReadFailed
from asyncloader.transports.retry import Attempts, RetryCounts, RetryPolicy

if TYPE_CHECKING:
    from asyncloader.transports.client_owner import ClientOwner, Scope
    from asyncloader.transports.retry import Broken, RetryCounts

__all__ = [
    "CHANGED",
    "Download",
    "NetworkTransport",
    "ObjectVersion",
    "RetryingClient",
    "check_limits",
    "read_blocks",
]

_C = TypeVar("_C")


class RetryingClient(ABC, Generic[_C]):
    """Requests below one root. The network's own requests are a subclass's.

    Args:
        owner: has the connections.
        retry: what is tried again and for how long.
    """

    def __init__(self, owner: ClientOwner[_C], retry: RetryPolicy) -> None:
        self.owner = owner
        self.counts = RetryCounts()
        self._retry = retry

    @abstractmethod
    def where(self, path: str | None) -> str:
        """Give the URL of an object, or of what is nearest to it, for texts: without secrets. None: of the root."""

    def attempts(self, began: float, *, share: float = 0.5) -> Attempts:
        """Begin to keep account of an operation that has failed once; `share` as in `Attempts`."""
        return Attempts(self._retry, began, share=share)

    def judge(self, path: str | None, broken: Broken, attempts: Attempts, now: float) -> float:
        """Give the seconds to wait before the next attempt, and count it; raise the error if there is none."""
        if not broken.heals:
            raise broken.final or self.failure(path, broken) from broken.cause
        verdict = attempts.failed(now, broken.retry_after)
        if verdict.delay is None:
            self.counts.give_up()
            times = "once" if attempts.failures == 1 else f"{attempts.failures} times"
            raise self.failure(path, broken, f"tried {times}: {verdict.reason}") from broken.cause
        self.counts.retry(broken.kind, verdict.delay)
        return verdict.delay

    def failure(self, path: str | None, broken: Broken, note: str = "") -> ReadFailed:
        """Make the error of a request that failed for good; `path` None: of a listing."""
        subject = "the listing" if path is None else repr(path)
        text = f"reading {subject} failed: {self.where(path)}: {broken.text}{'; ' + note if note else ''}"
        error = ReadFailed(text, path=path)
        if isinstance(broken.cause, OSError):
            error.errno = broken.cause.errno
        return error


_R = TypeVar("_R")

CHANGED = (
    "the object changed while it was read; the bytes of two versions are never mixed. Read it again, and write "
    "objects under new names instead of replacing them"
)
"""What a subclass's error says about an object whose version is another one than before."""

# Bytes that count as progress, so that the budget of the retries starts again. See `Attempts.progressed`.
_PROGRESS = 1 << 16


class ObjectVersion(Protocol):
    """By what one version of an object is told from another."""

    @property
    def validator(self) -> str | None:
        """What stands for these very bytes, None when nothing does."""

    def differs(self, other: Self) -> bool:
        """Whether the two are certainly not the same version."""
        ...


_K = TypeVar("_K", bound=RetryingClient[Any])
_V = TypeVar("_V", bound=ObjectVersion)


class Download(ABC, Generic[_K, _V]):
    """One object, or one range of it. `rest` gives it whole, `part` in pieces; `close` when it is left early.

    Args:
        client: sends the requests.
        path: the object.
        start: the first byte.
        length: bytes, above 0; None for all up to the end of the object.
        max_bytes: with `length` None, refuse an object that is larger.

    Attributes:
        version: what the bytes given so far are of; None as long as nothing was answered.
    """

    peer: ClassVar[str]
    """What texts call the other side."""

    def __init__(
        self, client: _K, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> None:
        self.version: _V | None = None
        self._client = client
        self._path = path
        self._start = start
        self._length = length
        self._max_bytes = max_bytes
        self._position = start  # of the next byte that is given
        self._end: int | None = None if length is None else start + length  # None: not known yet
        self._mark = start  # where the retries' budget started
        self._done = False
        self._slots: asyncio.Semaphore | None = None  # while one of them is ours
        self._attempts: Attempts | None = None
        self._paused_at = 0.0
        self._queued_s = 0.0  # waited for a slot since the last failure; no part of an outage
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

    def close(self) -> None:
        """Drop the answer, and its connection unless it was read to its end; give the slot back."""
        self._drop()
        if self._slots is not None:
            self._slots.release()
            self._slots = None

    # --- what a subclass adds

    @abstractmethod
    async def _next(self, scope: Scope, most: int) -> bytes:
        """Give the next bytes, `most` at most (0: as they come); none at the end. Calls `_finish` there."""

    @abstractmethod
    def _trouble(self, error: BaseException) -> Broken | None:
        """Say what an error means; None when it is not the store's. The answer has not been dropped yet."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of the answer, if there is one."""

    def _restart(self) -> None:
        """Begin again, with whatever version the object has then."""
        self._position = self._mark = self._start
        self._end = None if self._length is None else self._start + self._length
        self.version = None
        self._parts.clear()

    def _finish(self) -> None:
        """Note that all bytes were given."""
        self._done = True
        self.close()

    # --- what is the same for all

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
                try:
                    broken = self._trouble(error)
                finally:
                    self.close()
                if broken is None:
                    raise
                proved = self.version is not None and self.version.validator is not None
                if keep and self._position > self._start and not proved:
                    note = f"{self._position - self._start:,} bytes were given already"
                    if self.version is not None:
                        note += f", and the {self.peer} sends no strong ETag by which to go on safely"
                    raise self._client.failure(self._path, broken, note) from broken.cause
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

    async def _read_all(self, scope: Scope) -> None:
        while not self._done and (data := await self._next(scope, 0)):
            self._parts.append(data)

    async def _take_slot(self) -> None:
        """Wait until a request may be made; `close` gives the slot back. Within a scope: that has seen to the loop."""
        slots = self._client.owner.slots
        if slots.locked():
            loop = asyncio.get_running_loop()
            began = loop.time()
            await slots.acquire()
            self._queued_s += loop.time() - began
        else:
            await slots.acquire()  # does not wait
        self._slots = slots

    def _out_of_bounds(self, size: int | None) -> RangeOutOfBounds:
        has = "it ends before" if size is None else f"it has {size:,} bytes"
        return RangeOutOfBounds(
            f"bytes {self._start:,} to {self._start + (self._length or 0):,} of {self._path!r} were asked for, but "
            f"{has}; the index that named the range may belong to another version of the object",
            path=self._path,
            size=size,
        )


async def read_blocks(
    client: RetryingClient[Any], path: str, downloads: Sequence[Download[Any, Any]], requests: int
) -> list[bytes]:
    """Read ranges of one object, `requests` of them at the same time at most; in order.

    Raises:
        ReadFailed: the object changed between the requests.
        The error of the first download that fails; the others are cancelled.
    """
    if len(downloads) <= 1:
        return [await download.rest() for download in downloads]
    slots = asyncio.Semaphore(requests)

    async def fetch(download: Download[Any, Any]) -> bytes:
        async with slots:
            return await download.rest()

    blocks = await together(fetch(download) for download in downloads)
    versions = [download.version for download in downloads if download.version is not None]
    if any(versions[0].differs(each) for each in versions):
        raise ReadFailed(
            f"{path!r} in {client.where(None)} changed between the requests for its parts; read it again, and write "
            "objects under new names instead of replacing them",
            path=path,
        )
    return blocks


class NetworkTransport(Transport, Generic[_K]):
    """A transport whose objects are read by downloads that are tried again; `retries` counts that.

    Args:
        client: sends the requests.
        root: the URL as it was given, and the first argument of the subclass's constructor.
        options: its other arguments, by name.
    """

    # Refuses a path that cannot be an object's here, with InvalidPath.
    _check = staticmethod(check_path)

    def __init__(self, client: _K, root: str, options: Mapping[str, Any]) -> None:
        self._client = client
        self._root = root
        self._options = options

    def __repr__(self) -> str:
        state = "closed" if self._client.owner.closed else "open"
        return f"<{type(self).__name__} {self._client.where(None)!r} requests={self._options['requests']} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[str]]:
        return partial(type(self), **self._options), (self._root,)

    @property
    def retries(self) -> RetryCounts:
        """What was tried again so far, by this transport in this process."""
        return self._client.counts

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object; a download that breaks is resumed. As `Transport.read`."""
        self._check(path)
        check_size(path, 0, max_bytes)
        return await self._download(path, max_bytes=max_bytes).rest()

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version in one request. As `Transport.read_with_info`."""
        self._check(path)
        check_size(path, 0, max_bytes)
        download = self._download(path, max_bytes=max_bytes)
        data = await download.rest()
        return data, ObjectInfo(len(data), download.version and download.version.validator)

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range. As `Transport.read_range`."""
        self._check(path)
        if start < 0 or length < 0:
            raise ValueError(f"a byte range needs start and length of 0 or more, got start={start}, length={length}")
        if not length:
            self._client.owner.use()
            return b""
        return await self._download(path, start, length).rest()

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, near ones in one request, all of one version of the object. As `Transport.read_ranges`.

        Raises:
            ReadFailed: also when the object changed between the requests.
        """
        self._check(path)
        plan = self._plan(ranges)
        self._client.owner.use()
        downloads = [self._download(path, block.start, block.length) for block in plan.blocks]
        return plan.cut(await read_blocks(self._client, path, downloads, self.range_requests))

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks as they arrive; a download that breaks is resumed. As `Transport.stream`.

        Raises:
            ReadFailed: also when it breaks, and the server sends no strong ETag by which to resume.
        """
        self._check(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        download = self._download(path, start)
        try:
            while chunk := await download.part(chunk_size):
                yield chunk
        finally:
            download.close()

    async def aclose(self) -> None:
        """End calls in progress with TransportClosed, and close the connections. As `Transport.aclose`."""
        await self._client.owner.aclose()

    @abstractmethod
    def _download(
        self, path: str, start: int = 0, length: int | None = None, max_bytes: int | None = None
    ) -> Download[_K, Any]:
        """Make a download with this transport's client; `path` has been checked. As `Download`."""


def check_limits(requests: int, **seconds: float) -> None:
    """Refuse what cannot be a limit of the requests in progress, or of a wait.

    Raises:
        ValueError: `requests` is below 1, or one of the `seconds` is not above 0 and finite.
    """
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    for name, each in seconds.items():
        if not (isfinite(each) and each > 0):
            raise ValueError(f"{name} must be above 0 seconds, got {each}")
