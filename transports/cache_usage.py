"""Enforces the size limit of the local cache: counts the bytes in use, and evicts the least recently used files.

Data path: none; cache_store calls it before it writes a file.

The limit applies to all processes that share the directory. A process that starts to write an object adds its size to
two numbers in one file, of the bytes that were added and of those that were given back. It holds that file's lock for
these microseconds only.

A process that finds the limit exceeded tries to take the directory's lock. If it gets the lock, it counts the actual
files, deletes the least recently used files, and begins the numbers anew. If another process holds the lock, the object
at hand is not cached.

The recorded sum may be too high until the next count, and is never too low. The bytes of killed processes and of
damaged files stay in it. Of changes that happen during a count, additions may be counted twice and subtractions are
lost. Therefore a file is created before its bytes are added, its bytes are subtracted before it is deleted, and during
a count unfinished files are counted before finished files.
"""

# All of it runs in threads. Names are strings, as in `local`.
# ruff: noqa: PTH108, PTH118

from __future__ import annotations

import os
import struct
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass

from asyncloader.telemetry.counters import count
from asyncloader.transports.cache_layout import (
    Stored,
    charge,
    choose_victims,
    entry_url_key,
    fill_charge,
)
from asyncloader.transports.file_lock import open_regular, same_file, try_lock, unlock, wait_for_lock

# An eviction frees 1/10 of the limit in addition, so that the next object does not need another eviction.
_FREED = 10

_NUMBERS = struct.Struct(">qq")  # bytes added, bytes given back


@dataclass(slots=True)
class CacheCounts:
    """Cache statistics of one transport in one process, since its creation.

    Attributes:
        hits: blocks of 1 MiB, or parts of them, that were read from the cache.
        misses: blocks that were read from the store, and reads of objects that cannot be cached.
        bytes_saved: bytes served from the cache.
        evictions: files deleted to keep `cache_bytes`.
        damaged: files deleted because their bytes were not those that had been written.
    """

    hits: int = 0
    misses: int = 0
    bytes_saved: int = 0
    evictions: int = 0
    damaged: int = 0

    def hit(self, blocks: int = 1) -> None:
        """Count blocks that were read from the cache."""
        self.hits += blocks
        count("cache_hits", blocks)

    def save(self, nbytes: int) -> None:
        """Count bytes served from the cache."""
        self.bytes_saved += nbytes
        count("cache_bytes", nbytes)

    def miss(self, blocks: int = 1) -> None:
        """Count blocks that are read from the store."""
        self.misses += blocks
        count("cache_misses", blocks)

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

    def start(self) -> None:
        """Clean up after dead processes; count the files if that was not done."""
        if self.total() is None and not self._tidy():
            # Another process holds the lock, and counts: until then, nothing could be reserved.
            with self._locked("lock"):
                pass
        self._clean()

    def reserve(self, charged: int) -> bool:
        """Reserve `charged` bytes of the limit for an empty file that exists under its name in ``fills``.

        Evicts if necessary. Returns False if there is no room at the moment; the bytes stay reserved until `release`.
        """
        total = self._add(charged)
        if total is not None and (self.limit is None or total <= self.limit):
            return True
        # `_tidy` counts the new file in ``fills`` like any other.
        total = self.total() if self._tidy() else None
        return total is not None and (self.limit is None or total <= self.limit)

    def release(self, charged: int) -> None:
        """Give back the bytes of a file that is about to be deleted."""
        self._add(-charged)

    def total(self) -> int | None:
        """Return the recorded sum; None if the file is missing or damaged."""
        return self._add(0)

    def _add(self, change: int) -> int | None:
        with self._numbers(os.O_RDWR) as (descriptor, found):
            if found is None:
                return None
            added, removed = found
            added, removed = added + max(change, 0), removed + max(-change, 0)
            if change:
                os.pwrite(descriptor, _NUMBERS.pack(added, removed), 0)
            return added - removed

    @contextmanager
    def _numbers(self, flags: int) -> Generator[tuple[int, tuple[int, int] | None]]:
        """Lock the file of the numbers; None: they are missing or damaged."""
        if not flags & os.O_CREAT and not os.path.lexists(os.path.join(self._root, "used")):
            yield -1, None
            return
        with self._locked("used", flags) as descriptor:
            record = os.pread(descriptor, _NUMBERS.size + 1, 0)
            found: tuple[int, int] = _NUMBERS.unpack(record) if len(record) == _NUMBERS.size else (0, 1)
            yield descriptor, found if found[0] >= found[1] else None

    def _tidy(self) -> bool:
        """Count the actual files, evict, and begin the numbers anew; False if another process is doing that."""
        with self._locked("lock", wait=False) as lock:
            if lock < 0:
                return False
            # Additions from here on may be of files that are not counted below: they are added to the total.
            with self._numbers(os.O_RDWR) as (_, found):
                before = 0 if found is None else found[0]
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
            with self._numbers(os.O_RDWR | os.O_CREAT) as (descriptor, found):
                total += 0 if found is None else max(0, found[0] - before)
                # Written first: the zeros of a file that was only made longer would be believed.
                os.pwrite(descriptor, _NUMBERS.pack(total, 0), 0)
                os.ftruncate(descriptor, _NUMBERS.size)
            return True

    @contextmanager
    def _locked(self, name: str, flags: int = os.O_RDWR | os.O_CREAT, *, wait: bool = True) -> Generator[int]:
        """Open and lock a file of the cache, and give its descriptor; -1: another process has the lock."""
        descriptor = open_regular(os.path.join(self._root, name), flags)
        try:
            if wait:
                wait_for_lock(descriptor)
            yield descriptor if wait or try_lock(descriptor) else -1
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

    def cleaning(self) -> AbstractContextManager[int]:
        """Hold while the files in ``fills`` are cleaned up, or must not be: that locks each of them for a moment."""
        return self._locked("cleaning")

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
