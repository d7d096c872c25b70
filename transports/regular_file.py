"""Opens a cache's own files in a folder in which others may have planted links, FIFOs or devices under their names.

Data path: none; used by `cache_store` and `cache_usage`. The files of users' data are opened by `rooted_files`.
"""

from __future__ import annotations

import errno
import os
import stat

# Links are not followed; opening a FIFO does not wait, and a terminal does not become our controlling terminal.
_SAFELY = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"))


def open_regular(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file. Raises, without a wait, if a link, FIFO, device or directory has the name.

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
