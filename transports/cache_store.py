"""The files of a local cache directory: opens, writes and verifies them.

Data path: cached -> a thread -> [cache_store: file] -> bytes.

Any number of processes use one directory without waiting for each other. A file is complete when it gets its name, and
never changes after that; if it is deleted while it is read, the read continues.

A file whose bytes do not match its footer, because of a failing disk or a power loss, is deleted and counts as never
cached. A process compares the checksum when it opens a file for the first time that it has not written itself: at each
use, it would read each file twice. CRC-32 finds damage, not malice: a program that can write to the directory can
choose the bytes of every read.

All functions block and are called in threads. Errors are the operating system's; `cached` decides what they mean for a
read.
"""

# Names are strings, as the kernel takes and gives them: a Path for each read would cost more than its open.
# ruff: noqa: PTH102, PTH103, PTH104, PTH108, PTH112, PTH118, PTH120, PTH208

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
import zlib
from contextlib import suppress

from asyncloader.transports.cache_layout import (
    MARKER,
    MARKER_NAME,
    ROOT_NAME,
    TAIL_SIZE,
    CacheFooter,
    charge,
    entry_name,
    entry_url_key,
    fill_name,
    storable_etag,
)
from asyncloader.transports.cache_usage import CacheCounts, CacheUsage
from asyncloader.transports.file_lock import open_regular, same_file, try_lock
from asyncloader.transports.open_files import USE_AGE_NS, EntryLost, OpenFile

__all__ = ["BeingWritten", "CacheEntry", "CacheFill", "CacheStore", "EntryLost", "is_whole"]

_log = logging.getLogger("asyncloader")

# Verified files that are remembered, at some 100 bytes each.
_MOST_VERIFIED = 1 << 18

_AT_ONCE = 1 << 20  # bytes


class CacheEntry(OpenFile):
    """An open file of the cache; behind its bytes lies its footer.

    Attributes:
        etag, size, created: as in its `CacheFooter`.
    """

    __slots__ = ("created", "etag", "size")

    def __init__(self, descriptor: int, path: str, footer: CacheFooter) -> None:
        self.etag = footer.etag
        self.size = footer.size
        self.created = footer.created
        super().__init__(descriptor, path)


class BeingWritten(Exception):
    """Another writer, in this process or in another, has claimed the file."""


