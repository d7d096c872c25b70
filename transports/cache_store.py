"""The objects in a local cache directory: opens, writes and verifies their files.

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
# ruff: noqa: PTH102, PTH103, PTH104, PTH108, PTH112, PTH113, PTH118, PTH120, PTH208

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
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

_log = logging.getLogger("asyncloader")

# A file's time of last use is updated when it is older than this, or in the future.
USE_AGE_NS = 60_000_000_000

# Verified files that are remembered, at some 100 bytes each.
_MOST_VERIFIED = 1 << 18

_AT_ONCE = 1 << 20  # bytes

_MOST_PIECES = 256  # of a system call; POSIX allows at least 16, and Linux 1024

# The names in a cache directory.
_PARTS = frozenset({MARKER_NAME, "objects", "fills", "used", "usage", "usage.new", "lock"})


class EntryLost(Exception):
    """A file of the cache was opened, but cannot be read. It has been deleted; the store still has the object."""


class CacheEntry:
    """An open object in the cache. Several threads may use it; one thread closes it.

    Attributes:
        etag, size, created: as in its `CacheFooter`.
        path: the file.
        descriptor: the open file; -1 when it is closed.
    """

    def __init__(self, descriptor: int, path: str, footer: CacheFooter) -> None:
        self.etag = footer.etag
        self.size = footer.size
        self.created = footer.created
        self.path = path
        self.descriptor = descriptor
        # Held during a read: the system may give a closed descriptor's number to another file at once, and the read
        # would return that file's bytes.
        self._lock = threading.Lock()

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes starting at `start`.

        Raises:
            EntryLost: the disk failed, or the file was truncated.
        """
        with self._lock:
            if self.descriptor < 0:
                raise EntryLost(f"{self.path} was closed before the read began")
            try:
                return self._read(start, length)
            except OSError as error:
                self._remove()
                raise EntryLost(f"reading {self.path} failed: {error}") from error

    def detach(self) -> int:
        """Return the descriptor, which is the caller's to close; this entry is closed."""
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        """Close the file, after a read in progress."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1

    def _remove(self) -> None:
        with suppress(OSError):
            # By now the name may belong to a new copy, which another process wrote after an eviction.
            if same_file(self.descriptor, self.path):
                os.unlink(self.path)

    def _read(self, start: int, length: int) -> bytes:
        data = os.pread(self.descriptor, length, start)
        while len(data) < length:  # one system call returns at most 2 GiB
            more = os.pread(self.descriptor, length - len(data), start + len(data))
            if not more:
                raise OSError(errno.EIO, "it was cut while it was read")
            data += more
        return data


class BeingWritten(Exception):
    """Another writer, in this process or in another, has claimed the file."""


class CacheFill:
    """An object that is being written to the cache. The caller ends it with `commit` or `abort`, in any thread."""

    def __init__(
        self, descriptor: int, temporary: str, final: str, footer: CacheFooter, usage: CacheUsage, verified: _Verified
    ) -> None:
        self._descriptor = descriptor  # holds the lock on the file
        self._temporary = temporary
        self._final = final
        self._footer = footer
        self._usage = usage
        self._verified = verified
        self._written = 0
        self._crc = 0
        # A stream that is closed aborts in one thread while another thread may still be writing a chunk.
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Append bytes of the object; does nothing after the end. OSError: the disk is full or failed."""
        with self._lock:
            if self._descriptor >= 0:
                self._append(data)
                self._crc = zlib.crc32(data, self._crc)
                self._written += len(data)

    def commit(self, *last: bytes | memoryview) -> bool:
        """Append the last bytes, in any pieces, and give the file its name if the object is complete; otherwise
        abort.
        """
        with self._lock:
            if self._descriptor < 0 or self._written + sum(map(len, last)) != self._footer.size:
                self._end(keep=False)
                return False
            try:
                crc = self._crc
                for piece in last:
                    crc = zlib.crc32(piece, crc)
                footer = self._footer._replace(crc=crc, created=time.time_ns())
                self._append(*last, footer.pack())
                try:
                    # Renamed while the file is locked: otherwise another writer could claim it first, and truncate it.
                    os.rename(self._temporary, self._final)
                except FileNotFoundError:
                    with suppress(FileExistsError):  # not makedirs: a new root would lack its marker
                        os.mkdir(os.path.dirname(self._final), 0o700)
                    os.rename(self._temporary, self._final)
            except FileNotFoundError:  # the cache was deleted
                self._end(keep=False)
                return False
            except BaseException:
                self._end(keep=False)
                raise
            self._verified.add(os.fstat(self._descriptor), footer)  # its bytes are those of the checksum
            self._end(keep=True)
            return True

    def abort(self) -> None:
        """Delete the file; does nothing after the end."""
        with self._lock:
            self._end(keep=False)

    def _append(self, *parts: bytes | memoryview) -> None:
        if len(parts) > _MOST_PIECES:
            parts = (b"".join(parts),)
        written = os.writev(self._descriptor, parts)
        if written < sum(map(len, parts)):  # the disk is full, which the next call reports; or more than 2 GiB
            view = memoryview(b"".join(parts))[written:]
            while view:
                view = view[os.write(self._descriptor, view) :]

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


