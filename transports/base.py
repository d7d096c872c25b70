"""`Transport`: the interface through which datasets read bytes from a store, and shards are written to one.

Data path: dataset -> [transport] -> sample.

The contract, which every transport keeps and `asyncloader.transports.testing` tests:

*Construction* does no I/O, starts no thread and binds no event loop, so a dataset may make or hold a transport
anywhere. A transport pickles as its configuration; the copy is open and idle. That is how it travels to workers. A
transport that was used before a fork must either work in the child or raise there at once; it never hangs.

*Calls* are made from coroutines of one event loop, any number concurrently. None of them blocks that loop. The loop of
the first call is the transport's loop until it is closed; a transport may allow more, but callers must not rely on it.

*Paths* are relative to the root that the transport was opened at, canonical (`checks.check_path`), and never lead out
of that root. An object is bytes; there are no directories, though ``/`` in paths looks like them.

*Bytes* are returned as `bytes`: private, immutable, and of exactly the requested length. Sizes are checked before
memory is allocated, as far as the store provides them.

*Errors* are `TransportError`s (`errors.py`). Each is also the builtin error that a program would look for, and has the
path as an attribute and the original error as its cause. Arguments that are invalid for any store (a negative start)
raise ValueError. Nothing is retried unless the transport says so.

*Writes* are atomic: an object appears with all of its bytes or not at all, whenever the writer is killed or cancelled.
A transport for reading only leaves out `write` and `delete`.

*Cancellation* is safe at every await: the call raises CancelledError, what it had opened is closed, and the transport
remains usable. A thread may finish its read in the background; its bytes are dropped.

*Closing*: `aclose()`, or the end of ``async with``, closes everything the transport opened: threads, files, sockets. It
waits for calls in progress, which end as usual or raise TransportClosed. Later calls raise TransportClosed. It may be
called repeatedly, concurrently, and by a cancelled caller. Iterators of `stream` and `list` that are left before their
end must be closed by the caller: ``async with contextlib.aclosing(transport.stream(path)) as chunks``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager, suppress
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from typing_extensions import Buffer

from asyncloader.transports.errors import (
    ObjectNotFound,
    RangeOutOfBounds,
    ReadFailed,
    SizeUnknown,
    TransportError,
    WriteFailed,
)
from asyncloader.transports.ranges import ByteRange, ReadPlan, plan_ranges


class ObjectInfo(NamedTuple):
    """Metadata of an object.

    Attributes:
        size: bytes.
        etag: an opaque text that identifies these exact bytes: while it stays the same at a path, so do the bytes. None
            if the store provides nothing that proves this.
    """

    size: int
    etag: str | None


class Transport(ABC):
    """Reads the objects below one root. Subclasses implement the abstract methods; see the module for the contract."""

    range_gap: ClassVar[int] = 1 << 20
    """The largest gap, in bytes, that `read_ranges` reads to save a request. The default fits a store one round trip
    away.
    """

    range_size: ClassVar[int] = 16 << 20
    """`read_ranges` joins ranges up to this number of bytes per request, so that requests can run concurrently."""

    range_requests: ClassVar[int] = 16
    """Maximum number of concurrent requests per call of `read_ranges`."""

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
        """Read many ranges of one object: nearby ones in one request, requests concurrently.

        The first request that fails cancels the others, and its error is raised. Transports with a cheaper way override
        this.

        Args:
            path: the object.
            ranges: ``(start, length)`` pairs, in bytes; any order, repeats and overlaps are fine.

        Returns:
            The bytes of each range, in the order of `ranges`.

        Raises:
            The errors of `read_range`.
        """
        plan = self._plan(ranges)
        slots = asyncio.Semaphore(self.range_requests)

        async def fetch(block: ByteRange) -> bytes:
            async with slots:
                return await self.read_range(path, block.start, block.length)

        if len(plan.blocks) <= 1:
            return plan.cut([await self.read_range(path, *block) for block in plan.blocks])
        return plan.cut(await gather_all(fetch(block) for block in plan.blocks))

    @abstractmethod
    def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object from byte `start` to its end in chunks, holding one chunk in memory at a time.

        All chunks are of one version of the object: if it changes during the stream, the stream continues with the old
        version or raises. The bytes before `start` are not read if the store supports that.

        Args:
            path: the object.
            start: the first byte to return. At the object's end the stream is empty, which is no error.
            chunk_size: maximum number of bytes per chunk. Chunks may be shorter, and are never empty.

        Raises:
            ValueError: `start` is negative, or `chunk_size` is below 1.
            RangeOutOfBounds: the object ends before `start`.
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`. All of them are raised
                by the iteration, none by the call.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """Return the paths of all objects that begin with `prefix`, ascending by code point.

        `prefix` is the beginning of a string, not a directory: ``"train/0"`` matches ``"train/00/a.png"``. The order is
        the same on every machine. No match gives an empty iteration. Objects that are created or deleted during the
        iteration may be included or not.

        Raises:
            InvalidPath, AccessDenied, ReadFailed, TransportClosed: see `errors`; raised by the iteration.
            ObjectNotFound: the root itself does not exist.
        """

    @abstractmethod
    async def size(self, path: str) -> int:
        """Return an object's size in bytes.

        Raises:
            SizeUnknown: the store does not provide it.
            ObjectNotFound, AccessDenied, InvalidPath, ReadFailed, TransportClosed: see `errors`.
        """

    async def info(self, path: str) -> ObjectInfo:
        """Return an object's size and, if the store provides one, its version.

        The default calls `size` and returns no version. Transports whose stores have versions override it.

        Raises:
            The errors of `size`.
        """
        return ObjectInfo(await self.size(path), None)

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object, and return the version of the bytes.

        The default calls `info` before and after the read, and returns a version only if it is the same both times.
        Transports that get the version together with the bytes override it and save these two requests.

        Args:
            path: the object.
            max_bytes: as in `read`.

        Raises:
            The errors of `read`.
        """
        before = await self.info(path)
        data = await self.read(path, max_bytes=max_bytes)
        same = before.etag is not None and before.size == len(data) and before == await self.info(path)
        return data, ObjectInfo(len(data), before.etag if same else None)

    async def pinned_root(self) -> str | None:
        """Return a URL of this transport's root as it is now, which later changes do not affect; None: the store has no
        versions of all objects together.

        Raises:
            TransportError: the store cannot be asked.
        """
        return None

    def listed_size(self, path: str) -> int | None:  # noqa: ARG002 - for subclasses
        """Return an object's size as a listing by this transport has said it; None: it has not. No I/O."""
        return None

    def pinned(self, path: str) -> PinnedReader:
        """Return a reader of parts of an object whose answers are all of one version. Opens nothing.

        The default calls `info` before and after each read. Transports that get the version together with the
        bytes override it and save these requests.
        """
        return PinnedReader(self, path)

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:  # noqa: ARG002 - for subclasses
        """Write an object, replacing one with the same path. It appears whole or not at all, and is durable on return.

        The default refuses: transports that can write override it, and `delete`.

        Args:
            path: the object.
            pieces: its bytes, one piece after the other; must not change meanwhile.

        Returns:
            Its size and, if the store provides one, its version.

        Raises:
            WriteFailed: the store cannot be written to, or failed; nothing of the object is visible.
            AccessDenied, InvalidPath, TransportClosed: see `errors`.
        """
        raise WriteFailed(f"{self!r} is for reading only: {path!r} cannot be written", path=path)

    async def delete(self, path: str) -> None:
        """Delete an object. An object that does not exist is no error.

        Raises:
            The errors of `write`.
        """
        raise WriteFailed(f"{self!r} is for reading only: {path!r} cannot be deleted", path=path)

    @abstractmethod
    async def aclose(self) -> None:
        """Close everything that the transport opened, and wait until it is closed. See the module's contract."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _plan(self, ranges: Iterable[tuple[int, int]]) -> ReadPlan:
        """Plan `ranges` with this transport's `range_gap` and `range_size`."""
        return plan_ranges(ranges, max_gap=self.range_gap, max_size=self.range_size)


