"""The local cache's directory: what is in it, and how something gets there. Data path: thread -> [file] -> bytes.

Many processes use one directory without waiting for each other. Files are complete when they get their names,
and are never changed; a file that is deleted while it is read is read to its end. A file that is not what its
footer says, torn by a loss of power or cut by hand, is deleted and counts as never cached.

Everything here blocks, and is called in threads. Errors are the system's; what a read must do about them is
decided in `cached`.

Whether a file of the local cache survived what happened to the system. Data path: under `cache_store`.
"""

# Names are strings, as the kernel takes and gives them: a Path for each read would cost more than its open.
# ruff: noqa: PTH102, PTH103, PTH104, PTH108, PTH110, PTH112, PTH113, PTH118, PTH120, PTH208

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from functools import cache

from asyncloader.transports.cache_layout import (
    BOOT_SIZE,
    MARKER,
    MARKER_NAME,
    ROOT_NAME,
    SYNCED,
    TAIL_SIZE,
    Footer,
    charge,
    entry_name,
    entry_url_key,
    fill_name,
    storable_etag,
)
from asyncloader.transports.cache_usage import OPEN_FLAGS, CacheCounts, CacheUsage, same_file, try_lock

__all__ = [
    "CacheEntry",
    "CacheFill",
    "CacheStore",
    "EntryLost",
    "boot",
    "verify",
]

# A file's time of last use is renewed when it is older than this, or in the future.
_USE_AGE_NS = 60_000_000_000

# What a cache consists of.
_PARTS = frozenset({MARKER_NAME, "objects", "fills", "usage", "usage.new", "lock"})


class EntryLost(Exception):
    """A file of the cache cannot be read although it was opened. It is deleted; the store has the object."""


