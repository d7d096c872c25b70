"""A worker ends when its parent does, even while it is stuck in C code that never gives up the GIL.

Data path: pool start-up -> [lifeline] -> worker.

The main process holds the write end of one pipe and never writes. Each worker asks the kernel to send it SIGKILL when
something happens to the read end (``O_ASYNC`` with ``F_SETSIG``); the one thing that can happen is that the last write
end is closed, and the kernel does that for a process that ends, however it ends. No code of the worker has to run:
neither the GIL, nor a thread, nor a handler. It holds for a worker that is stopped, too.

Owner, signal and ``O_ASYNC`` belong to the open file description, which forked siblings share. So a worker opens the
pipe anew, through ``/proc``, and has a description of its own.

*Who holds a write end.* It is close-on-exec, so programs that are started do not; forked children close their copy at
once (`os.register_at_fork`). One that is forked by another thread in the very moment between the making of the pipe and
its registration, or by C code that runs no hooks, delays the signal until it ends itself. Therefore a second line stays
where it was: the worker's thread that waits for the parent's pidfd.

Linux only. Elsewhere `hold` says so, and the second line is the only one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal

__all__ = ["Lifeline", "hold"]


class Lifeline:
    """The main process's side: a pipe whose write end lives as long as this process, or until `close`.

    Closing it kills every worker that holds on, so it is closed after they have ended.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self) -> None:
        _install_fork_hook()
        self._owner = os.getpid()
        self._fd, self._write_fd = os.pipe()  # both close-on-exec
        _lifelines.add(self)

    @property
    def fd(self) -> int:
        """The read end, to be handed to workers (to `hold`); -1 once closed. It stays this object's."""
        return self._fd

    def close(self) -> None:
        """Let go of the workers: those that still hold on are killed. Idempotent.

        In a forked child it is `forget_in_child`: the read end may be in use there, or its number be another file's.
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
    """In a worker: from now on this process ends when all write ends of the pipe are closed.

    If they are closed already (the parent ended while this process started), it ends here, with exit code 1.

    Args:
        fd: the read end. Closed in any case; what holds on is a descriptor of its own, which is never closed.

    Returns:
        Whether it holds. False where the system cannot (macOS; no ``/proc``; a sandbox that forbids it).
    """
    own = -1
    try:
        try:
            own = _reopened(fd)
        finally:
            os.close(fd)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        # Last: a signal that is armed before it has its owner and number would be SIGIO, to nobody.
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):
        if own >= 0:
            os.close(own)
        return False
    # Armed first, looked at then: the end of the last writer is seen by the one or by the other.
    poll = select.poll()
    poll.register(own, 0)  # POLLHUP needs no asking
    if poll.poll(0):
        os._exit(1)
    return True


def _reopened(fd: int) -> int:
    """The same pipe's read end under a file description of this process's own."""
    # Where F_SETSIG is missing the caller must not get as far as a descriptor that it cannot arm.
    _ = fcntl.F_SETSIG
    # O_NONBLOCK: to open a pipe that has no writer any more would wait for one.
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


# Every lifeline that has a write end in this process. Strong: one that is garbage must not outlive a fork unseen.
_lifelines: set[Lifeline] = set()


@functools.cache
def _install_fork_hook() -> None:
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for lifeline in list(_lifelines):
        lifeline.forget_in_child()