class CacheFill:
    """A file of the cache that was claimed. The caller ends it with `commit` or `abort`, in any thread."""

    def __init__(
        self, descriptor: int, temporary: str, final: str, footer: CacheFooter, usage: CacheUsage, verified: set[int]
    ) -> None:
        self._descriptor = descriptor  # holds the lock on the file
        self._temporary = temporary
        self._final = final
        self._footer = footer
        self._usage = usage
        self._verified = verified
        # A read that is cancelled aborts in one thread while another thread may still be writing.
        self._lock = threading.Lock()

    def commit(self, data: bytes | memoryview) -> None:
        """Write the file, of the size that was claimed, and give it its name; nothing after the end, or if the cache
        was deleted. OSError: the disk is full or failed.
        """
        with self._lock:
            if self._descriptor < 0:
                return
            footer = self._footer._replace(crc=zlib.crc32(data), created=time.time_ns())
            try:
                self._write(data, footer)
            except FileNotFoundError:
                self._end(keep=False)
            except BaseException:
                self._end(keep=False)
                raise
            else:
                # Its bytes are those of the checksum.
                self._verified.add(_identity(os.fstat(self._descriptor), footer))
                self._end(keep=True)

    def abort(self) -> None:
        """Delete the file; does nothing after the end."""
        with self._lock:
            self._end(keep=False)

    def _write(self, data: bytes | memoryview, footer: CacheFooter) -> None:
        packed = footer.pack()
        written = os.writev(self._descriptor, [data, packed])
        if written < len(data) + len(packed):  # the disk is full, which the next call reports; or more than 2 GiB
            view = memoryview(b"".join([data, packed]))[written:]
            while view:
                view = view[os.write(self._descriptor, view) :]
        try:
            # Renamed while the file is locked: otherwise another writer could claim it first, and truncate it.
            os.rename(self._temporary, self._final)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(self._final), 0o700)
            os.rename(self._temporary, self._final)

    def _end(self, *, keep: bool) -> None:
        if self._descriptor < 0:
            return
        try:
            if not keep:
                # Subtracted before the file is deleted: in the other order, an eviction that counts the actual files in
                # between would leave its bytes out, this would subtract them again, and the sum would be too low.
                with suppress(OSError):
                    self._usage.release(_charge(self._footer))
                with suppress(OSError):
                    os.unlink(self._temporary)
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class CacheStore:
    """The files in a cache directory. Holds no descriptor, and does nothing before the first call.

    Args:
        directory: absolute path; created if missing. Only the cache's own sub-directory in it is used.
        limit: maximum bytes of all files of all processes; None for no limit.
        counts: where evictions and damaged files are counted.
    """

    def __init__(self, directory: str, limit: int | None, counts: CacheCounts) -> None:
        self.directory = directory
        self._root = os.path.join(directory, ROOT_NAME)
        self.usage = CacheUsage(self._root, limit, counts)
        self._started_in = 0  # pid of the process that has called `_start`
        self._counts = counts
        # The files whose checksum was right when they were first opened, or that were written here.
        self._verified: set[int] = set()

    def has(self, url_key: str) -> bool:
        """Return whether any version of an object is cached."""
        return bool(self._versions(url_key))

    def open(self, url_key: str, etag: str) -> CacheEntry | None:
        """Open one version of an object; None if it is not cached."""
        entry = self._open(os.path.join(self._directory_of(url_key), entry_name(url_key, etag)), url_key)
        if entry is not None and entry.etag != etag:  # not a hash collision: the file was renamed
            entry.close()
            return None
        return entry

    def open_newest(self, url_key: str) -> CacheEntry | None:
        """Open the version of an object that was cached last; None if no version is cached."""
        entries = [self._open(path, url_key) for path in self._versions(url_key)]
        return max((each for each in entries if each is not None), key=lambda each: each.created, default=None)

    def claim(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        """Start to write a file. Return None if it is cached already or does not fit.

        Also None while another program deletes the cache.

        Raises:
            BeingWritten: another writer has claimed the file, and its process lives.
            OSError: the directory cannot be written to.
        """
        try:
            return self._claim(url_key, etag, size)
        except FileNotFoundError:
            if os.path.isdir(self.directory):
                return None
            raise

    def put(self, url_key: str, etag: str, data: bytes | memoryview) -> None:
        """Write a file, if it can be claimed. OSError: the directory or the disk fails."""
        with suppress(BeingWritten):
            fill = self.claim(url_key, etag, len(data))
            if fill is not None:
                fill.commit(data)

    def forget(self, url_key: str, etag: str) -> None:
        """Delete one version of an object. Its bytes stay in the usage file, like those of a damaged file."""
        if self._has_shelf(url_key):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._directory_of(url_key), entry_name(url_key, etag)))

    def _claim(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        shelf = self._directory_of(url_key)
        final = os.path.join(shelf, entry_name(url_key, etag))
        if not storable_etag(etag) or os.path.lexists(final):
            return None
        footer = CacheFooter(url_key, etag, size, 0, 0)
        charged = _charge(footer)
        if self.usage.limit is not None and charged > self.usage.limit:
            return None
        self._start()
        if os.path.lexists(shelf) and not _is_directory(shelf):
            return None
        temporary = os.path.join(self._root, "fills", fill_name(url_key, etag, charged))
        descriptor = _open_locked(temporary)
        if descriptor is None:
            # By another writer; or for a moment, by who looks whether the file's writer lives.
            with self.usage.cleaning():
                descriptor = _open_locked(temporary)
        if descriptor is None:
            raise BeingWritten(temporary)
        fill = CacheFill(descriptor, temporary, final, footer, self.usage, self._verified)
        try:
            os.ftruncate(descriptor, 0)  # remove the bytes of a dead writer
            # Looked for after the lock is ours: another writer may have committed the file before.
            if self.usage.reserve(charged) and not os.path.lexists(final):
                return fill
        except BaseException:
            fill.abort()
            raise
        fill.abort()
        return None

    # --- the directory

    def _directory_of(self, url_key: str) -> str:
        return os.path.join(self._root, "objects", url_key[:3])

    def _versions(self, url_key: str) -> list[str]:
        directory = self._directory_of(url_key)
        if not self._has_shelf(url_key):
            return []
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
        return [os.path.join(directory, name) for name in names if entry_url_key(name) == url_key]

    def _has_shelf(self, url_key: str) -> bool:
        """Return whether the file's directory exists. A link in the place of a directory is not followed.

        Raises:
            PermissionError: the cache's directory is a link, or another user's.
        """
        return (
            self._is_ours(self._root)
            and _is_directory(os.path.join(self._root, "objects"))
            and _is_directory(self._directory_of(url_key))
        )

    def _is_ours(self, path: str) -> bool:
        """Return whether a directory exists. PermissionError: it is no directory of this user."""
        user = os.geteuid()
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(status.st_mode) or (user and status.st_uid != user):
            raise PermissionError(errno.EPERM, "not a directory of this user", path)
        return True

    def _start(self) -> None:
        """Create the directory if it is missing, and clean it up once per process."""
        if self._started_in == os.getpid() and os.path.isdir(os.path.join(self._root, "fills")):
            return
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        for part in ["", "objects", "fills"]:
            path = os.path.join(self._root, part).rstrip("/")
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            # If the cache is deleted at this moment, this raises FileNotFoundError, as `mkdir` would.
            if not self._is_ours(path):
                raise FileNotFoundError(errno.ENOENT, "the cache was deleted", path)
        with suppress(FileExistsError), open(os.path.join(self._root, MARKER_NAME), "xb") as marker:  # noqa: PTH123
            marker.write(MARKER)
        self.usage.start()
        self._started_in = os.getpid()

    def _open(self, path: str, url_key: str) -> CacheEntry | None:
        if not self._has_shelf(url_key):
            return None
        try:
            descriptor = open_regular(path, os.O_RDONLY)
        except OSError as error:
            # Missing; or a link, FIFO, device or socket, which the cache never creates.
            if error.errno in {errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENODEV}:
                return None
            raise
        try:
            status = os.fstat(descriptor)
            start = max(0, status.st_size - TAIL_SIZE)
            footer = CacheFooter.parse(os.pread(descriptor, TAIL_SIZE, start), status.st_size)
            if footer is not None and footer.url_key == url_key and self._verify(descriptor, status, footer):
                if not 0 <= time.time_ns() - status.st_mtime_ns < USE_AGE_NS:
                    with suppress(OSError):
                        os.utime(descriptor)
                return CacheEntry(descriptor, path, footer)
            if same_file(descriptor, path):
                self._counts.damage()
                _log.warning("%s in the cache is damaged, and is read from the store again", path)
                with suppress(OSError):  # the directory is read-only
                    # Its bytes stay in the usage file: several processes may find the damage, and each would subtract
                    # them.
                    os.unlink(path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _verify(self, descriptor: int, status: os.stat_result, footer: CacheFooter) -> bool:
        """Return whether a file is whole; compares its checksum at the first use, unless it was written here."""
        identity = _identity(status, footer)
        if identity in self._verified:
            return True
        try:
            whole = is_whole(descriptor, footer)
        except OSError:  # a bad sector, which says nothing about other files
            whole = False
        if whole:
            if len(self._verified) >= _MOST_VERIFIED:
                self._verified.clear()
            self._verified.add(identity)
        return whole


def _identity(status: os.stat_result, footer: CacheFooter) -> int:
    return hash((status.st_dev, status.st_ino, footer.created, footer.crc))


def _charge(footer: CacheFooter) -> int:
    return charge(footer.size + len(footer.pack()))


def is_whole(descriptor: int, footer: CacheFooter) -> bool:
    """Return whether the bytes have the checksum that was computed when they were written."""
    crc = position = 0
    while position < footer.size:
        data = os.pread(descriptor, min(_AT_ONCE, footer.size - position), position)
        if not data:
            return False
        crc = zlib.crc32(data, crc)
        position += len(data)
    return crc == footer.crc


def _open_locked(path: str) -> int | None:
    """Open and lock the file of a fill, and return its descriptor; None: another descriptor has the lock."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        # The lock shows that the writer lives. Between our open and the lock, its holder may have renamed or deleted
        # the file: then the lock is on a file that no longer has this name.
        if try_lock(descriptor) and same_file(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_directory(path: str) -> bool:
    """Return whether `path` is a directory; a link to a directory is not."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
