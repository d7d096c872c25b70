"""Files that the processes of one host make once and read together: indexes of samples, and decoded chunks.

Data path: indexing, chunks -> [host_files: cache_store] -> kept_chunks, in every process of the host.

With a `cache_dir` they lie in that cache, and count towards its limit (indexes, which are small, do not). Otherwise,
and for objects without a version, in a folder of this dataset, which lives as long as the process that made it.

A file is made under a lock, so that one process makes it and the others wait. The kernel releases the lock when its
process ends, however it ends. A file appears whole or not at all (`cache_store`).
"""

# Names are strings, as in `cache_store`.
# ruff: noqa: PTH103, PTH112, PTH118, PTH120, PTH208

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncloader.errors import warn_aside
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cache_layout import hash_key, storable_etag
from asyncloader.transports.cache_store import CacheStore, EntryLost
from asyncloader.transports.cache_usage import CacheCounts
from asyncloader.transports.file_lock import open_regular, same_file, try_lock, unlock

_R = TypeVar("_R")

_LOCKS = 1 << 10  # files of locks: two files with the same lock are made one after the other

_WAIT_S = 60.0
"""Longest wait for another process that makes a file. It may have been stopped: then the file is made here, too."""

_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05

_PREFIX = "asyncloader-samples-"


class Content(Protocol):
    """The bytes of a file: a `CacheEntry`, or those that were just made."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def read(self, start: int, length: int, /) -> bytes:
        """Return a part. Raises EntryLost: it cannot be read."""
        ...


class _FreshContent:
    """Bytes that were just made."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]


class FileName(NamedTuple):
    """Names a file: its content, and the version.

    Attributes:
        what: the URL, and the way in which the content is made of it.
        version: of the object; None: it has none, and the file is of use to this dataset alone.
        small: an index, which does not count towards the limit.
    """

    what: str
    version: str | None
    small: bool = False


