"""Files that the processes of one host make once and read together: indexes of samples, and decoded chunks.

Data path: indexing, opened_shards -> [host_files: cache_store, open_files] -> shard_reader, in all processes.

With a `cache_dir` they lie in that cache, and count towards its limit (indexes, which are small, do not). Otherwise,
and for objects without a version, in a folder of this dataset, which lives as long as the process that made it.

A file is made under a lock, so that one process makes it and the others wait. The kernel releases the lock when its
process ends, however it ends. A file appears whole or not at all (`cache_store`). Those of decoded chunks stay open
between reads: to open a file and compare its footer takes as long as to read a sample or two.
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
from typing import Any, NamedTuple, TypeVar

from asyncloader.errors import warn_aside
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.cache_layout import hash_key, storable_etag
from asyncloader.transports.cache_store import CacheEntry, CacheStore, EntryLost
from asyncloader.transports.cache_usage import CacheCounts
from asyncloader.transports.file_lock import open_regular, same_file, try_lock, unlock
from asyncloader.transports.open_files import OpenFile, OpenFiles

_R = TypeVar("_R")

_LOCKS = 1 << 10  # files of locks: two files with the same lock are made one after the other

_WAIT_S = 60.0
"""Longest wait for another process that makes a file. It may have been stopped: then the file is made here, too."""

_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.05

_PREFIX = "asyncloader-samples-"


class FileContent(OpenFile):
    """The open file of an index or of a decoded chunk.

    Attributes:
        size: of its content. Behind it lies the file's footer.
        parsed: what its reader has found out about the content, for the next read; None at first.
    """

    __slots__ = ("parsed", "size")

    def __init__(self, entry: CacheEntry) -> None:
        self.size = entry.size
        self.parsed: Any = None
        super().__init__(entry.detach(), entry.path)


class FreshContent:
    """Bytes that were just made. Attributes as of `FileContent`."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self.parsed: Any = None
        self._data = data

    def read(self, start: int, length: int) -> bytes:
        """Return a part."""
        return self._data[start : start + length]


Content = FileContent | FreshContent


class FileName(NamedTuple):
    """Names a file: its content, and the version.

    Attributes:
        what: the URL, and the way in which the content is made of it.
        version: of the object; None: it has none, and the file is of use to this dataset alone.
        small: an index, which does not count towards the limit, and is not kept open.
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
        open_files: keeps files open.
    """

    def __init__(self, cache_dir: str | None, limit: int | None, open_files: OpenFiles) -> None:
        self._cache_dir = cache_dir
        self._limit = limit
        self._open_files = open_files
        self._private: str | None = None
        self._stores: dict[str, CacheStore] = {}
        self._making: dict[int, threading.Lock] = {}  # by pid: a fork must not inherit a locked lock
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stores": {}, "_making": {}, "_warned": False}

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
        """Return the result of `use`, called in a thread with the content of a file, which is made if it is missing.

        Args:
            name: of the file.
            make: makes its bytes, in the running loop. Called once per host, unless the file does not fit.
            use: called with its content.
            pool: the threads.
            slots: how many files are made at a time.

        Raises:
            The errors of `make` and `use`.
        """
        kept = self._open_files.find(name)
        if isinstance(kept, FileContent):
            try:
                return await pool.run(partial(use, kept))
            except EntryLost:
                self._open_files.drop(name)
        store, found = await pool.run(partial(self._use_kept, name, use))
        if found is not None:
            return found[0]
        # The slot first: a process that waits for a slot holds no lock that others wait for.
        async with slots:
            if store is None:
                data = await make()
            else:
                lock = f"{int(hash_key(name.what)[:8], 16) % _LOCKS:04}"
                async with _making(os.path.join(store.directory, "asyncloader-locks", lock), pool):
                    # Made by another process meanwhile?
                    _, found = await pool.run(partial(self._use_kept, name, use))
                    if found is not None:
                        return found[0]
                    data = await make()
                    await pool.run(partial(self._put, store, name, data))
        return await pool.run(partial(use, FreshContent(data)))

    def _use_kept(self, name: FileName, use: Callable[[Content], _R]) -> tuple[CacheStore | None, tuple[_R] | None]:
        """Use a file that exists. Returns where it is, or would be, and the result; None: it does not exist."""
        store = self._store(name)
        if store is None:
            return None, None
        try:
            entry = store.open(hash_key(name.what), name.version or "none")
        except OSError:
            entry = None
        if entry is None:
            return store, None
        content = FileContent(entry)
        try:
            found = (use(content),)
        except EntryLost:
            return store, None
        if not name.small:
            self._open_files.keep(name, content)
        return store, found

    def _put(self, store: CacheStore, name: FileName, data: bytes) -> None:
        limit = store.usage.limit
        text = None
        try:
            store.put(hash_key(name.what), name.version or "none", data)
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


def _make_own() -> tuple[str, int]:
    """Make a folder, and return it with the descriptor that locks it."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        path = os.path.join(folder, "owner")
        lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        if try_lock(lock) and same_file(lock, path):
            return folder, lock
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


@asynccontextmanager
async def _making(path: str, pool: BlockingPool) -> AsyncGenerator[None]:
    """Hold the lock of a file that is being made; but do not wait too long for another process: it may never run again,
    and nor may another loop of this process, which was stopped.
    """
    loop = asyncio.get_running_loop()
    try:
        descriptor = await pool.acquire(partial(_open_lock, path), os.close)
    except OSError:  # the folder cannot be written to, which `_put` reports
        yield
        return
    locked, until, pause = False, loop.time() + _WAIT_S, _FIRST_POLL_S
    try:
        # Not a wait in a thread, which nothing could end: so it polls.
        while not (locked := try_lock(descriptor)) and loop.time() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        yield
    finally:
        if locked:
            unlock(descriptor)  # also for a child that was forked meanwhile, and has the descriptor
        os.close(descriptor)


def _open_lock(path: str) -> int:
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    return open_regular(path, os.O_RDWR | os.O_CREAT)
