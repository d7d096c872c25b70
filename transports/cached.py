"""`CachedTransport`: keeps the objects of another transport on a local disk.

Data path: store -> [cached: cache directory] -> dataset.

    transport = CachedTransport(open_transport(url), url, "/scratch/cache", cache_bytes=200 << 30)

For an object that is cached, the store is asked only for its version: one small request per read. An object that is not
cached is read in one request, as without a cache. `cache_layout` shows the directory.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, TypeVar

from asyncloader.errors import warn_aside
from asyncloader.sizes import Size, optional_size
from asyncloader.transports.base import ObjectInfo, PinnedReader, Transport, overrides
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cache_layout import hash_key, object_url
from asyncloader.transports.cache_store import CacheEntry, CacheFill, CacheStore, EntryLost
from asyncloader.transports.cache_tee import Tee
from asyncloader.transports.cache_usage import CacheCounts
from asyncloader.transports.checks import check_chunk_size, check_path, check_range, check_size, check_start
from asyncloader.transports.errors import ReadFailed, SizeUnknown, TransportError
from asyncloader.transports.pinned import PinnedEntry

__all__ = [
    "CachedTransport",
]

_R = TypeVar("_R")

# How long the end of a stream may wait for the store to confirm the object's version. After that it is not cached.
_CONFIRM_S = 10.0

# Temporary shortages of the process, which say nothing about the directory.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM})

# Unusable directories that this process has warned about: it warns once.
_warned: set[str] = set()


class CachedTransport(Transport):
    """Serves objects of `inner` from a directory, as long as the store says that they are unchanged.

    Whole objects are cached: those that `read` reads, and those that a `stream` reads from byte 0 to the end.
    Afterwards reads, ranges and streams from any byte are served from the directory. Objects without a version
    (`info(path).etag` is None) or without a known size are not cached.

    Any number of workers, processes and runs on a node can share a directory, each with its own transports. Eviction is
    by last use, known to the minute. A run that repeatedly reads more bytes than `cache_bytes` in the same order finds
    each object evicted just before it is needed: allow for all objects, or shuffle. Put the directory on a local disk.

    If the disk is full or fails, or the directory is not writable, caching stops in this process, with one
    RuntimeWarning. Reads continue; cached objects are still served while they can be read.

    Args:
        inner: the transport to read from. It is closed with this one.
        url: the root that `inner` was opened at; names the objects in the cache. Leave out a signature that differs
            each time: it would hide what is cached.
        cache_dir: where the cache's own sub-directory is created. Missing directories are created, for this user alone.
        cache_bytes: maximum disk space of the cache, for all processes together, in bytes (whole blocks of 4 KiB) or as
            a text (``"200GB"``). None: no limit. Processes with different limits each enforce their own.
        revalidate: ask the store on each read whether the cached object is current. False trusts the version that was
            cached last: right for data that is never changed in place.
        threads: maximum number of files read and written at the same time. Default as `LocalTransport`.

    Raises:
        ValueError: `cache_bytes` or `threads` is below 1.
    """

    def __init__(
        self,
        inner: Transport,
        url: str,
        cache_dir: str | os.PathLike[str],
        cache_bytes: Size | None = None,
        *,
        revalidate: bool = True,
        threads: int | None = None,
    ) -> None:
        limit = optional_size("cache_bytes", cache_bytes)
        self.inner = inner
        self.url = url
        self.cache_dir = os.path.abspath(os.fspath(cache_dir))  # noqa: PTH100 - Path.resolve would be I/O
        self.cache_bytes = limit
        self.revalidate = revalidate
        self.threads = min(32, (os.cpu_count() or 1) + 4) if threads is None else threads
        self._counts = CacheCounts()
        self._pool = BlockingPool("cache", self.threads)
        self._store = CacheStore(self.cache_dir, limit, self._counts)
        # Without `info`, the transport knows no versions.
        self._serves = self._fills = type(inner).info is not Transport.info

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Open the transport for `url`, and put a cache around it.

        Args:
            url: as in `open_transport`.
            options: `cache_dir`, `cache_bytes`, `revalidate` and `threads` are this transport's; all others are passed
                to the inner transport.
        """
        from asyncloader.transports.registry import open_transport

        own = {name: options.pop(name) for name in ["cache_bytes", "revalidate", "threads"] if name in options}
        cache_dir = options.pop("cache_dir")
        return cls(open_transport(url, **options), url, cache_dir, **own)

    def __repr__(self) -> str:
        state = "closed" if self._pool.closed else "open"
        return f"<CachedTransport {self.inner!r} cache_dir={self.cache_dir!r} cache_bytes={self.cache_bytes} {state}>"

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Transport, str, str, int | None]]:
        make = partial(type(self), revalidate=self.revalidate, threads=self.threads)
        return make, (self.inner, self.url, self.cache_dir, self.cache_bytes)

    @property
    def cache_counts(self) -> CacheCounts:
        """Cache statistics of this transport in this process."""
        return self._counts

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object, and cache it. As `Transport.read`."""
        hit = await self._read_hit(path, max_bytes)
        if hit is not None:
            return hit[0]
        if not self._fills:
            return await self.inner.read(path, max_bytes=max_bytes)
        return (await self._read_filling(path, max_bytes))[0]

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version, and cache it. As `Transport.read_with_info`."""
        hit = await self._read_hit(path, max_bytes)
        return await self._read_filling(path, max_bytes) if hit is None else hit

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range, from the cache if the object is there. As `Transport.read_range`."""

        def use(entry: CacheEntry) -> bytes:
            check_range(path, entry.size, start, length)
            return entry.read(start, length)

        check_path(path)
        hit = await self._hit(path, use)
        if hit is None:
            return await self.inner.read_range(path, start, length)
        self._count(len(hit))
        return hit

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, from the cache if the object is there. As `Transport.read_ranges`."""
        wanted = list(ranges)

        check_path(path)
        hit = await self._hit(path, partial(_read_entry, path, wanted))
        if hit is None:
            return await self.inner.read_ranges(path, wanted)
        self._count(sum(map(len, hit)))
        return hit

    def pinned(self, path: str) -> PinnedReader:
        """Return a reader that uses one cached version, or the store, for all of its reads. As `Transport.pinned`."""
        return super().pinned(path) if overrides(self, CachedTransport) else PinnedEntry(self, path)

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks; if it is read from byte 0 to its end, it is cached. As `Transport.stream`.

        A stream that is left early caches nothing.
        """
        check_path(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        opener, info = await self._find(path)
        entry = None if opener is None else await self._attempt(opener, CacheEntry.close)
        if self._serves and entry is None:
            self._counts.miss()
        if entry is not None:
            given = self._stream_entry(path, entry, start, chunk_size)
        else:
            given = (
                self._stream_filling(path, self.inner.pinned(path), chunk_size, info)
                if self._fills and start == 0
                else self.inner.stream(path, start=start, chunk_size=chunk_size)
            )
        async with aclosing(given) as chunks:
            async for chunk in chunks:
                yield chunk

    def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """List the store; the cache is not used. As `Transport.list`."""
        return self.inner.list(prefix)

    async def size(self, path: str) -> int:
        """Return an object's size; from the cache only without `revalidate`. As `Transport.size`."""
        return (await self.info(path)).size if not self.revalidate else await self.inner.size(path)

    async def info(self, path: str) -> ObjectInfo:
        """Return an object's size and version; from the cache only without `revalidate`. As `Transport.info`."""
        check_path(path)
        if not self.revalidate and self._serves:
            opener = partial(self._store.open_newest, self._key(path))
            found = await self._attempt(partial(_use_entry, opener, lambda entry: ObjectInfo(entry.size, entry.etag)))
            if found is not None:
                return found
        return await self.inner.info(path)

    async def aclose(self) -> None:
        """Close the inner transport, wait for calls in progress, and join the threads. As `Transport.aclose`."""
        try:
            await self.inner.aclose()
        finally:
            await self._pool.aclose()

    # --- what is in the cache

    async def _read_hit(self, path: str, max_bytes: int | None) -> tuple[bytes, ObjectInfo] | None:
        def use(entry: CacheEntry) -> tuple[bytes, ObjectInfo]:
            check_size(path, entry.size, max_bytes)
            return entry.read(0, entry.size), ObjectInfo(entry.size, entry.etag)

        check_path(path)
        check_size(path, 0, max_bytes)
        hit = await self._hit(path, use)
        if hit is not None:
            self._count(len(hit[0]))
        return hit

    async def _hit(self, path: str, use: Callable[[CacheEntry], _R]) -> _R | None:
        """Return the result of `use`, called in a thread, for an object that is cached and valid; None otherwise."""
        opener, _ = await self._find(path)
        hit = None if opener is None else await self._attempt(partial(_use_entry, opener, use))
        if self._serves and hit is None:
            self._counts.miss()
        return hit

    async def _find(self, path: str) -> tuple[Callable[[], CacheEntry | None] | None, ObjectInfo | None]:
        """Return what opens the object's valid version, if cached, and what the store said, if asked."""
        if not self._serves:
            return None, None
        key = self._key(path)
        if not self.revalidate:
            return partial(self._store.open_newest, key), None
        if not await self._attempt(partial(self._store.has, key)):
            return None, None
        info = await self._ask(path)
        return None if info is None or info.etag is None else partial(self._open, key, info), info

    def _open(self, key: str, info: ObjectInfo) -> CacheEntry | None:
        """Open the version of an object that the store describes."""
        assert info.etag is not None
        entry = self._store.open(key, info.etag)
        if entry is not None and entry.size != info.size:
            entry.close()
            return None
        return entry

    async def _ask(self, path: str) -> ObjectInfo | None:
        """Ask the store for the object's size and version; None if it does not know the size."""
        try:
            return await self.inner.info(path)
        except SizeUnknown:
            return None

    async def _stream_entry(
        self, path: str, entry: CacheEntry, start: int, chunk_size: int
    ) -> AsyncGenerator[bytes, None]:
        self._counts.hit()
        position = start
        try:
            check_start(path, entry.size, start)
            while position < entry.size:
                length = min(chunk_size, entry.size - position)
                chunk = await self._attempt(partial(entry.read, position, length))
                if chunk is None:
                    break
                self._counts.save(length)
                position += length
                yield chunk
            else:
                return
        finally:
            await self._pool.finish(entry.close)
        # The disk failed in the middle. The rest is read from the store, if the object is unchanged there.
        async with aclosing(self._stream_version(path, entry.etag, position, chunk_size)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream_version(self, path: str, etag: str, start: int, chunk_size: int) -> AsyncGenerator[bytes, None]:
        source = self.inner.pinned(path)
        if (await source.info()).etag != etag:
            raise self._replaced(path)
        async with aclosing(source.stream(start=start, chunk_size=chunk_size)) as chunks:
            async for chunk in chunks:
                if source.etag not in {None, etag}:
                    raise self._replaced(path)
                yield chunk
        await self._require(path, etag)

    async def _require(self, path: str, etag: str) -> None:
        if (await self.inner.info(path)).etag != etag:
            raise self._replaced(path)

    def _replaced(self, path: str) -> ReadFailed:
        return ReadFailed(
            f"{path!r} cannot be read any more from {self.cache_dir!r}, and is another object in the store by now; the "
            "bytes of two versions are never mixed. Read it again",
            path=path,
        )

    # --- what gets into the cache

    async def _read_filling(self, path: str, max_bytes: int | None) -> tuple[bytes, ObjectInfo]:
        data, info = await self.inner.read_with_info(path, max_bytes=max_bytes)
        if self._fills and info.etag is not None and data:
            await self._attempt(partial(self._store.put, self._key(path), info.etag, data), filling=True)
        return data, info

    def stream_from_store(
        self, path: str, source: PinnedReader, start: int, chunk_size: int
    ) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks from the store by `source`, and cache it as `stream` does."""
        if self._fills and start == 0:
            return self._stream_filling(path, source, chunk_size, None)
        return source.stream(start=start, chunk_size=chunk_size)

    async def _stream_filling(
        self, path: str, source: PinnedReader, chunk_size: int, info: ObjectInfo | None
    ) -> AsyncGenerator[bytes, None]:
        if info is None:
            try:
                info = await source.info()
            except SizeUnknown:
                info = ObjectInfo(0, None)
        fill: CacheFill | None = None
        if info.etag is not None and info.size:
            begin = partial(self._store.begin, self._key(path), info.etag, info.size)
            fill = await self._attempt(begin, CacheFill.abort, filling=True)
        tee = Tee(fill, self._pool, partial(self._on_disk_error, filling=True))
        try:
            async with aclosing(source.stream(chunk_size=chunk_size)) as chunks:
                received = 0
                chunk = await anext(chunks, b"")
                while chunk:
                    received += len(chunk)
                    await tee.add(chunk)
                    after: bytes | None = None
                    if tee.open and received >= info.size:
                        # Kept before the last chunk is returned: the reader may know that it is the last, and stop.
                        after = await anext(chunks, b"")
                        # Not all copies of a store need have the same version: the answer's own counts, if it is named.
                        if not after and source.etag in {None, info.etag} and await self._still(path, info):
                            await tee.keep()
                    yield chunk
                    chunk = await anext(chunks, b"") if after is None else after
        finally:
            await tee.drop()

    async def _still(self, path: str, info: ObjectInfo) -> bool:
        """Return whether the object is the same as before the stream began."""
        try:
            async with asyncio.timeout(_CONFIRM_S):
                return await self.inner.info(path) == info
        except (TransportError, TimeoutError):
            return False

    # --- the directory

    def _key(self, path: str) -> str:
        return hash_key(object_url(self.url, path))

    def _count(self, given: int) -> None:
        self._counts.hit()
        self._counts.save(given)

    async def _attempt(
        self, call: Callable[[], _R], release: Callable[[Any], object] | None = None, *, filling: bool = False
    ) -> _R | None:
        """Return the result of `call`, run in a thread; None if the disk fails. `release` as in `BlockingPool`."""

        def drop(result: _R) -> None:
            if release is not None and result is not None:
                release(result)

        try:
            return await self._pool.acquire(call, drop)
        except EntryLost:
            return None  # only this file is affected
        except TransportError:
            raise
        except OSError as error:
            self._on_disk_error(error, filling=filling)
            return None

    def _on_disk_error(self, error: OSError, *, filling: bool) -> None:
        if error.errno in _PASSING:
            return
        self._fills = False
        if not filling:
            self._serves = False
        if self.cache_dir not in _warned:
            _warned.add(self.cache_dir)
            warn_aside(
                f"caching in {self.cache_dir!r} is off in this process, because {error}; reads go on without it. Make "
                "room, lower cache_bytes, or choose another cache_dir, and start again",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- one version for several reads

    async def find_version(self, path: str) -> ObjectInfo | None:
        """Return the version of an object that is cached and valid; None if there is none."""
        check_path(path)
        opener, _ = await self._find(path)
        if opener is None:
            return None
        return await self._attempt(partial(_use_entry, opener, lambda entry: ObjectInfo(entry.size, entry.etag)))

    async def read_ranges_of(self, path: str, etag: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges of one version, from the cache, or from the store if it has been evicted. As `read_ranges`.

        Raises:
            ReadFailed: it has been evicted, and the store has another version.
        """
        opener = partial(self._store.open, self._key(path), etag)
        use = partial(_read_entry, path, ranges)
        hit = await self._attempt(partial(_use_entry, opener, use)) if self._serves else None
        if hit is not None:
            self._count(sum(map(len, hit)))
            return hit
        self.count_miss()
        await self._require(path, etag)
        data = await self.inner.read_ranges(path, ranges)
        await self._require(path, etag)
        return data

    async def stream_of(self, path: str, etag: str, start: int, chunk_size: int) -> AsyncGenerator[bytes, None]:
        """Read one version in chunks, from the cache, or from the store if it has been evicted. As `stream`.

        Raises:
            ReadFailed: it has been evicted, and the store has another version.
        """
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        opener = partial(self._store.open, self._key(path), etag)
        entry = await self._attempt(opener, CacheEntry.close) if self._serves else None
        if entry is None:
            self.count_miss()
            given = self._stream_version(path, etag, start, chunk_size)
        else:
            given = self._stream_entry(path, entry, start, chunk_size)
        async with aclosing(given) as chunks:
            async for chunk in chunks:
                yield chunk

    def count_miss(self) -> None:
        """Note that an object was wanted that is not cached."""
        if self._serves:
            self._counts.miss()


def _read_entry(path: str, ranges: Sequence[tuple[int, int]], entry: CacheEntry) -> Sequence[bytes]:
    for start, length in ranges:
        check_range(path, entry.size, start, length)
    return [entry.read(start, length) for start, length in ranges]


def _use_entry(opener: Callable[[], CacheEntry | None], use: Callable[[CacheEntry], _R]) -> _R | None:
    entry = opener()
    if entry is None:
        return None
    try:
        return use(entry)
    finally:
        entry.close()
