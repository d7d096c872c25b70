"""One worker process as the main process sees it: started, watched, stopped.

Data path: scheduler -> pool -> [process] -> worker.

*Death* is a file descriptor that becomes readable: the process's pidfd, which no other process can hold back. For a
child of the fork server, whose exit code only the server learns, it is the sentinel, through which the server tells it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import os
import select
import signal
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Any

from asyncloader.errors import WorkerDied
from asyncloader.workers.bootstrap import Bootstrap, gc_paused
from asyncloader.workers.fetch.setup import Links, WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel, channel_pair
from asyncloader.workers.memory_use import MemoryKills
from asyncloader.workers.setup_payload import InheritedFd, Payload
from asyncloader.workers.stacks import crash_trace, stack_pipe
from asyncloader.workers.stderr_capture import make_capture_file, read_tail

__all__ = ["WorkerProcess", "wait_for_deaths"]

_TRACE_LINES = 40  # of a dying worker's stacks, for its error
_FORKSERVER_REPORTS = 5.0  # seconds to wait for the fork server to report the exit code of a child that is gone


class WorkerProcess:
    """A worker process and the channels to it.

    Args:
        context: a multiprocessing context.
        worker_id: 0 to ``num_workers - 1``.
        setup: the set-up itself for a forked worker, otherwise the pickled one.
        lifeline: read end of the pool's lifeline.
        own_pidfd: this process's pidfd, which the worker watches; None where there is none.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(
        self, context: Any, worker_id: int, setup: WorkerSetup | Payload, lifeline: int, own_pidfd: int | None
    ) -> None:
        self.worker_id = worker_id
        self.ready = False
        """The worker said that it runs; before that it has not touched the user's code."""
        self.started = False
        """The user's start-up code has run."""
        self.retired: bytes | None = None
        """What the worker hands over, once it has said that it leaves because it has grown."""
        self.kill_reason = ""
        """Why we killed it; empty if we did not."""
        self.outside = False
        """It was killed as no task of ours kills: by SIGKILL or SIGTERM, not by us, nor for want of memory."""
        self.suspect: int | None = None
        """Where a suspected task's standard error is kept."""
        self.released = False
        self.asked = False
        """It was asked to leave."""
        self.process: Any = None  # a fork in another thread, before there is one, looks for it
        self._pidfd: int | None = None
        self.stacks, theirs_stacks = stack_pipe()
        try:
            ours, theirs = channel_pair()
        except BaseException:  # no descriptors left
            self.stacks.close()
            os.close(theirs_stacks)
            raise
        self.channel = Channel(ours)
        _install_fork_hook()
        _processes.add(self)
        links = Links(
            InheritedFd(theirs.fileno()),
            InheritedFd(lifeline),
            InheritedFd(theirs_stacks),
            None if own_pidfd is None else InheritedFd(own_pidfd),
        )
        try:
            self.process = context.Process(
                target=Bootstrap(), args=(worker_id, links, setup), name=f"asyncloader-worker-{worker_id}", daemon=True
            )
            with gc_paused() if context.get_start_method() == "fork" else contextlib.nullcontext():
                self.process.start()
        except BaseException:
            with contextlib.suppress(Exception):  # interrupted between the start and its return
                self.process.kill()
                self.process.join(_FORKSERVER_REPORTS)
            self._close()
            raise
        finally:
            theirs.close()
            os.close(theirs_stacks)
        self.pid: int = self.process.pid
        self._memory_kills = MemoryKills.of(self.pid)
        self._direct = context.get_start_method() != "forkserver"
        if self._direct and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self.pid)

    @property
    def death_fd(self) -> int:
        """Readable once the process has ended."""
        return self.process.sentinel if self._pidfd is None else self._pidfd

    @property
    def alive(self) -> bool:
        """Whether the process still runs (asks the kernel, does not wait)."""
        return bool(self.process.is_alive())

    @property
    def left(self) -> bool:
        """Whether it has ended, for certain, and in order: it was asked to, and neither killed nor crashed."""
        return self.released and self.asked and self.process.exitcode == 0

    def death(self) -> WorkerDied:
        """The error for a process that ended unasked; call when `death_fd` is readable."""
        # `join` with a time-out waits for the sentinel pipe, which a child of the worker's own may hold open. The pidfd
        # has spoken, so the process can be reaped without waiting; only a fork server's report may still be on its way.
        if self._pidfd is None:
            self.process.join(_FORKSERVER_REPORTS)
        self.stacks.read()
        trace = crash_trace(self.stacks.text(), _TRACE_LINES)
        suspect, self.suspect = self.suspect, None
        if suspect is not None:
            trace = "\n".join(filter(None, (read_tail(suspect), trace)))
        reason = self.kill_reason
        if self.retired is not None:
            reason = "It left because it had grown beyond worker_memory_limit."
        elif not reason and self.process.exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            reason = self._memory_kills.describe()
            self.outside = not reason
        return WorkerDied(self.worker_id, self.pid, self.process.exitcode, reason, trace=trace)

    def suspected(self) -> int:
        """The next task killed a worker: its standard error is kept. Returns a descriptor for the worker."""
        self.cleared()
        self.suspect = make_capture_file()
        return self.suspect

    def cleared(self) -> None:
        """The suspected task was answered."""
        fd, self.suspect = self.suspect, None
        if fd is not None:
            os.close(fd)

    def kill_for(self, reason: str) -> None:
        """SIGKILL, for this reason."""
        self.kill_reason = reason
        self.kill()

    def request_stop(self) -> None:
        """Ask the worker to leave. Does not wait; an idle worker leaves at once."""
        self.asked = True
        with contextlib.suppress(OSError):
            self.channel.send(wire.pack(wire.STOP))
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_WR)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def reap(self) -> None:
        """Leave no zombie of it, if it has ended. Any thread, also beside another that does so."""
        if self._direct:  # else the fork server reaps it, and tells one thread how it ended
            _ = self.process.exitcode

    def release(self) -> None:
        """Reap the process, which must have ended, and close what this side holds. Idempotent."""
        if self.released:
            return
        self.process.join()
        # Frees the sentinel's descriptor now; `Process.close` would also make the object forget its pid and exit code.
        with contextlib.suppress(AttributeError):
            self.process._popen.close()
        self._close()
        self.released = True  # last: one that Ctrl-C interrupts is released again

    def _close(self) -> None:
        # Each number is forgotten first and closed then: another thread may fork in between, and the child's hook would
        # close whatever has got the number since.
        self.channel.close()
        self.stacks.close()
        self.cleared()
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            os.close(fd)
        _processes.discard(self)

    def forget_in_child(self) -> None:
        """In a process forked from ours: close our ends, so that they do not outlive us there."""
        self.channel.close()
        self.stacks.close()
        with contextlib.suppress(OSError):
            self.cleared()
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.worker_id} pid={self.pid}>"


