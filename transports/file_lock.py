"""Opens files that processes share, and locks them. The kernel releases a lock when its process ends, however it ends.

Data path: none; used by `cache_store`, `cache_usage` and DataLoader2's caches.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

# Links are not followed; opening a FIFO does not wait, and a terminal does not become our controlling terminal.
_SAFELY = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"))


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


def open_regular(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file. Others may have planted a link, FIFO, device or directory under its name: these are errors,
    without a wait.

    Raises:
        OSError: `os.open` fails; EINVAL: it is not a regular file.
    """
    descriptor = os.open(path, flags | _SAFELY, mode)
    # The open file is checked, not the name: the name may be replaced between a check and the open.
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
