"""Enforces the size limit of the local cache: counts the bytes in use, and evicts the least recently used files.

Data path: none; cache_store calls it before it writes a file.

The limit applies to all processes that share the directory. They record changes in one append-only file: a process that
starts to write an object appends the object's size, then adds up the whole file. Of two processes that do so at once,
at least one sees both changes. No process waits for a lock, except at the start: for a process that creates the usage
file.

A process that finds the limit exceeded tries to take the directory's lock. If it gets the lock, it counts the actual
files, deletes the least recently used files, and rewrites the usage file. If another process holds the lock, the object
at hand is not cached.

The recorded sum may be too high until the next rewrite, and is never too low. The bytes of killed processes and of
damaged files stay in it. Of changes that happen during a rewrite, additions may be counted twice and subtractions may
be lost. Therefore a file is created before its bytes are added, its bytes are subtracted before it is deleted, and
during a rewrite unfinished files are counted before finished files.
"""

# All of it runs in threads. Names are strings, as in `local`.
# ruff: noqa: PTH104, PTH108, PTH116, PTH118

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from asyncloader.plain_context import plain_context
from asyncloader.telemetry.counters import count
from asyncloader.transports.cache_layout import (
    Stored,
    charge,
    choose_victims,
    entry_url_key,
    fill_charge,
    pack_change,
    sum_added,
    sum_changes,
)
from asyncloader.transports.file_lock import same_file, try_lock, unlock, wait_for_lock
from asyncloader.transports.regular_file import open_regular

# An eviction frees 1/10 of the limit in addition, so that the next object does not need another eviction.
_FREED = 10

# A usage file begins with random bytes that identify it: a new file may get the inode number of a deleted file.
_NAME_SIZE = 8

# Bounds the retries if the usage file is rewritten while one change is appended.
_REWRITES = 8

# A longer usage file is rewritten when a process starts to use it; adding it up takes some milliseconds.
_LONG_ACCOUNT = 1 << 20


@dataclass(slots=True)
class CacheCounts:
    """Cache statistics of one transport in one process, since its creation.

    Attributes:
        hits: reads, range reads and streams served from the cache.
        misses: reads, range reads and streams that went to the store although caching was on.
        bytes_saved: bytes served from the cache.
        evictions: files deleted to keep `cache_bytes`.
        damaged: files deleted because their bytes were not those that had been written.
    """

    hits: int = 0
    misses: int = 0
    bytes_saved: int = 0
    evictions: int = 0
    damaged: int = 0

    def hit(self) -> None:
        """Count a read served from the cache."""
        self.hits += 1
        count("cache_hits")

    def save(self, nbytes: int) -> None:
        """Count bytes served from the cache."""
        self.bytes_saved += nbytes
        count("cache_bytes", nbytes)

    def miss(self) -> None:
        """Count a read that goes to the store."""
        self.misses += 1
        count("cache_misses")

    def evict(self) -> None:
        """Count a deleted file."""
        self.evictions += 1
        count("cache_evictions")

    def damage(self) -> None:
        """Count a file with wrong bytes."""
        self.damaged += 1
        count("cache_damaged")

    def snapshot(self) -> dict[str, int]:
        """Return a copy as plain types: ``hits``, ``misses``, ``bytes_saved``, ``evictions``, ``damaged``."""
        return asdict(self)