# Every process that is not released yet. Strong: a pool that is garbage must find its sockets and pidfds whole,
# and garbage is finalized in any order. Nothing here refers to a pool.
_processes: set[WorkerProcess] = set()


@functools.cache
def _install_fork_hook() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    """A forked child, a worker or not, has copies of all that its parent had open: close our kind at once."""
    for process in _processes:
        process.forget_in_child()
        # After a plain `os.fork`, multiprocessing's exit hook in the child would end the parent's workers.
        if process.process is not None:
            multiprocessing.process._children.discard(process.process)  # type: ignore[attr-defined]
    _processes.clear()


def hang_up(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Tell workers to leave, and wait until they have, so many seconds at most. For finalizers: takes no lock, and
    needs no other thread, although one may be ending the same workers meanwhile.
    """
    poll, watched = select.poll(), set[int]()
    try:
        for process in processes:
            process.asked = True
            with contextlib.suppress(OSError):  # another thread has closed it
                process.channel.sock.shutdown(socket.SHUT_WR)
                fd = os.dup(process.death_fd)  # its own number may be closed, and used again, at any moment
                watched.add(fd)
                poll.register(fd, select.POLLIN)
        deadline = monotonic() + seconds
        waiting = set(watched)
        while waiting and (left := deadline - monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                waiting.discard(fd)
    finally:
        for fd in watched:
            os.close(fd)
    for process in processes:
        process.reap()


def wait_for_deaths(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
    """Wait until all have ended or the time is over; return those still alive. Blocks; holds no GIL meanwhile."""
    deadline = monotonic() + seconds
    alive = list(processes)
    poll = select.poll()
    for process in alive:
        poll.register(process.death_fd, select.POLLIN)
    while alive:
        left = deadline - monotonic()
        ended = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
        for process in [p for p in alive if p.death_fd in ended]:
            poll.unregister(process.death_fd)
            alive.remove(process)
        if left <= 0:
            break
    return alive