class PinnedReader:
    """Reads parts of one object, all of the version of the first answer.

    Holds nothing that must be closed. Calls may be concurrent.

    Args:
        transport: of the object.
        path: the object.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self.transport = transport
        self.path = path
        self._streamed = False  # bytes of a stream have been returned
        self._described = False  # `info` was called, and no stream has begun since
        self._first: ObjectInfo | None = None
        self._size: int | None = None  # as `info` returned it

    @property
    def etag(self) -> str | None:
        """The version of the bytes, as in `ObjectInfo.etag`; None if it is not known, or proves nothing."""
        return None if self._first is None else self._first.etag

    @property
    def size(self) -> int | None:
        """Bytes of the object whose bytes were read; None if it is not known."""
        return None if self._first is None else self._first.size

    def may_be(self, etag: str | None) -> bool:
        """Return whether the version that was read may be this one, an `ObjectInfo.etag`."""
        return etag is None or self.etag in (None, etag)

    async def info(self) -> ObjectInfo:
        """Return the object's size and version.

        Raises:
            ReadFailed: the object has changed, or a transport's method raised something that is no TransportError.
            The other errors of `Transport.info`.
        """
        with self._errors():
            try:
                info = await self._info()
            except ObjectNotFound as error:
                if self._size is None:
                    raise
                raise changed_error(self.path) from error
            finally:
                self._described = True
        self._size = info.size
        return info

    async def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, like `Transport.read_ranges`.

        Raises:
            ReadFailed: the object has changed: none of its new bytes are returned. Also for the reasons of `info`.
            The other errors of `Transport.read_ranges` and `info`.
        """
        wanted = list(ranges)
        with self._reading(wanted):
            return await self._read_ranges(wanted)

    async def stream(
        self, *, start: int = 0, stop: int | None = None, chunk_size: int = 1 << 20
    ) -> AsyncGenerator[bytes, None]:
        """Read the object from `start` to its end, like `Transport.stream`.

        Args:
            start: the first byte to return.
            stop: the reader rarely needs bytes from this byte on, and closes the stream there. They are requested when
                they are needed. None: it may read the whole object.
            chunk_size: maximum number of bytes per chunk.

        Raises:
            ReadFailed: the object has changed: none of its new bytes are returned. Also for the reasons of `info`.
            The other errors of `Transport.stream` and `info`.
        """
        streamed = self._streamed
        with self._errors():
            try:
                async with aclosing(self._stream(start, stop, chunk_size)) as chunks:
                    async for chunk in chunks:
                        self._streamed = True
                        yield chunk
            except ObjectNotFound as error:
                # An earlier stream returned bytes, so the object existed: it has changed, and is no bad sample.
                if not streamed:
                    raise
                raise changed_error(self.path) from error
            except RangeOutOfBounds as error:
                # The same, unless it is proven to be the object of before, which then never had this range.
                if streamed and not await self._is_unchanged():
                    raise changed_error(self.path) from error
                raise

    async def _is_unchanged(self) -> bool:
        """Whether the object is of the version whose bytes have been returned, as far as versions show."""
        try:
            info = await self.info()
        except ObjectNotFound:
            return False
        return info.etag is not None and info.etag == self.etag

    @contextmanager
    def _reading(self, ranges: Sequence[tuple[int, int]]) -> Generator[None, None, None]:
        with self._errors():
            try:
                yield
            except (ObjectNotFound, RangeOutOfBounds) as error:
                # `info` described an object that has these ranges: the error is about an object that replaced it, and
                # must not look like a bad sample.
                if self._size is None or any(start + length > self._size for start, length in ranges):
                    raise
                raise changed_error(self.path) from error

    @contextmanager
    def _errors(self) -> Generator[None, None, None]:
        """Turn every error of the transport into a TransportError: it must never look like a bad sample."""
        try:
            yield
        except TransportError:
            raise
        except Exception as error:
            text = f"reading {self.path!r} failed: {type(error).__name__}: {error}"
            raise ReadFailed(text, path=self.path) from error

    @property
    def _has_versions(self) -> bool:
        return type(self.transport).info is not Transport.info

    async def _stream(self, start: int, stop: int | None, chunk_size: int) -> AsyncGenerator[bytes, None]:  # noqa: ARG002 - for networks and caches
        if self._has_versions and not self._described:
            with suppress(SizeUnknown):
                await self._info()
        self._described = False
        async with aclosing(self.transport.stream(self.path, start=start, chunk_size=chunk_size)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _info(self) -> ObjectInfo:
        info = await self.transport.info(self.path)
        first = self._first = self._first or info
        # A version that is no longer stated proves nothing: of a local file, it means that the file was just changed.
        if info.size != first.size or (first.etag is not None and info.etag != first.etag):
            raise changed_error(self.path)
        return info

    async def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        if not self._has_versions:
            return await self.transport.read_ranges(self.path, ranges)
        if self._first is None:
            await self._info()
        data = await self.transport.read_ranges(self.path, ranges)
        # Raises if the version is not the same as before the read; otherwise the bytes are of this version.
        await self._info()
        return data


def changed_error(path: str) -> ReadFailed:
    """Make the error for an object that changed between two reads of its parts."""
    return ReadFailed(
        f"{path!r} changed while it was read; the bytes of two versions are never mixed. A new epoch reads it as it is "
        "by then; write objects under new names instead of replacing them",
        path=path,
    )


def overrides(transport: Transport, base: type[Any]) -> bool:
    """Return whether the transport's class overrides a reading method of `base`, which it inherits from."""
    names = ("read_range", "read_ranges", "stream")
    return any(getattr(type(transport), name) is not getattr(base, name) for name in names)


_R = TypeVar("_R")


async def gather_all(calls: Iterable[Coroutine[Any, Any, _R]]) -> list[_R]:
    """Await all calls concurrently and return their results, in order.

    If a call fails, the others are cancelled and awaited.

    Raises:
        The error of the first call that fails, not in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        failures.__traceback__ = None  # up to Python 3.12, a frame in it refers to the group
    # Outside of the `except`: the group would be the error's context, and refers to the error.
    try:
        raise first
    finally:
        # The error's traceback refers to this frame: it would keep all results until the garbage collector runs.
        tasks = []
        del first
