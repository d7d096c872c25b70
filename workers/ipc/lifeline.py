"""Ends a worker when its parent dies, even while the worker is stuck in C code that holds the GIL.

Data path: pool start-up -> [lifeline] -> worker.

The main process holds the write end of a pipe and never writes. Each worker has the kernel send it SIGKILL when the
state of the read end changes (``O_ASYNC`` with ``F_SETSIG``). The only possible change is that the last write end is
closed, and the kernel does that when the process that holds it ends, however it ends. No code of the worker has to run:
neither the GIL nor a thread nor a handler is needed, and it works for a stopped worker, too.

*Who holds a write end.* It is close-on-exec, so programs that are started do not hold it; forked children close their
copy at once (`process_hooks.in_forked_child`). A child forked by another thread between the creation of the pipe and
its registration, or by C code that runs no hooks, delays the signal until it ends itself. Therefore the worker also has
a thread that waits for the parent's pidfd.

Linux only. Elsewhere `hold` returns False, and only that thread ends the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

from asyncloader.base.process_hooks import in_forked_child

if sys.platform != "win32":
    import fcntl


class Lifeline:
    """The main process's side: a pipe whose write end is open as long as this process lives, or until `close`.

    Closing it kills every worker that has called `hold`, so it is closed after they have ended.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self) -> None:
        in_forked_child(_forget_all)
        self._owner = os.getpid()
        self._fd, self._write_fd = os.pipe()  # both close-on-exec
        _lifelines.add(self)

    @property
    def fd(self) -> int:
        """The read end, to be passed to workers (to `hold`); -1 once closed. This object owns it."""
        return self._fd

    def close(self) -> None:
        """Close both ends: workers that still run are killed. Idempotent.

        In a forked child only the write end is closed: the read end may be in use there, or its number be reused.
        """
        self.forget_in_child()
        fd, self._fd = self._fd, -1
        if fd >= 0 and os.getpid() == self._owner:
            os.close(fd)

    def forget_in_child(self) -> None:
        """Close the write end, so that this process does not keep its parent's workers alive. Idempotent.

        Called in every child that Python forks. The read end stays open there: a forked worker needs it for `hold`,
        and it keeps nothing alive.
        """
        _lifelines.discard(self)
        fd, self._write_fd = self._write_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the child may have closed all descriptors already
                os.close(fd)

    def __repr__(self) -> str:
        state = "closed" if self._write_fd < 0 else f"fd={self._fd}"
        return f"<Lifeline {state}>"


def hold(fd: int) -> bool:
    """In a worker: have this process killed once all write ends of the pipe are closed.

    If they are closed already (the parent ended while this process started), it exits here, with exit code 1.

    Args:
        fd: the read end. Closed in any case; a new descriptor of the pipe is opened, which is never closed.

    Returns:
        Whether that is in effect. False where the system cannot do it (macOS; no ``/proc``; a sandbox).
    """
    own = -1
    try:
        try:
            # Owner, signal and `O_ASYNC` belong to the open file description, which forked siblings share. So each
            # worker opens the pipe again, through ``/proc``.
            own = _reopened(fd)
        finally:
            os.close(fd)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        # Last: if armed before owner and signal are set, it would send SIGIO to no process.
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):
        if own >= 0:
            os.close(own)
        return False
    # Arm first, then poll: so the end of the last writer is noticed by either.
    poll = select.poll()
    poll.register(own, 0)  # POLLHUP is always reported
    if poll.poll(0):
        os._exit(1)
    return True


def _reopened(fd: int) -> int:
    """Open the pipe's read end again, with a file description of this process's own."""
    # Fail here, before a descriptor is opened, where F_SETSIG is missing.
    _ = fcntl.F_SETSIG
    # O_NONBLOCK: opening a pipe without writers would block.
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


# Every lifeline with an open write end in this process. Strong references: the fork hook must also close the write end
# of a lifeline that is garbage.
_lifelines: set[Lifeline] = set()


def _forget_all() -> None:
    for lifeline in list(_lifelines):
        lifeline.forget_in_child()