class _Verified:
    """The files whose checksum was right when this process first opened them, or that it has written."""

    def __init__(self) -> None:
        self._names: set[int] = set()
        self._pid = 0

    def has(self, status: os.stat_result, footer: CacheFooter) -> bool:
        return self._pid == os.getpid() and self._name(status, footer) in self._names

    def add(self, status: os.stat_result, footer: CacheFooter) -> None:
        if self._pid != os.getpid() or len(self._names) >= _MOST_VERIFIED:
            self._names, self._pid = set(), os.getpid()
        self._names.add(self._name(status, footer))

    @staticmethod
    def _name(status: os.stat_result, footer: CacheFooter) -> int:
        return hash((status.st_dev, status.st_ino, footer.created, footer.crc))


class CacheStore:
    """The objects in a cache directory. Holds no descriptor, and does nothing before the first call.

    Args:
        directory: absolute path; created if missing. Only the cache's own sub-directory in it is used.
        limit: maximum bytes of all objects of all processes; None for no limit.
        counts: where evictions and damaged files are counted.
    """

    def __init__(self, directory: str, limit: int | None, counts: CacheCounts) -> None:
        self.directory = directory
        self.usage = CacheUsage(os.path.join(directory, ROOT_NAME), limit, counts)
        self._root = os.path.join(directory, ROOT_NAME)
        self._trusted = False
        self._started_in = 0  # pid of the process that has called `_start`
        self._starting: dict[int, threading.Lock] = {}  # by pid: a fork must not inherit a locked lock
        self._counts = counts
        self._verified = _Verified()

    def has(self, url_key: str) -> bool:
        """Return whether any version of an object is cached."""
        return bool(self._versions(url_key))

    def open(self, url_key: str, etag: str) -> CacheEntry | None:
        """Open one version of an object; None if it is not cached."""
        if not self._check_root():
            return None
        entry = self._open(os.path.join(self._directory_of(url_key), entry_name(url_key, etag)), url_key)
        if entry is not None and entry.etag != etag:  # not a hash collision: the file was renamed
            entry.close()
            return None
        return entry

    def open_newest(self, url_key: str) -> CacheEntry | None:
        """Open the version of an object that was cached last; None if no version is cached."""
        newest: CacheEntry | None = None
        for path in self._versions(url_key):
            entry = self._open(path, url_key)
            if entry is not None and (newest is None or entry.created > newest.created):
                newest, entry = entry, newest
            if entry is not None:
                entry.close()
        return newest

    def begin(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        """Start to write an object, like `claim`; also None if another writer is writing it."""
        try:
            return self.claim(url_key, etag, size)
        except BeingWritten:
            return None

    def claim(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        """Start to write an object. Return None if it is cached already or does not fit.

        Also None while another program deletes the cache.

        Raises:
            BeingWritten: another writer has claimed the object, and its process lives.
            OSError: the directory cannot be written to.
        """
        try:
            return self._claim(url_key, etag, size)
        except FileNotFoundError:
            if os.path.isdir(self.directory):
                return None
            raise

    def _claim(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        if not storable_etag(etag):
            return None
        footer = CacheFooter(url_key, etag, size, 0, 0)
        charged = _charge(footer)
        if self.usage.limit is not None and charged > self.usage.limit:
            return None
        self._start()
        shelf = self._directory_of(url_key)
        if os.path.lexists(shelf) and not _is_directory(shelf):
            return None
        final = os.path.join(shelf, entry_name(url_key, etag))
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
            # Looked for after the lock is ours: another writer may have committed the object before.
            if self.usage.reserve(charged) and not os.path.lexists(final):
                return fill
        except BaseException:
            fill.abort()
            raise
        fill.abort()
        return None

    def put(self, url_key: str, etag: str, data: bytes) -> None:
        """Write a whole object, unless `begin` returns None. OSError: the directory or the disk fails."""
        fill = self.begin(url_key, etag, len(data))
        if fill is None:
            return
        try:
            fill.commit(data)
        finally:
            fill.abort()

    def forget(self, url_key: str, etag: str) -> None:
        """Delete one version of an object. Its bytes stay in the usage file, like those of a damaged file."""
        if self._has_shelf(url_key):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._directory_of(url_key), entry_name(url_key, etag)))

    def holds(self, url_key: str, etag: str) -> bool:
        """Return whether a file has the name of this version of an object. It may be damaged."""
        return os.path.lexists(os.path.join(self._directory_of(url_key), entry_name(url_key, etag)))

    # --- the directory

    def _directory_of(self, url_key: str) -> str:
        return os.path.join(self._root, "objects", url_key[:3])

    def _versions(self, url_key: str) -> list[str]:
        if not self._check_root() or not self._has_shelf(url_key):
            return []
        directory = self._directory_of(url_key)
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
        return [os.path.join(directory, name) for name in names if entry_url_key(name) == url_key]

    def _has_shelf(self, url_key: str) -> bool:
        """Return whether the object's directory exists. A link in its place is not followed."""
        return _is_directory(os.path.join(self._root, "objects")) and _is_directory(self._directory_of(url_key))

    def _verify(self, descriptor: int, status: os.stat_result, footer: CacheFooter) -> bool:
        """Return whether a file is whole; compares its checksum at the first use in this process, unless this process
        has written it.
        """
        if self._verified.has(status, footer):
            return True
        try:
            whole = is_whole(descriptor, footer)
        except OSError:  # a bad sector, which says nothing about other files
            whole = False
        if whole:
            self._verified.add(status, footer)
        return whole

    def _check_root(self) -> bool:
        """Return whether the cache exists. OSError: the path exists, but is not a cache of this user."""
        if self._trusted:
            return True
        user = os.geteuid()
        try:
            status = os.lstat(self._root)
            if not stat.S_ISDIR(status.st_mode) or (user and status.st_uid != user):
                raise PermissionError(errno.EPERM, "not a directory of this user", self._root)
            marked = os.path.isfile(os.path.join(self._root, MARKER_NAME))
            parts = set() if marked else set(os.listdir(self._root))
        except FileNotFoundError:
            return False
        if not parts <= _PARTS:
            raise PermissionError(errno.EPERM, f"no cache of ours: {MARKER_NAME} is missing", self._root)
        # Without its marker, the cache is being deleted or was partly deleted. `_make` marks it again.
        self._trusted = marked
        return marked

    def _start(self) -> None:
        """Create the directory if it is missing, and clean it up once per process."""
        if self._has_started():
            return
        # One thread at a time: the clean-up locks other writers' files for a moment, so that a claim of a second thread
        # would fail as if another process were writing the object.
        with self._starting.setdefault(os.getpid(), threading.Lock()):
            if self._has_started():
                return
            self._trusted = False
            if not self._check_root():
                self._make()
                self._check_root()
            for part in ["objects", "fills"]:
                path = os.path.join(self._root, part)
                with suppress(FileExistsError):
                    os.mkdir(path, 0o700)
                # If the cache is deleted at this moment, this raises FileNotFoundError, as `mkdir` would.
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise PermissionError(errno.EPERM, "not a directory of the cache", path)
            self.usage.start()
            self._started_in = os.getpid()

    def _has_started(self) -> bool:
        return self._started_in == os.getpid() and os.path.isdir(os.path.join(self._root, "fills"))

    def _make(self) -> None:
        """Create the cache's own directory. To other processes it appears together with its marker."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{ROOT_NAME}.", dir=self.directory)  # mode 0o700
        try:
            with open(os.path.join(made, MARKER_NAME), "xb") as marker:  # noqa: PTH123
                marker.write(MARKER)
            os.rename(made, self._root)
        except OSError as error:
            try:
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                    raise
                # Another process created the directory before, or the directory has lost its marker.
                os.rename(os.path.join(made, MARKER_NAME), os.path.join(self._root, MARKER_NAME))
            finally:
                shutil.rmtree(made, ignore_errors=True)

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
            if footer is None or footer.url_key != url_key or not self._verify(descriptor, status, footer):
                if same_file(descriptor, path):
                    self._counts.damage()
                    _log.warning("%s in the cache is damaged, and is read from the store again", path)
                    with suppress(OSError):  # the directory is read-only
                        # Its bytes stay in the usage file: several processes may find the damage, and each would
                        # subtract them.
                        os.unlink(path)
                os.close(descriptor)
                return None
            age = time.time_ns() - status.st_mtime_ns
            if not 0 <= age < USE_AGE_NS:
                with suppress(OSError):
                    os.utime(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return CacheEntry(descriptor, path, footer)


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