class HostFiles:
    """The files of one dataset. Pickles as their place: the copies in worker processes read and make the same files.

    Args:
        cache_dir: of the dataset; None: the files lie in a folder of their own.
        limit: the most bytes of decoded chunks. None: no limit in a `cache_dir`; otherwise half of the space that was
            free.
    """

    def __init__(self, cache_dir: str | None, limit: int | None) -> None:
        self._cache_dir = cache_dir
        self._limit = limit
        self._private: str | None = None
        self._stores: dict[str, CacheStore] = {}
        self._making: dict[int, threading.Lock] = {}  # by pid: a fork must not inherit a locked lock
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache_dir": self._cache_dir, "_limit": self._limit, "_private": self._private}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_cache_dir"], state["_limit"])  # type: ignore[misc]
        self._private = state["_private"]

    def prepare(self) -> None:
        """Make the folder that copies of this object share. Blocks for a moment."""
        self._own_folder()

    async def use(
        self,
        name: FileName,
        make: Callable[[], Awaitable[bytes]],
        use: Callable[[Content], _R],
        pool: BlockingPool,
        slots: asyncio.Semaphore,
    ) -> _R:
        """Return the result of `use`, called in a thread with the bytes of a file, which is made if it is missing.

        Args:
            name: of the file.
            make: makes its bytes, in the running loop. Called once per host, unless the file does not fit.
            use: called with them, or with an open `CacheEntry`, which is closed afterwards.
            pool: the threads.
            slots: how many files are made at a time.

        Raises:
            The errors of `make` and `use`.
        """
        key, version = hash_key(name.what), name.version or "none"
        store, found = await pool.run(partial(self._use_kept, name, key, version, use))
        if found is not None:
            return found[0]
        if store is None:
            async with slots:
                data = await make()
            return await pool.run(partial(use, _FreshContent(data)))
        # The slot first: a process that waits for a slot holds no lock that others wait for.
        async with slots:
            path = os.path.join(store.directory, "asyncloader-locks", f"{int(key[:8], 16) % _LOCKS:04}")
            async with _making(path, pool):
                # Made by another process meanwhile?
                found = await pool.run(partial(_use_entry, store, key, version, use))
                if found is not None:
                    return found[0]
                data = await make()
                await pool.run(partial(self._put, store, key, version, data))
        return await pool.run(partial(use, _FreshContent(data)))

    def _use_kept(
        self, name: FileName, key: str, version: str, use: Callable[[Content], _R]
    ) -> tuple[CacheStore | None, tuple[_R] | None]:
        store = self._store(name)
        return store, None if store is None else _use_entry(store, key, version, use)

    def _put(self, store: CacheStore, key: str, version: str, data: bytes) -> None:
        limit = store.usage.limit
        text = None
        try:
            store.put(key, version, data)
            if limit is not None and len(data) > limit // 2:
                text = f"a decoded chunk has {len(data):,} bytes, and all of them may have {limit:,}"
        except OSError as error:
            text = f"{store.directory!r} cannot be written to: {error}"
        if text is not None and not self._warned:
            self._warned = True
            advice = "chunks are decoded again and again. Raise cache_bytes=, or choose another cache_dir="
            warn_aside(f"{text}: {advice}", RuntimeWarning)

    def _store(self, name: FileName) -> CacheStore | None:
        kept = self._cache_dir is not None and name.version is not None and storable_etag(name.version)
        folder = self._cache_dir if kept else self._own_folder()
        if folder is None:
            return None
        path = os.path.join(folder, "asyncloader-sample-indexes") if name.small else folder
        store = self._stores.get(path)
        if store is None:
            limit = None if name.small else self._limit
            if not kept and limit is None and not name.small:
                limit = max(1, shutil.disk_usage(folder).free // 2)
            store = self._stores[path] = CacheStore(path, limit, CacheCounts())
        return store

    def _own_folder(self) -> str | None:
        """Return the folder of this dataset; made here, unless the process that it was made in shares this host."""
        with self._making.setdefault(os.getpid(), threading.Lock()):
            if self._private is None or not os.path.isdir(self._private):
                with suppress(OSError):
                    _sweep()
                try:
                    folder, lock = _make_own()
                except OSError:
                    return None
                # Kept open: the lock says that a process of this dataset lives, also in a forked worker.
                weakref.finalize(self, _remove_own, folder, lock, os.getpid())
                self._private, self._stores = folder, {}
            return self._private


def _use_entry(store: CacheStore, key: str, version: str, use: Callable[[Content], _R]) -> tuple[_R] | None:
    try:
        entry = store.open(key, version)
    except OSError:
        return None
    if entry is None:
        return None
    try:
        return (use(entry),)
    except EntryLost:
        return None
    finally:
        entry.close()


def _make_own() -> tuple[str, int]:
    """Make a folder, and return it with the descriptor that locks it."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        path = os.path.join(folder, "owner")
        lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            if try_lock(lock) and same_file(lock, path):
                return folder, lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # before it was locked, another process took it for that of a killed process, and removes it


def _remove_own(folder: str, lock: int, pid: int) -> None:
    """Remove the folder at the end of the process that made it; a forked child's copy does nothing."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    base = tempfile.gettempdir()
    for name in os.listdir(base):
        folder = os.path.join(base, name)
        if not name.startswith(_PREFIX) or os.lstat(folder).st_uid != os.geteuid():
            continue
        with suppress(OSError):
            lock = open_regular(os.path.join(folder, "owner"), os.O_RDWR)
            try:
                if try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


_holders: dict[str, asyncio.AbstractEventLoop] = {}
"""The loops of this process that hold locks, by the locks' files."""


@asynccontextmanager
async def _making(path: str, pool: BlockingPool) -> AsyncGenerator[None]:
    """Hold the lock of a file that is being made; but do not wait for a lock that another process has for too long, or
    a loop that was stopped: it may never run again, and its caller may wait for this file.
    """
    loop = asyncio.get_running_loop()
    try:
        descriptor = await pool.acquire(partial(_open_lock, path), os.close)
    except OSError:  # the folder cannot be written to, which `_put` reports
        yield
        return
    locked, until, pause = False, loop.time() + _WAIT_S, _FIRST_POLL_S
    try:
        # Other processes send no event when they have made the file, or have ended: so it polls.
        while not (locked := try_lock(descriptor)) and loop.time() < until:
            holder = _holders.get(path)
            if holder is not None and not holder.is_running():
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        if locked:
            _holders[path] = loop
        yield
    finally:
        if locked:
            _holders.pop(path, None)
            unlock(descriptor)  # also for a child that was forked meanwhile, and has the descriptor
        os.close(descriptor)


def _open_lock(path: str) -> int:
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    return open_regular(path, os.O_RDWR | os.O_CREAT)