class CacheEntry:
    """An object in the cache, open. May be used by several threads, and is closed by one of them.

    Attributes:
        etag, size, created: as its `Footer` has them.
    """

    def __init__(self, descriptor: int, path: str, footer: Footer) -> None:
        self.etag = footer.etag
        self.size = footer.size
        self.created = footer.created
        self._path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a descriptor must not be closed, and used for another file, under a read

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start` on.

        Raises:
            EntryLost: the disk fails, or the file was cut.
        """
        with self._lock:
            if self._descriptor < 0:
                raise EntryLost(f"{self._path} was closed before the read began")
            try:
                return self._read(start, length)
            except OSError as error:
                with suppress(OSError):
                    if same_file(self._descriptor, self._path):
                        os.unlink(self._path)
                raise EntryLost(f"reading {self._path} failed: {error}") from error

    def close(self) -> None:
        """Close the file, after a read in progress."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _read(self, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, start)
        if len(data) == length:
            return data
        parts, total = [data], len(data)
        while total < length:  # one system call gives 2 GiB at most
            data = os.pread(self._descriptor, length - total, start + total)
            if not data:
                raise OSError(errno.EIO, "it was cut while it was read")
            parts.append(data)
            total += len(data)
        return b"".join(parts)


class CacheFill:
    """An object on its way into the cache. Ends with `commit` or `abort`; both may come from any thread."""

    def __init__(self, descriptor: int, temporary: str, final: str, footer: Footer, usage: CacheUsage) -> None:
        self._descriptor = descriptor  # holds the lock on the file
        self._temporary = temporary
        self._final = final
        self._footer = footer
        self._usage = usage
        self._written = 0
        self._crc = 0
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Append bytes of the object; none are written after the end. OSError: the disk is full, or fails."""
        with self._lock:
            if self._descriptor >= 0:
                self._append(data)
                self._crc = zlib.crc32(data, self._crc)
                self._written += len(data)

    def commit(self, last: bytes = b"") -> bool:
        """Append the last bytes, and give the file its name, if these were all bytes of the object; else abort."""
        with self._lock:
            if self._descriptor < 0 or self._written + len(last) != self._footer.size:
                self._end(keep=False)
                return False
            try:
                crc = zlib.crc32(last, self._crc)
                self._append(last, self._footer._replace(crc=crc, created=time.time_ns()).pack())
                if self._footer.boot == SYNCED:
                    os.fsync(self._descriptor)
                try:
                    os.rename(self._temporary, self._final)
                except FileNotFoundError:
                    with suppress(FileExistsError):  # the shelf alone: without its marker the cache would be nobody's
                        os.mkdir(os.path.dirname(self._final), 0o700)
                    os.rename(self._temporary, self._final)
            except FileNotFoundError:  # somebody has deleted the cache
                self._end(keep=False)
                return False
            except BaseException:
                self._end(keep=False)
                raise
            self._end(keep=True)
            return True

    def abort(self) -> None:
        """Delete the file; nothing if it has ended already."""
        with self._lock:
            self._end(keep=False)

    def _append(self, *parts: bytes) -> None:
        written = os.writev(self._descriptor, parts)
        if written < sum(map(len, parts)):  # the disk is full, as the next call will say; or more than 2 GiB
            view = memoryview(b"".join(parts))[written:]
            while view:
                view = view[os.write(self._descriptor, view) :]

    def _end(self, *, keep: bool) -> None:
        if self._descriptor < 0:
            return
        try:
            if not keep:
                with suppress(OSError):
                    self._usage.release(_charge(self._footer))
                with suppress(OSError):
                    os.unlink(self._temporary)
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class CacheStore:
    """The objects in a cache directory. Holds no descriptor; does nothing before the first call.

    Args:
        directory: absolute path; its own sub-directory and nothing else in it is used. Made if missing.
        limit: bytes that the objects of all processes may take, None for no limit.
        counts: where evictions are counted.
    """

    def __init__(self, directory: str, limit: int | None, counts: CacheCounts) -> None:
        self.directory = directory
        self.usage = CacheUsage(os.path.join(directory, ROOT_NAME), limit, counts)
        self._root = os.path.join(directory, ROOT_NAME)
        self._trusted = False
        self._started_in = 0  # the process that has begun to write
        self._starting: dict[int, threading.Lock] = {}  # by process: a fork must not inherit one that is held

    def has(self, url_key: str) -> bool:
        """Whether any version of an object is cached."""
        return bool(self._versions(url_key))

    def open(self, url_key: str, etag: str) -> CacheEntry | None:
        """Open one version of an object; None if it is not cached."""
        if not self._check_root():
            return None
        entry = self._open(os.path.join(self._shelf(url_key), entry_name(url_key, etag)), url_key)
        if entry is not None and entry.etag != etag:  # 128 bits of hash do not collide; a file can be renamed
            entry.close()
            return None
        return entry

    def open_newest(self, url_key: str) -> CacheEntry | None:
        """Open the version of an object that was cached last; None if there is none."""
        newest: CacheEntry | None = None
        for path in self._versions(url_key):
            entry = self._open(path, url_key)
            if entry is not None and (newest is None or entry.created > newest.created):
                newest, entry = entry, newest
            if entry is not None:
                entry.close()
        return newest

    def begin(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        """Begin to write an object. None if that is not to be: it is there, is being written, or has no room.

        Also None while somebody deletes the cache.

        Raises:
            OSError: the directory cannot be written to.
        """
        try:
            return self._begin(url_key, etag, size)
        except FileNotFoundError:
            if os.path.isdir(self.directory):
                return None
            raise

    def _begin(self, url_key: str, etag: str, size: int) -> CacheFill | None:
        if not storable_etag(etag):
            return None
        footer = Footer(url_key, etag, size, 0, 0, boot())
        charged = _charge(footer)
        if self.usage.limit is not None and charged > self.usage.limit:
            return None
        self._start()
        final = os.path.join(self._shelf(url_key), entry_name(url_key, etag))
        temporary = os.path.join(self._root, "fills", fill_name(url_key, etag, charged))
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
        try:
            # The lock says that the writer lives. Whoever had it before may have renamed or deleted the file.
            if not try_lock(descriptor) or not same_file(descriptor, temporary):
                os.close(descriptor)
                return None
        except BaseException:
            os.close(descriptor)
            raise
        fill = CacheFill(descriptor, temporary, final, footer, self.usage)
        try:
            os.ftruncate(descriptor, 0)  # a dead writer's bytes
            if self.usage.reserve(charged) and not os.path.exists(final):
                return fill
        except BaseException:
            fill.abort()
            raise
        fill.abort()
        return None

    def put(self, url_key: str, etag: str, data: bytes) -> None:
        """Write a whole object, unless `begin` says no. OSError: as there, and as `CacheFill.write`."""
        fill = self.begin(url_key, etag, len(data))
        if fill is None:
            return
        try:
            fill.commit(data)
        finally:
            fill.abort()

    # --- the directory

    def _shelf(self, url_key: str) -> str:
        return os.path.join(self._root, "objects", url_key[:3])

    def _versions(self, url_key: str) -> list[str]:
        if not self._check_root():
            return []
        shelf = self._shelf(url_key)
        try:
            names = os.listdir(shelf)
        except FileNotFoundError:
            return []
        return [os.path.join(shelf, name) for name in names if entry_url_key(name) == url_key]

    def _check_root(self) -> bool:
        """Whether there is a cache. OSError: what is there is not ours to use."""
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
        # Without its marker it is being deleted, or was as far as it was not in use. `_make` marks it again.
        self._trusted = marked
        return marked

    def _start(self) -> None:
        """Make the directory if it is missing, and clean up in it once a process."""
        if self._has_started():
            return
        # One thread at a time: who cleans up looks at the others' files, and locks them for that.
        with self._starting.setdefault(os.getpid(), threading.Lock()):
            if self._has_started():
                return
            self._trusted = False
            if not self._check_root():
                self._make()
                self._check_root()
            for part in ["objects", "fills"]:
                with suppress(FileExistsError):
                    os.mkdir(os.path.join(self._root, part), 0o700)
            self.usage.start()
            self._started_in = os.getpid()

    def _has_started(self) -> bool:
        return self._started_in == os.getpid() and os.path.isdir(os.path.join(self._root, "fills"))

    def _make(self) -> None:
        """Make the cache's own directory. It is there with its marker or not at all, whoever looks."""
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
                # Another process was faster, or it has lost its marker.
                os.rename(os.path.join(made, MARKER_NAME), os.path.join(self._root, MARKER_NAME))
            finally:
                shutil.rmtree(made, ignore_errors=True)

    def _open(self, path: str, url_key: str) -> CacheEntry | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ELOOP}:  # not there, or a link, which is none of ours
                return None
            raise
        try:
            status = os.fstat(descriptor)
            start = max(0, status.st_size - TAIL_SIZE)
            footer = Footer.parse(os.pread(descriptor, TAIL_SIZE, start), status.st_size)
            if footer is None or footer.url_key != url_key or not verify(descriptor, path, footer):
                if same_file(descriptor, path):
                    with suppress(OSError):  # a directory that cannot be written to
                        # Its bytes stay in the account: several may find it at once, and each would give them back.
                        os.unlink(path)
                os.close(descriptor)
                return None
            age = time.time_ns() - status.st_mtime_ns
            if not 0 <= age < _USE_AGE_NS:
                with suppress(OSError):
                    os.utime(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return CacheEntry(descriptor, path, footer)


def _charge(footer: Footer) -> int:
    return charge(footer.size + len(footer.pack()))


_AT_ONCE = 1 << 20


def verify(descriptor: int, path: str, footer: Footer) -> bool:
    """Whether the bytes are those that were written.

    A file that was written since the system started is what the page cache says. One from before is read once,
    as its last blocks may have reached the disk and others not, and marked with this start.
    """
    now = boot()
    if footer.boot in {SYNCED, now}:
        return True
    crc = position = 0
    while position < footer.size:
        data = os.pread(descriptor, min(_AT_ONCE, footer.size - position), position)
        if not data:
            return False
        crc = zlib.crc32(data, crc)
        position += len(data)
    if crc != footer.crc:
        return False
    with suppress(OSError):  # a directory that cannot be written to: verified at every use
        writable = os.open(path, os.O_WRONLY | OPEN_FLAGS)
        try:
            if same_file(descriptor, path):
                os.pwrite(writable, now, os.fstat(descriptor).st_size - BOOT_SIZE)
        finally:
            os.close(writable)
    return True


@cache
def boot() -> bytes:
    """Give this start of the system, `SYNCED` where the system does not name it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # noqa: PTH123
            return bytes.fromhex(file.read().strip().replace(b"-", b"").decode())
    except (OSError, ValueError):
        return SYNCED
