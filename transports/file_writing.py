"""Writes files below a directory, whole or not at all.

Data path: local -> [file_writing] -> file system.

The bytes go to a temporary file in the same directory, to the disk, and then by a rename to the file's own name. The
temporary file's name is always the same, so that killed writers leave at most one for each file; a lock keeps two
writers from using it at the same time.
"""

# Names are plain strings, as in `rooted_files`.
# ruff: noqa: PTH103, PTH105, PTH108, PTH118

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from threading import Event

from typing_extensions import Buffer

from asyncloader.transports.base import ObjectInfo
from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import AccessDenied, InvalidPath, TransportError, WriteFailed
from asyncloader.transports.file_lock import same_file, try_lock
from asyncloader.transports.rooted_files import RootedFiles

BUFFER = 1 << 20
"""Smaller pieces are joined up to this size for a system call."""

_FLAGS = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def write_file(files: RootedFiles, path: str, pieces: Sequence[Buffer], stopped: Event) -> ObjectInfo:
    """Write a file. Blocks: call it in a thread.

    Args:
        files: the root.
        path: below the root.
        pieces: the file's bytes.
        stopped: set to give up between two pieces.

    Raises:
        WriteFailed: the disk is full or fails; another writer writes the same file; `stopped` was set.
        AccessDenied, InvalidPath: the system refuses the path; or a link leads it out of the root.
    """
    check_path(path)
    name = os.path.join(files.directory, path)
    folder, base = os.path.split(name)
    partial = os.path.join(folder, f".{base}.partial")
    with write_errors(path, name):
        os.makedirs(folder, exist_ok=True)
        files.refuse_outside(folder, path)
        descriptor = _open_locked(partial, path)
        try:
            try:
                size = _write(descriptor, pieces, path, stopped)
                # Before the rename: after a crash of the machine the name must not be of an empty file.
                os.fsync(descriptor)
                # While the lock is held: another writer that gets it sees that the name is no longer of this file.
                os.replace(partial, name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
        finally:
            os.close(descriptor)
        _sync_folder(folder)
    return ObjectInfo(size, None)  # see `LocalTransport.info`: a file this new has no version


def delete_file(files: RootedFiles, path: str) -> None:
    """Delete a file, and what a killed writer left of it. Blocks: call it in a thread. Errors as `write_file`."""
    check_path(path)
    name = os.path.join(files.directory, path)
    folder, base = os.path.split(name)
    with write_errors(path, name):
        files.refuse_outside(folder, path)
        for each in (name, os.path.join(folder, f".{base}.partial")):
            with suppress(FileNotFoundError):
                os.unlink(each)


def _open_locked(partial: str, path: str) -> int:
    while True:
        descriptor = os.open(partial, _FLAGS, 0o666)
        try:
            if not try_lock(descriptor):
                raise WriteFailed(f"{path!r} is being written by another process or task; wait for it", path=path)
            # The writer that had the lock may have renamed the file between the open and the lock.
            if same_file(descriptor, partial):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _write(descriptor: int, pieces: Sequence[Buffer], path: str, stopped: Event) -> int:
    size = 0
    with open(descriptor, "wb", BUFFER, closefd=False) as file:
        for piece in pieces:
            if stopped.is_set():
                raise WriteFailed(f"writing {path!r} was given up", path=path)
            size += file.write(piece)
    return size


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # file systems without it
            raise
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: str, name: str) -> Generator[None, None, None]:
    """Translate the system's errors about writing `path`, the file `name`, into `TransportError`s."""
    try:
        yield
    except TransportError:
        raise
    except PermissionError as error:
        raise AccessDenied(f"no permission to write {name!r}", path=path) from error
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
            raise InvalidPath(f"{name!r}: {error.strerror}", path=path) from error
        advice = "; free some space, and run it again" if error.errno in {errno.ENOSPC, errno.EDQUOT} else ""
        failed = WriteFailed(f"writing {name!r} failed: {error.strerror}{advice}", path=path)
        failed.errno = error.errno
        raise failed from error
