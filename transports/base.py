"""Where datasets meet the places that keep bytes. Data path: dataset -> [transport] -> sample.

The contract, which every transport keeps and `tests/conformance/transport.py` checks:

*Construction* does no I/O, starts no thread and binds no event loop, so a dataset may make or hold a
transport anywhere. A transport pickles as its configuration; the copy is open and idle. That is how it
travels to workers. A transport that has been used before a fork must work in the child as well, or raise
there at once; it never hangs.

*Calls* are made from coroutines of one event loop, any number at a time. None of them blocks that loop. The
loop of the first call is the transport's loop until it is closed; a transport may be laxer, no caller may
count on it.

*Paths* are relative to the root that the transport was opened at, canonical (`checks.check_path`), and never
lead out of that root. An object is bytes; there are no directories, though ``/`` in paths looks like them.

*Bytes* come back as `bytes`: private, immutable, and of exactly the length that was asked for. Sizes are
checked before memory is allocated, as far as the store says them.

*Errors* are `TransportError`s (`errors.py`), each also the builtin error that a program would look for, with
the path as an attribute and the original error as the cause. Arguments that no store could serve (a negative
start) raise ValueError. Nothing is retried here unless the transport says so.

*Cancellation* is safe at every await: the call raises CancelledError, what it had opened is closed, and the
transport is usable. A thread that was reading may end its read in the background; its bytes are dropped.

*Closing*: `aclose()`, or the end of ``async with``, closes everything the transport opened: threads, files,
sockets. It waits for calls in progress, which end as usual or raise TransportClosed. Calls after it raise
TransportClosed. It may be called twice, also concurrently, and also by a cancelled caller. Iterators of
`stream` and `list` that are left before their end are closed by their user:
``async with contextlib.aclosing(transport.stream(path)) as chunks``.

Several calls at once, which succeed or fail as one. Data path: transport -> [together] -> calls of its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from asyncloader.transports.ranges import ByteRange, ReadPlan, plan_ranges

__all__ = [
    "ObjectInfo",
    "Transport",
    "together",
]


class ObjectInfo(NamedTuple):
    """What a store says about an object without giving it.

    Attributes:
        size: bytes.
        etag: an opaque text that stands for these very bytes: while it stays the same at a path, so do they.
            None where the store gives nothing that proves as much.
    """

    size: int
    etag: str | None


class Transport(ABC):
    """Reads the objects below one root. The module has the contract; the abstract methods are yours."""

    range_gap: ClassVar[int] = 1 << 20
    """Bytes between two ranges that `read_ranges` reads to save a request. Fits a store a round trip away."""

    range_size: ClassVar[int] = 16 << 20
    """Bytes after which `read_ranges` begins another request, so that requests overlap in time."""

    range_requests: ClassVar[int] = 16
    """Requests that one call of `read_ranges` has in flight at most."""

    @classmethod
    @abstractmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Make the transport whose root is `url`; `options` are the constructor's.

        Raises:
            ValueError: the URL is not one of this transport's, or is malformed.
        """

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object.

        Args:
            path: the object.
            max_bytes: refuse an object that is larger, before its memory is allocated. None: no limit.

        Raises:
            ObjectTooLarge: the object has more than `max_bytes` bytes.
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """

    @abstractmethod
    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read `length` bytes of an object, from byte `start` on. `length` 0 gives ``b""``.

        Raises:
            RangeOutOfBounds: the object ends before the range does; no memory of its size was allocated.
            ValueError: `start` or `length` is negative.
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read many ranges of one object: near ones in one request, requests concurrently.

        The first request that fails cancels the others, and its error is raised. A transport that has a
        cheaper way overrides this.

        Args:
            path: the object.
            ranges: ``(start, length)`` pairs, in bytes; any order, repeats and overlaps are fine.

        Returns:
            The bytes of each range, in the order asked.

        Raises:
            As `read_range`.
        """
        plan = self._plan(ranges)
        slots = asyncio.Semaphore(self.range_requests)

        async def fetch(block: ByteRange) -> bytes:
            async with slots:
                return await self.read_range(path, block.start, block.length)

        if len(plan.blocks) <= 1:
            return plan.cut([await self.read_range(path, *block) for block in plan.blocks])
        return plan.cut(await together(fetch(block) for block in plan.blocks))

    @abstractmethod
    def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object from byte `start` to its end in chunks, holding one chunk in memory at a time.

        All chunks are of one version of the object: one that changes meanwhile gives the bytes of one version,
        or an error. The bytes before `start` are not read if the store can do without.

        Args:
            path: the object.
            start: the first byte to give. At the object's end there is nothing to give, which is no error.
            chunk_size: bytes of a chunk at most. Chunks may be shorter, and are never empty.

        Raises:
            ValueError: `start` is negative, or `chunk_size` is below 1.
            RangeOutOfBounds: the object ends before `start`.
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`. All of them
                are raised by the iteration, none by the call.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Give the paths of all objects that begin with `prefix`, ascending by code point.

        `prefix` is the beginning of a string, not a directory: ``"train/0"`` matches ``"train/00/a.png"``.
        The order is the same on every machine. No match gives nothing. Objects that come and go meanwhile may
        be given or not.

        Raises:
            InvalidPath, AccessDenied, ReadFailed, TransportClosed: see `errors`; raised by the iteration.
            ObjectNotFound: the root itself does not exist.
        """

    @abstractmethod
    async def size(self, path: str) -> int:
        """Give an object's size in bytes.

        Raises:
            SizeUnknown: the store does not say it.
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """

    async def info(self, path: str) -> ObjectInfo:
        """Give an object's size and, where the store knows one, its version.

        The default asks for the size and knows no version. A transport whose store keeps versions overrides it.

        Raises:
            As `size`.
        """
        return ObjectInfo(await self.size(path), None)

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object, and say which version the bytes are.

        The default asks before and after the read, and names a version only if it is the same both times. A
        transport that learns the version with the bytes overrides it, and saves the two requests.

        Args:
            path: the object.
            max_bytes: as in `read`.

        Raises:
            As `read`.
        """
        before = await self.info(path)
        data = await self.read(path, max_bytes=max_bytes)
        same = before.etag is not None and before.size == len(data) and before == await self.info(path)
        return data, ObjectInfo(len(data), before.etag if same else None)

    @abstractmethod
    async def aclose(self) -> None:
        """Close what the transport opened, and wait until it is closed. See the module's contract."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _plan(self, ranges: Iterable[tuple[int, int]]) -> ReadPlan:
        """Plan `ranges` by this transport's own `range_gap` and `range_size`."""
        return plan_ranges(ranges, max_gap=self.range_gap, max_size=self.range_size)


_R = TypeVar("_R")


async def together(calls: Iterable[Coroutine[Any, Any, _R]]) -> list[_R]:
    """Await all at once, and give what they return, in order.

    Raises:
        The error of the first that fails, as it is. The others were cancelled by it, and have ended.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]
