"""Finds the complete files of `on_disk_cache`, and writes them, one process at a time among all that share them.

Data path: cache_on_disk -> [cache_files: temporary file, check, rename] -> files.

Beside an item's file may lie:

    <path>.torchdata_list   the paths of the item's files, a line each, if they are not this file alone; as in torchdata
    <path>.asyncloader_claim  while a process writes the files of this item
    <file>.<8 digits>.part  a file that is being written, or that a killed process left: the next process writes over it

The owner of a claim holds the kernel's lock of the claim's file, which exists as long as the claim. The kernel releases
the lock of a process that ends, however it ends, so no process waits for a dead owner.

A file gets its name when it is complete, and an item's list is written after all its files. Only a loss of power may
leave a file that is shorter than it should be, which hashes reveal.
"""

# Names are strings, as users' functions give them.
# ruff: noqa: PTH105, PTH108, PTH113, PTH116, PTH123

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from asyncloader.transports.file_lock import same_file, try_lock, unlock

_HASHES = ("sha256", "md5")


class CacheFiles:
    """Finds and writes the files of a cache.

    Args:
        hashes: hash of each file by its path, in hexadecimal digits; None: files are not compared.
        hash_type: ``"sha256"`` or ``"md5"``.
        check: returns whether an item's own file is valid; None: it always is.

    Attributes:
        valid_from: nanoseconds since 1970; files that were written before count as not cached. 0: all files are valid.

    Raises:
        ValueError: another type of hash.
    """

    def __init__(self, hashes: dict[str, str] | None, hash_type: str, check: Callable[[str], bool] | None) -> None:
        if hashes is not None and hash_type not in _HASHES:
            raise ValueError(f"Invalid hash_type requested, should be one of {_HASHES}")
        self.valid_from = 0
        self._hashes = hashes
        self._hash_type = hash_type
        self._check = check

    def find(self, path: str) -> list[str] | None:
        """Return the complete files of the item with this path; None: the item is not cached."""
        listed = self._read_list(path)
        if listed is not None:  # a file with the item's own path is then not the item's, or is out of date
            return listed or None
        return [path] if self._is_valid(path) and (self._check is None or self._check(path)) else None

    def _read_list(self, path: str) -> list[str] | None:
        """Return the files in the item's list; [] if any of them is missing; None: the item has no list."""
        try:
            with open(_list_of(path), encoding="utf-8", errors="surrogateescape") as lines:
                files = [line.removesuffix("\n") for line in lines]
        except FileNotFoundError:
            return None
        return files if self._is_recent(_list_of(path)) and all(map(self._is_valid, files)) else []

    def _is_valid(self, file: str) -> bool:
        if not os.path.isfile(file) or not self._is_recent(file):
            return False
        return self._hashes is None or self._hash(file) == self._hashes.get(file)

    def _is_recent(self, file: str) -> bool:
        return not self.valid_from or os.stat(file).st_mtime_ns >= self.valid_from

    def _hash(self, file: str) -> str:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, self._hash_type).hexdigest()

    def write(
        self, file: str, item: str, mode: str, write: Callable[[IO[Any]], object], errors: str | None = None
    ) -> None:
        """Write one of an item's files. The caller must have claimed the item.

        Args:
            file: the file's path.
            item: the item's own path.
            mode: ``"wb"`` or ``"wt"``.
            write: writes the content to the open file.
            errors: of `open`.

        Raises:
            RuntimeError: the file has another hash, or none is given for it. A file of this name stays as it was.
            ValueError: the path has more than one line.
        """
        if "\n" in file:
            raise ValueError(f"a cached file's path must be one line, not {file!r}")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        # A temporary file for each item: processes with claims of two items may write files of the same name.
        part = f"{file}.{hashlib.blake2b(os.fsencode(item), digest_size=4).hexdigest()}.part"
        try:
            with open(part, mode, encoding=None if "b" in mode else "utf-8", errors=errors) as opened:
                write(opened)
            self._compare(part, file)
            # Not the kernel's time stamp, which may be some milliseconds older than `valid_from`. Nor the clock alone,
            # which may have been put back, or differ from that of the machine that `valid_from` comes from.
            now = max(time.time_ns(), self.valid_from or 0)
            os.utime(part, ns=(now, now))
            os.replace(part, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _compare(self, part: str, file: str) -> None:
        if self._hashes is None:
            return
        if file not in self._hashes:
            raise RuntimeError(f"Unspecified hash for file {file}")
        found = self._hash(part)
        if found != self._hashes[file]:
            raise RuntimeError(
                f"The computed hash {found} of {file} does not match the expected hash {self._hashes[file]}. It was "
                "not kept: mend its source, or `hash_dict`"
            )

    def complete(self, item: str, files: list[str]) -> None:
        """Record that these are all files of the item; without files the item is not cached."""
        if files == [item]:
            with suppress(FileNotFoundError):
                os.unlink(_list_of(item))  # it would name the item's files of an earlier time
        elif files:
            lines = "".join(f"{file}\n" for file in files)
            writer = CacheFiles(None, "", None)
            writer.valid_from = self.valid_from
            # File names are decoded that way, so the list gives back the same bytes.
            writer.write(_list_of(item), item, "wt", lambda opened: opened.write(lines), "surrogateescape")


def _list_of(path: str) -> str:
    return f"{path}.torchdata_list"


_log = logging.getLogger("asyncloader")

_LOG_AFTER, _LOOK_S = 10.0, 0.02  # seconds of waiting after which a warning is logged; between two looks at the lock


@contextmanager
def claim(path: str, timeout: float) -> Generator[None]:
    """Have the right to write `path` within the block. Makes the file's directory if it is missing.

    Args:
        path: of the file.
        timeout: seconds to wait for the right; a longer wait than 10 seconds is logged.

    Raises:
        TimeoutError: another process, or another thread, had the right all that time.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    name = f"{path}.asyncloader_claim"
    descriptor = _lock(name, path, timeout)
    try:
        yield
    finally:
        try:
            # Deleted before it is unlocked: a process that waits for the lock then finds that the file has no name any
            # more, and makes a new file. Deleted afterwards, it could be the claim of a process that waited.
            # If some other code has deleted our file, the name may belong to another owner's file, which must stay.
            if same_file(descriptor, name):
                Path(name).unlink(missing_ok=True)
        finally:
            unlock(descriptor)
            os.close(descriptor)


def _lock(name: str, path: str, timeout: float) -> int:
    """Open and lock the file of a claim."""
    begun = time.monotonic()
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(descriptor) and not _wait_for(descriptor, path, begun, timeout):
                raise TimeoutError(
                    f"OnDiskCache Exception: {path} expected to be written by different process, but file is not ready "
                    f"in {timeout} seconds. Give `end_caching` a longer timeout, or end that process"
                )
            # Its last owner may have deleted it between our opening and locking it. A lock of a file without a name
            # claims nothing.
            if same_file(descriptor, name):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _wait_for(descriptor: int, path: str, begun: float, timeout: float) -> bool:
    """Wait for the lock. Returns whether it was ours in time."""
    logged = False
    while (waited := time.monotonic() - begun) < timeout:
        # The kernel waits for a lock without a time limit: so this process looks again and again.
        if try_lock(descriptor):
            return True
        if waited > _LOG_AFTER and not logged:
            logged = True
            _log.warning("waits for another process to write %s; gives up after %g seconds", path, timeout)
        time.sleep(_LOOK_S)
    return False
