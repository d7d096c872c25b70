"""`CachedTransport`: keeps the objects of another transport on a local disk.

Data path: store -> [cached: cache directory] -> dataset.

    transport = CachedTransport(open_transport(url), url, "/scratch/cache", cache_bytes=200 << 30)

A read of a cached object requests only the object's version from the store: one small request. `cache_layout` shows the
directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, TypeVar

from asyncloader.base.sizes import Size, optional_size
from asyncloader.errors import warn_aside
from asyncloader.transports.base import ObjectInfo, PinnedReader, Transport, overrides
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cache_blocks import CachedBlocks, find_newest, is_known
from asyncloader.transports.cache_layout import object_url
from asyncloader.transports.cache_store import CacheStore, EntryLost
from asyncloader.transports.cache_usage import CacheCounts
from asyncloader.transports.cached_object import CachedObject
from asyncloader.transports.checks import check_chunk_size, check_path, check_size, check_start
from asyncloader.transports.errors import ReadFailed, TransportError

_R = TypeVar("_R")

# Temporary shortages of the process, which say nothing about the directory.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM})

# Unusable directories that this process has warned about: it warns once.
_warned: set[str] = set()


class CachedTransport(Transport):
    """Serves objects of `inner` from a directory, as long as the store says that they are unchanged.

    Objects are cached in blocks of 1 MiB, aligned at the object's start, each a file. So a range downloads less than
    2 MiB more than it has, which takes about as long as a request. Missing neighbours come in one request
    (`range_size`); a stream requests 8 MiB at a time, and the next 8 MiB while its consumer works. A block is
    downloaded once: other reads of the block, also in other processes, wait for the download, up to half a minute;
    only a whole `read` of an object that is not cached at all waits for nobody. Objects without a version
    (`info(path).etag` is None) or without a known size are not cached.

    Any number of workers, processes and runs on a node can share a directory, each with its own transports. Eviction is
    by last use, known to the minute. If a run repeatedly reads more bytes than `cache_bytes` in the same order, each
    block is evicted just before it is needed: allow for all objects, or shuffle. Put the directory on a local disk.

    If the disk is full or fails, or the directory is not writable, caching stops in this process, with one
    RuntimeWarning. Reads continue; cached objects are still served while they can be read.

    Args:
        inner: the transport to read from. `aclose` closes it, too.
        url: the root that `inner` was opened at; names the objects in the cache. Leave out a signature that differs
            each time: no object would be found again.
        cache_dir: where the cache's own sub-directory is created. Missing directories are created, for this user alone.
        cache_bytes: maximum disk space of the cache, for all processes together, in bytes (whole blocks of 4 KiB) or as
            a text (``"200GB"``). None: no limit. Processes with different limits each enforce their own.
        revalidate: ask the store on each read whether the cached object is current. False trusts the version that was
            cached last: right for data that is never changed in place. (If an object was replaced nevertheless, the
            first read of a part of it that is not cached is an error, and later reads are of the new version.)
        threads: maximum number of files read and written at the same time. Default: as of `LocalTransport`.

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
        self.pool = BlockingPool("cache", self.threads)
        self.store = CacheStore(self.cache_dir, limit, self._counts)
        # Whether the directory is read, and written to. Without `info`, `inner` has no versions.
        self.serves = self.fills = type(inner).info is not Transport.info

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
        state = "closed" if self.pool.closed else "open"
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
        if not (self.serves or self.fills):
            return await self.inner.read(path, max_bytes=max_bytes)
        return (await self.read_with_info(path, max_bytes=max_bytes))[0]

    async def read_with_info(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo]:
        """Read a whole object and its version, and cache it. As `Transport.read_with_info`."""
        check_path(path)
        check_size(path, 0, max_bytes)
        url = self.object_url(path)
        # Looked up first: of an object that is not cached in any version, the version comes with its bytes.
        if self.serves and await self.attempt(partial(is_known, self.store, url)):
            reader = CachedObject(self, path)
            version = await reader.find()
            if version is not None:
                check_size(path, version.size, max_bytes)
                try:
                    return (await reader.read_version([(0, version.size)]))[0], version
                except ReadFailed:
                    if not await reader.replaced():
                        raise
        else:
            self.count_miss()
        data, info = await self.inner.read_with_info(path, max_bytes=max_bytes)
        if self.fills and info.etag is not None and data:
            await self.attempt(partial(CachedBlocks(self.store, url, info).put, data), filling=True)
        return data, info

    async def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a range, and cache its blocks. As `Transport.read_range`."""
        return (await self.read_ranges(path, [(start, length)]))[0]

    async def read_ranges(self, path: str, ranges: Iterable[tuple[int, int]]) -> Sequence[bytes]:
        """Read ranges, and cache their blocks. As `Transport.read_ranges`."""
        wanted = list(ranges)
        check_path(path)
        reader = CachedObject(self, path)
        if await reader.find() is not None:
            try:
                return await reader.read_version(wanted)
            except ReadFailed:
                # The store may have another version now, so that the rest of this version cannot be read. Nothing of it
                # has been returned: the new version is read instead.
                if not await reader.replaced():
                    raise
        return await self.inner.read_ranges(path, wanted)

    def pinned(self, path: str) -> PinnedReader:
        """Return a reader that uses one version, of the cache or the store, for all reads. As `Transport.pinned`."""
        return super().pinned(path) if overrides(self, CachedTransport) else CachedObject(self, path)

    async def stream(self, path: str, *, start: int = 0, chunk_size: int = 1 << 20) -> AsyncGenerator[bytes, None]:
        """Read an object in chunks, and cache its blocks. As `Transport.stream`."""
        check_path(path)
        check_chunk_size(chunk_size)
        check_start(path, None, start)
        reader = CachedObject(self, path)
        given = False
        if await reader.find() is not None:
            try:
                async with aclosing(reader.stream_version(start, None, chunk_size)) as chunks:
                    async for chunk in chunks:
                        given = True
                        yield chunk
            except ReadFailed:  # as in `read_ranges`
                if given or not await reader.replaced():
                    raise
            else:
                return
        async with aclosing(self.inner.stream(path, start=start, chunk_size=chunk_size)) as chunks:
            async for chunk in chunks:
                yield chunk

    def list(self, prefix: str = "") -> AsyncGenerator[str, None]:
        """List the store; the cache is not used. As `Transport.list`."""
        return self.inner.list(prefix)

    async def pinned_root(self) -> str | None:
        """Return the inner transport's answer, like `Transport.pinned_root`."""
        return await self.inner.pinned_root()

    def listed_size(self, path: str) -> int | None:
        """Return the inner transport's answer, like `Transport.listed_size`."""
        return self.inner.listed_size(path)

    async def size(self, path: str) -> int:
        """Return an object's size; from the cache only without `revalidate`. As `Transport.size`."""
        return (await self.info(path)).size if not self.revalidate else await self.inner.size(path)

    async def info(self, path: str) -> ObjectInfo:
        """Return an object's size and version; from the cache only without `revalidate`. As `Transport.info`."""
        check_path(path)
        if not self.revalidate and self.serves and (found := await self.find_newest(path)) is not None:
            return found
        return await self.inner.info(path)

    async def aclose(self) -> None:
        """Close the inner transport, wait for calls in progress, and join the threads. As `Transport.aclose`."""
        try:
            await self.inner.aclose()
        finally:
            await self.pool.aclose()

    # --- the directory

    def object_url(self, path: str) -> str:
        """Return the URL that names an object in the cache."""
        return object_url(self.url, path)

    async def attempt(
        self, call: Callable[[], _R], release: Callable[[Any], object] | None = None, *, filling: bool = False
    ) -> _R | None:
        """Return the result of `call`, run in a thread; None if the disk fails. `release` as in `BlockingPool`."""

        def drop(result: _R) -> None:
            if release is not None and result is not None:
                release(result)

        try:
            return await self.pool.acquire(call, drop)
        except EntryLost:
            return None  # only this file is affected
        except TransportError:
            raise
        except OSError as error:
            self.on_disk_error(error, filling=filling)
            return None

    def on_disk_error(self, error: OSError, *, filling: bool) -> None:
        """Stop writing to the directory and, unless `filling`, reading from it; with one warning."""
        if error.errno in _PASSING:
            return
        self.fills = False
        if not filling:
            self.serves = False
        if self.cache_dir not in _warned:
            _warned.add(self.cache_dir)
            warn_aside(
                f"caching in {self.cache_dir!r} is off in this process, because {error}; reads go on without it. Make "
                "room, lower cache_bytes, or choose another cache_dir, and start again",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- for the readers of one version

    async def find_newest(self, path: str) -> ObjectInfo | None:
        """Return the version of an object that was cached last, whole or in blocks; None if no version is cached."""
        return await self.attempt(partial(find_newest, self.store, self.object_url(path)))

    def count_miss(self, blocks: int = 1) -> None:
        """Count blocks that are not cached, or a read of an object that is not."""
        if self.serves:
            self._counts.miss(blocks)
