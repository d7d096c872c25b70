"""Claims the right to write a file, which one process has at a time, among all that share the file system.

Data path: none; beside `cache_files`.

The owner of a claim holds the kernel's lock of a file ``<path>.asyncloader_claim``, which exists as long as the claim.
The kernel releases the lock of a process that ends, however it ends, so no process waits for a dead owner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

from asyncloader.transports.file_lock import same_file, try_lock, unlock, wait_for_lock

_log = logging.getLogger("asyncloader")

_LOG_AFTER = 10.0
"""Seconds of waiting after which a warning is logged."""


@contextlib.contextmanager
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
    done = threading.Event()
    # The kernel waits for a lock without a time limit, so a thread does that, with another descriptor of the same open
    # file: it stays valid when ours is closed after the timeout. If the thread gets the lock after that, it releases it
    # by closing the last descriptor.
    own = os.dup(descriptor)

    def wait() -> None:
        try:
            wait_for_lock(own)
        finally:
            os.close(own)
            done.set()

    threading.Thread(target=wait, name="asyncloader-file-lock", daemon=True).start()
    left = begun + timeout - time.monotonic()
    if done.wait(min(left, _LOG_AFTER)):
        return True
    if left <= _LOG_AFTER:
        return False
    _log.warning("waits for another process to write %s; gives up after %g seconds", path, timeout)
    return done.wait(min(begun + timeout - time.monotonic(), threading.TIMEOUT_MAX))