class CacheUsage:
    """The recorded usage and the limit of one cache directory.

    Args:
        root: the cache's own directory.
        limit: bytes, None for no limit.
        counts: counts evictions; written only while the directory's lock is held.
    """

    def __init__(self, root: str, limit: int | None, counts: CacheCounts) -> None:
        self.limit = limit
        self._root = root
        self._counts = counts
        self._path = os.path.join(root, "usage")
        # Identity and length of the usage file as it was last added up, and the sum. Replaced as a whole, so that
        # threads need no lock, which a fork could inherit locked.
        self._known = (b"", 0, 0)

    def start(self) -> None:
        """Clean up after dead processes; create the usage file if it is missing, rewrite it if it is long."""
        size = self._length()
        if (not size or size > _LONG_ACCOUNT) and self._tidy():
            return
        if not size:
            # Another process holds the lock, and creates the usage file: until then, nothing could be reserved.
            with self._lock(wait=True):
                pass
        self._clean()

    def reserve(self, charged: int) -> bool:
        """Reserve `charged` bytes of the limit for an empty file that exists under its name in ``fills``.

        Evicts if necessary. Returns False if there is no room at the moment; the bytes stay reserved until `release`.
        """
        total = self._append(charged)
        if total is None:
            # The usage file is lost or damaged. `_tidy` counts the new file in ``fills`` like any other.
            total = self._append() if self._tidy() else None
        if total is not None and (self.limit is None or total <= self.limit):
            return True
        if total is None or not self._tidy():
            return False
        total = self._append()
        return total is not None and (self.limit is None or total <= self.limit)

    def release(self, charged: int) -> None:
        """Give back the bytes of a file that is about to be deleted."""
        self._append(-charged)

    def _append(self, change: int = 0) -> int | None:
        """Record a change and return the new sum; None if there is no readable usage file."""
        for _ in range(_REWRITES):
            try:
                descriptor = open_regular(self._path, os.O_RDWR | os.O_APPEND)
            except FileNotFoundError:
                return None
            try:
                # Appended first, then added up: of two processes that do so at once, at least one sees both changes.
                if change:
                    os.write(descriptor, pack_change(change))
                total = self._sum(descriptor)
                # Otherwise another process has rewritten the file, and the new file may lack the change, which is
                # appended again: an addition may be counted twice, and a subtraction (which is not repeated) may be
                # lost.
                if change < 0 or same_file(descriptor, self._path):
                    return total
            finally:
                os.close(descriptor)
        return None

    def _sum(self, descriptor: int) -> int | None:
        size = os.fstat(descriptor).st_size
        name = os.pread(descriptor, _NAME_SIZE, 0)
        # Read once: another thread may replace the tuple.
        known, length, total = self._known
        if name != known or length > size:
            length, total = _NAME_SIZE, 0
        records = os.pread(descriptor, max(0, size - length), length)
        added = sum_changes(records)
        if added is None or len(name) < _NAME_SIZE:
            return None
        self._known = (name, length + len(records), total + added)
        return total + added

    def _tidy(self) -> bool:
        """Count the actual files, evict, and rewrite the usage file; False if another process is doing that."""
        with self._lock() as locked:
            if not locked:
                return False
            # Additions after this length may be of files that are not counted below: `_rewrite` adds them to the total.
            before = self._length()
            self._clean()
            # Unfinished files first: a file that gets its final name in between is counted twice, and not left out.
            total = sum(charged for charged, _ in self._fills())
            total += sum(file.charged for file in self._files())
            if self.limit is not None and total > self.limit:
                for victim in choose_victims(self._files(), total - self.limit + self.limit // _FREED):
                    with suppress(FileNotFoundError):
                        os.unlink(victim.path)
                        self._counts.evict()
                    total -= victim.charged
            self._rewrite(total, before)
            return True

    def _length(self) -> int:
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def _rewrite(self, total: int, before: int) -> None:
        """Start a new usage file with `total`, plus the additions in the old one after its first `before` bytes."""
        new = f"{self._path}.new"
        old = None
        with suppress(FileNotFoundError):
            old = open_regular(self._path, os.O_RDONLY)
        try:
            # Only the holder of the lock writes this file, so an existing file was left by a dead process.
            descriptor = open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                os.write(descriptor, os.urandom(_NAME_SIZE) + pack_change(total))
                os.rename(new, self._path)
            finally:
                os.close(descriptor)
            if old is not None and before and (size := os.fstat(old).st_size) > before:
                self._append(sum_added(os.pread(old, size - before, before)))
        finally:
            if old is not None:
                os.close(old)

    @plain_context
    def _lock(self, *, wait: bool = False) -> Generator[bool]:
        descriptor = open_regular(os.path.join(self._root, "lock"), os.O_RDWR | os.O_CREAT)
        try:
            if wait:
                wait_for_lock(descriptor)
            yield wait or try_lock(descriptor)
        finally:
            unlock(descriptor)  # a child that was forked meanwhile has the descriptor, and would hold the lock, too
            os.close(descriptor)

    def _files(self) -> Iterator[Stored]:
        """Return the objects' files. Files with other names, links and directories do not belong to the cache."""
        for shelf in _scan(os.path.join(self._root, "objects")):
            if not shelf.is_dir(follow_symlinks=False):
                continue
            for file in _scan(shelf.path):
                if entry_url_key(file.name) is None or not file.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    yield Stored(status.st_mtime_ns, file.path, charge(status.st_size))

    def _fills(self) -> Iterator[tuple[int, str]]:
        for file in _scan(os.path.join(self._root, "fills")):
            charged = fill_charge(file.name)
            if charged is not None and file.is_file(follow_symlinks=False):
                yield charged, file.path

    @plain_context
    def cleaning(self) -> Generator[None]:
        """Hold while the files in ``fills`` are cleaned up, or must not be: that locks each of them for a moment."""
        descriptor = os.open(os.path.join(self._root, "fills"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            wait_for_lock(descriptor)
            yield
        finally:
            unlock(descriptor)  # see `_lock`
            os.close(descriptor)

    def _clean(self) -> None:
        """Delete the files of dead writers in ``fills``. Their bytes stay recorded until the next rewrite."""
        with suppress(FileNotFoundError), self.cleaning():
            for _, path in self._fills():
                try:
                    descriptor = open_regular(path, os.O_RDONLY)
                except OSError:  # another process has deleted the file, or it is a link, which the cache never creates
                    continue
                try:
                    # While we hold the lock, no other process starts to write this file.
                    if try_lock(descriptor) and same_file(descriptor, path):
                        os.unlink(path)
                finally:
                    os.close(descriptor)


def _scan(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
