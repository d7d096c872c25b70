"""How much the local cache holds, and what goes when that is too much. Data path: beside `cache_store`'s fills.

The limit is one for all processes that share the directory. They keep account in one file of changes: who
begins to write an object appends its bytes, then adds up everything there; so of two who come at once, one
sees both. Nobody waits for a lock.

Whoever finds the limit passed takes the lock of the directory if it is free, counts what is there, deletes
the files used longest ago, and writes the account anew. If the lock is taken, somebody else is at it, and the
object in hand is not cached.

The account may be too high, until it is rewritten, and is never too low. What a killed process took stays in it, and
so does what a file took that was found torn.
Of what happens while it is rewritten, what is taken may count twice and what is given back may not count; so a
file is made before its bytes are taken, its bytes are given back before it is deleted, and files that are being
written are counted before those that are finished.
"""

# Everything here runs in threads. Names are strings, as in `confine`.
# ruff: noqa: PTH104, PTH108, PTH116, PTH118

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from asyncloader.counters import COUNTERS
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

__all__ = ["OPEN_FLAGS", "CacheCounts", "CacheUsage", "same_file", "try_lock"]

OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
"""For every open in the directory: links are never followed, so nothing outside of it is touched."""

# A share of the limit that stays free after an eviction, so that the next object does not need another one.
_FREED = 10

# An account begins with random bytes, by which it is told from those before it: inode numbers are used again.
_NAME_SIZE = 8

# How often an account may be rewritten while one change is appended. It never is; this ends the loop.
_REWRITES = 8

# An account of so many bytes is rewritten when a process begins to use it; adding it up takes some milliseconds.
_LONG_ACCOUNT = 1 << 20


@dataclass(slots=True)
class CacheCounts:
    """What the cache did, for statistics. Counts of one transport in one process, from its making on.

    Attributes:
        hits: reads, range reads and streams that were given from the cache.
        misses: those that were asked of the store although caching was on.
        bytes_saved: bytes given from the cache.
        evictions: files deleted to keep `cache_bytes`.
    """

    hits: int = 0
    misses: int = 0
    bytes_saved: int = 0
    evictions: int = 0

    def hit(self) -> None:
        """A read is given from the cache."""
        self.hits += 1
        COUNTERS.add("cache_hits")

    def save(self, nbytes: int) -> None:
        """So many bytes were."""
        self.bytes_saved += nbytes
        COUNTERS.add("cache_bytes", nbytes)

    def miss(self) -> None:
        """A read is asked of the store."""
        self.misses += 1
        COUNTERS.add("cache_misses")

    def evict(self) -> None:
        """A file was deleted."""
        self.evictions += 1
        COUNTERS.add("cache_evictions")

    def snapshot(self) -> dict[str, int]:
        """Give a copy as plain types: ``hits``, ``misses``, ``bytes_saved``, ``evictions``."""
        return asdict(self)


class CacheUsage:
    """The account and the limit of one cache directory.

    Args:
        root: the cache's own directory.
        limit: bytes, None for no limit.
        counts: where evictions are counted; only by the holder of the lock, so without a lock of its own.
    """

    def __init__(self, root: str, limit: int | None, counts: CacheCounts) -> None:
        self.limit = limit
        self._root = root
        self._counts = counts
        self._path = os.path.join(root, "usage")
        # Name and length of the account as it was added up last, and the sum. Replaced as a whole, so that
        # threads need no lock, which a fork could inherit locked.
        self._known = (b"", 0, 0)

    def start(self) -> None:
        """Clean up after dead processes, and begin an account if there is none, or it has become long."""
        try:
            long = os.stat(self._path).st_size > _LONG_ACCOUNT
        except FileNotFoundError:
            long = True
        if not (long and self._tidy()):
            self._clean()

    def reserve(self, charged: int) -> bool:
        """Take `charged` bytes of the limit for a file that is there under its name in ``fills``, empty yet.

        Evicts if need be. False when there is no room for it now; they are taken all the same, until `release`.
        """
        total = self._append(charged)
        if total is None:
            # Lost or damaged. The file in ``fills`` is counted like any other.
            total = self._append() if self._tidy() else None
        if total is not None and (self.limit is None or total <= self.limit):
            return True
        if total is None or not self._tidy():
            return False
        total = self._append()
        return total is not None and (self.limit is None or total <= self.limit)

    def release(self, charged: int) -> None:
        """Give back what a file takes that is about to be deleted."""
        self._append(-charged)

    def _append(self, change: int = 0) -> int | None:
        """Write a change down, and give the sum of the account; None when there is no account to read."""
        for _ in range(_REWRITES):
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | OPEN_FLAGS)
            except FileNotFoundError:
                return None
            try:
                if change:
                    os.write(descriptor, pack_change(change))
                total = self._sum(descriptor)
                # Else it was rewritten meanwhile, and the new account may lack the change or have it.
                if change < 0 or same_file(descriptor, self._path):
                    return total
            finally:
                os.close(descriptor)
        return None

    def _sum(self, descriptor: int) -> int | None:
        size = os.fstat(descriptor).st_size
        name = os.pread(descriptor, _NAME_SIZE, 0)
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
        """Count what is there, evict what is too much, and write the account anew; False if another is at it."""
        with self._lock() as locked:
            if not locked:
                return False
            before = self._length()
            self._clean()
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
        """Begin a new account with `total`, and what was taken in the old one after its first `before` bytes."""
        new = f"{self._path}.new"
        old = None
        with suppress(FileNotFoundError):
            old = os.open(self._path, os.O_RDONLY | OPEN_FLAGS)
        try:
            # Only the holder of the lock writes here, so what is there is left from a dead one.
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | OPEN_FLAGS, 0o600)
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

    @contextmanager
    def _lock(self) -> Generator[bool]:
        descriptor = os.open(os.path.join(self._root, "lock"), os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
        try:
            yield try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _files(self) -> Iterator[Stored]:
        """Give the objects' files. What has another name, or is no regular file, is not ours."""
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

    def _clean(self) -> None:
        """Delete what dead writers left in ``fills``. Who began to write it took its bytes, or did not come to that."""
        for _, path in self._fills():
            try:
                descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
            except FileNotFoundError:
                continue
            try:
                # While the lock is ours nobody begins to write this file.
                if try_lock(descriptor) and same_file(descriptor, path):
                    os.unlink(path)
            finally:
                os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this descriptor; False if another descriptor has the lock.

    The lock ends with the descriptor, also by its process's death; a forked child that inherited it holds it too.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same_file(descriptor: int, path: str) -> bool:
    """Whether `path` still names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _scan(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
