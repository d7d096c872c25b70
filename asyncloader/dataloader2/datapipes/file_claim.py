"""The right to write a file, which one process has at a time, among all that share the file system.

Data path: none; beside `cache_files`.

Who has it holds the kernel's lock of ``<path>.asyncloader_claim``, which is there only meanwhile. A process that ends
lets go of it, so that nobody waits for the dead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from asyncloader.transports.file_lock import same_file, try_lock, unlock, wait_for_lock

_log = logging.getLogger("asyncloader")

_TELL_AFTER = 10.0


@contextmanager
def claimed(path: str, timeout: float) -> Generator[None]:
    """Have the right to write `path` within the block. Its directory is made if need be.

    Args:
        path: of the file.
        timeout: seconds to wait for whoever has it; it is logged after 10.

    Raises:
        TimeoutError: another process, or another thread, still had it then.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    name = f"{path}.asyncloader_claim"
    descriptor = _locked(name, path, timeout)
    try:
        yield
    finally:
        try:
            # Deleted while it is locked: who waits for it then sees that it has no name any more, and opens a new one.
            if same_file(descriptor, name):  # else somebody has deleted it, and it may be another's
                Path(name).unlink(missing_ok=True)
        finally:
            unlock(descriptor)
            os.close(descriptor)


def _locked(name: str, path: str, timeout: float) -> int:
    begun = time.monotonic()
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(descriptor) and not _waited(descriptor, path, begun, timeout):
                raise TimeoutError(
                    f"OnDiskCache Exception: {path} expected to be written by different process, but file is not ready "
                    f"in {timeout} seconds. Give `end_caching` a longer timeout, or end that process"
                )
            if same_file(descriptor, name):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _waited(descriptor: int, path: str, begun: float, timeout: float) -> bool:
    """Whether the lock was ours in time. The kernel waits for it without a time limit, so a thread calls it."""
    done = threading.Event()
    # Another descriptor of the same open file, for the thread alone: it stays valid when ours is closed after a
    # time-out, and when the thread closes it in the end, the lock that it got by then is gone.
    own = os.dup(descriptor)

    def wait() -> None:
        try:
            wait_for_lock(own)
        finally:
            os.close(own)
            done.set()

    threading.Thread(target=wait, name="asyncloader-file-lock", daemon=True).start()
    left = begun + timeout - time.monotonic()
    if done.wait(min(left, _TELL_AFTER)):
        return True
    if left <= _TELL_AFTER:
        return False
    _log.warning("waits for another process to write %s; gives up after %g seconds", path, timeout)
    return done.wait(min(begun + timeout - time.monotonic(), threading.TIMEOUT_MAX))
