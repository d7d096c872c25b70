"""Locks open files against other processes. The kernel releases a lock when its process ends, however it ends.

Data path: none; used by `cache_store`, `cache_usage` and DataLoader2's caches.
"""

from __future__ import annotations

import fcntl
import os


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this descriptor; False if another descriptor has the lock.

    The lock ends with the descriptor, also when its process dies. A forked child that inherited the descriptor holds
    the lock, too.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file like `try_lock`, but wait until that succeeds."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def unlock(descriptor: int) -> None:
    """Release a lock, also for forked children that inherited the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def same_file(descriptor: int, path: str) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
