"""Represents one worker process in the main process: starts, watches and stops it.

Data path: scheduler -> pool -> [process] -> worker.

The death of a process is seen as a file descriptor that becomes readable: its pidfd, which no other process can hold
open, or, for a child of the fork server, the sentinel.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import pickle
import select
import signal
import socket
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from asyncloader.base.process_hooks import in_forked_child
from asyncloader.base.socket_folder import shorten_multiprocessing
from asyncloader.errors import WorkerDied
from asyncloader.telemetry.counters import RECORD_BYTES, Recorder
from asyncloader.workers.bootstrap import Bootstrap, gc_paused
from asyncloader.workers.default_signals import signals_blocked
from asyncloader.workers.fetch.setup import Links, WorkerSetup
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.channel import Channel, Watched, channel_pair
from asyncloader.workers.memory_limit import MemoryKills
from asyncloader.workers.message_codec import PICKLE, MessageCodec
from asyncloader.workers.notebook_pickling import about_main, dump_message, file_of_main_hidden, leave_if_importing_main
from asyncloader.workers.setup_payload import InheritedFd, Payload, preload_in_fork_server
from asyncloader.workers.stacks import Report, Target, ask, crash_trace, stack_pipe


def start(process: Any, context: Any, worker_id: int) -> None:
    """Start a process that was made by this multiprocessing context.

    Raises:
        WorkerDied: the fork server has ended.
        SystemExit: this process still imports its main module; see `leave_if_importing_main`.
        OSError: the process could not be started.
        FileNotFoundError: this process's working directory, in which it would begin, was removed.
    """
    method = context.get_start_method()
    leave_if_importing_main(method)
    if method == "fork":
        # Signals are blocked for a fork alone: the child unblocks them. A fork server would keep them blocked for ever,
        # and get no SIGCHLD for its children; a spawned process would not be ended by SIGTERM.
        with gc_paused(), signals_blocked():
            process.start()
        return
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the working directory of this process was removed, and a worker by {method!r} begins there: call "
            "os.chdir() with a folder that exists, before the loader starts its workers"
        ) from None
    if method == "forkserver":
        preload_in_fork_server(context)
        shorten_multiprocessing()
    try:
        with file_of_main_hidden():
            try:
                process.start()
            # multiprocessing waits for the server as for a child of its own, and in a forked child it is none.
            except ChildProcessError:
                if method != "forkserver":
                    raise
                _forget_fork_server()
                process.start()
    except (ConnectionError, EOFError):
        if method != "forkserver":
            raise
        # From Python 3.14 on the server itself imports the main module, and ends if that starts workers or raises.
        raise WorkerDied(worker_id, -1, None, "The fork server has ended.", about_main()) from None


def _forget_fork_server() -> None:
    """Make the next start begin a fork server. For a forked child: the fork server that it knows is its parent's."""
    server: Any = forkserver._forkserver
    alive, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    server._forkserver_address = server._forkserver_pid = None
    # The server ends with the last copy of this descriptor: with this copy it would outlive the parent.
    if alive is not None:
        os.close(alive)


_TRACE_LINES = 40  # lines of a dead worker's stack trace in its error
_FORKSERVER_REPORTS = 5.0  # seconds to wait for the fork server to report the exit code of a child that has ended


class WorkerProcess(Watched):
    """One worker process and the channels to it.

    Args:
        context: a multiprocessing context.
        worker_id: 0 to ``num_workers - 1``.
        setup: the set-up itself for a forked worker, otherwise the pickled one.
        lifeline: read end of the pool's lifeline pipe.
        own_pidfd: this process's pidfd, which the worker watches; None where the system has no pidfds.

    Raises:
        OSError: the process could not be started.
        WorkerDied: the fork server has ended, and could not start it.
    """

    def __init__(
        self, context: Any, worker_id: int, setup: WorkerSetup | Payload | Any, lifeline: int, own_pidfd: int | None
    ) -> None:
        self.worker_id = worker_id
        self.ready = False
        """The worker has reported that it runs; before that it runs no user code."""
        self.started = False
        """The user's start-up code is over."""
        self.tasks = self.answers = self.outstanding = 0
        self.saved_rng_state: bytes | None = None
        """Set once the worker announced that it leaves because of its memory limit: its saved RNG state."""
        self.kill_reason = ""
        """Why the loader killed it; empty if it did not."""
        self.outside = False
        """It was killed by a SIGKILL or SIGTERM, neither from the loader nor from the out-of-memory killer."""
        self.lost = False
        self.released = False
        self.asked = False
        """It was asked to end."""
        self.codec: MessageCodec = PICKLE
        self._session = isinstance(setup, Payload) and setup.session
        self.process: Any = None  # set at once: a thread that forks runs the fork hook, which reads it
        self._pidfd: int | None = None
        with contextlib.ExitStack() as undo:  # if no descriptors are left
            records = segment.create(RECORD_BYTES)
            undo.callback(os.close, records)
            self.recorder = Recorder(segment.map_segment(records, RECORD_BYTES))
            """The worker's counters; readable at any time."""
            self.stacks, theirs_stacks = stack_pipe()
            undo.callback(self.stacks.close)
            undo.callback(os.close, theirs_stacks)
            ours, theirs = channel_pair()
            # All were made: from here on `_close` and the `finally` below close them.
            undo.pop_all()
        self.channel = Channel(ours)
        # Before the process is started: a fork in another thread from now on closes the descriptors in its child.
        in_forked_child(_forget_all)
        _processes.add(self)
        links = Links(
            InheritedFd(theirs.fileno()),
            InheritedFd(lifeline),
            InheritedFd(theirs_stacks),
            None if own_pidfd is None else InheritedFd(own_pidfd),
            InheritedFd(records),
        )
        try:
            self.process = context.Process(
                target=Bootstrap(perf_counter()),
                args=(worker_id, links, setup),
                name=f"asyncloader-worker-{worker_id}",
                # As torch's workers: at exit multiprocessing ends those that our hook has left.
                daemon=True,
            )
            start(self.process, context, worker_id)
        except BaseException:
            with contextlib.suppress(Exception):  # a signal that was not deferred came between the start and its return
                self.process.kill()
                self.process.join(_FORKSERVER_REPORTS)
            self._close()
            raise
        finally:
            # The worker's ends: while this process held them open, the end of the channel would never be seen.
            theirs.close()
            os.close(theirs_stacks)
            os.close(records)
        self.pid: int = self.process.pid
        self.place = f"pid {self.pid}"
        self.node = ""
        # The counter is compared with its value of now: it also counts earlier kills in the same group.
        self._memory_kills = MemoryKills(self.pid)
        # A fork server's child is not a child of this process: only the server learns its exit code, and reports it
        # through the sentinel. A pidfd would be readable before that report.
        self._direct = context.get_start_method() != "forkserver"
        self._imports_main = context.get_start_method() != "fork"
        if self._direct and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                # If no descriptor is left for it, the sentinel serves.
                self._pidfd = os.pidfd_open(self.pid)

    def dumps(self, value: Any) -> bytes:
        """Pickle a value that is sent to it."""
        return dump_message(value) if self._session else pickle.dumps(value, 5)

    @property
    def death_fd(self) -> int:
        """File descriptor that is readable once the process has ended."""
        return self.process.sentinel if self._pidfd is None else self._pidfd

    @property
    def alive(self) -> bool:
        """Whether the process still runs. Does not wait."""
        return bool(self.process.is_alive())

    @property
    def left(self) -> bool:
        """Whether it has certainly ended in order: it was asked to, and was neither killed nor crashed."""
        return self.released and self.asked and self.process.exitcode == 0

    def death(self) -> WorkerDied:
        """Return the error for a process that ended without being asked to. Call when `death_fd` is readable."""
        # `join` with a time-out waits for the sentinel pipe, which a child of the worker may hold open. With a pidfd it
        # is known that the process has ended, and it is reaped without waiting. Only a fork server's report may still
        # be on its way.
        if self._pidfd is None:
            self.process.join(_FORKSERVER_REPORTS)
        self.stacks.read()
        trace = crash_trace(self.stacks.text(), _TRACE_LINES)
        reason = self.kill_reason
        if self.saved_rng_state is not None:
            reason = "It left because it had grown beyond worker_memory_limit."
        elif not reason and self.process.exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            reason = self._memory_kills.describe()
            # Such a signal is not the doing of the worker's task, unless memory ran out.
            self.outside = not reason
        # A main module that raises while a worker imports it ends the worker with exit code 1, before it is ready.
        advice = about_main() if self._imports_main and not self.ready and self.process.exitcode == 1 else ""
        return WorkerDied(self.worker_id, self.pid, self.process.exitcode, reason, advice, trace)

    def distrust(self, error: ValueError) -> bool:
        """Return False: the process is ours, so a frame that cannot be read is an error of the loader."""
        del error
        return False

    def kill_for(self, reason: str) -> None:
        """Send SIGKILL; `reason` becomes part of the worker's error."""
        self.kill_reason = reason
        self.kill()

    def request_stop(self) -> None:
        """Ask the worker to end. Does not wait; an idle worker ends at once."""
        self.asked = True
        # Both: if STOP did not fit into a full socket, the worker sees the end of the socket behind its tasks.
        # `shutdown`, not `close`: a sibling of the worker may hold a copy of this end.
        with contextlib.suppress(OSError):
            self.channel.send(wire.pack(wire.STOP))
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_WR)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    def reap(self) -> None:
        """Reap it if it has ended, so that no zombie is left. Any thread, also concurrently."""
        if self._direct:  # otherwise the fork server reaps it and reports the exit code to one reader only
            _ = self.process.exitcode

    def release(self) -> None:
        """Reap the process, which must have ended, and close this side's descriptors. Idempotent."""
        if self.released:
            return
        self.process.join()
        # Frees the sentinel's descriptor now; `Process.close` would also make the object forget its pid and exit code.
        with contextlib.suppress(AttributeError):
            self.process._popen.close()
        self._close()
        self.released = True  # set last: if Ctrl-C interrupts this, it is done again

    def _close(self) -> None:
        # Forget each descriptor before closing it: another thread may fork in between, and the fork hook in its child
        # would close whatever file has got the number since.
        self.channel.close()
        self.stacks.close()
        # The counters stay readable: `stats` has those of workers that have ended, too.
        self.recorder.keep()
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            os.close(fd)
        # Last: a child that another thread forks before this line closes what it has inherited.
        _processes.discard(self)

    def forget_in_child(self) -> None:
        """In a forked child: close the copies of this side's descriptors, so that they do not stay open there."""
        self.channel.close()
        self.stacks.close()
        self.recorder.keep()
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.worker_id} pid={self.pid}>"


# Every process that is not released yet. Strong references, because the finalizer of a garbage pool needs its sockets
# and pidfds intact, and garbage is finalized in any order. Nothing here refers to a pool.
_processes: set[WorkerProcess] = set()


def _forget_all() -> None:
    """In a forked child, a worker or not: close the inherited descriptors of all worker processes."""
    for process in _processes:
        process.forget_in_child()
        # After a plain `os.fork`, multiprocessing's exit hook in the child would end the parent's workers.
        if process.process is not None:
            multiprocessing.process._children.discard(process.process)  # type: ignore[attr-defined]
    _processes.clear()


async def look(processes: Sequence[WorkerProcess], seconds: float) -> list[Report]:
    """Report the state of these processes, and the stacks of all their threads. See `stacks.ask`."""
    reports = await ask([Target(each.pid, each.death_fd, each.stacks) for each in processes], seconds)
    for process in processes:
        process.stacks.clear()  # or they would be reported again if it died
    return reports


def hang_up(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Ask workers to end and wait for that, `seconds` at most. For finalizers: takes no lock and needs no other thread,
    although another thread may be ending the same workers at the same time.
    """
    poll, watched = select.poll(), set[int]()
    try:
        for process in processes:
            process.asked = True
            with contextlib.suppress(OSError):  # another thread has closed it
                # No STOP frame: another thread may be sending, and the queue of the channel has no lock.
                process.channel.sock.shutdown(socket.SHUT_WR)
                # A copy: another thread may close the original at any moment, and its number be reused.
                fd = os.dup(process.death_fd)
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
        # Not released: `stop` closes the descriptors, perhaps in another thread at this moment.
        process.reap()


def wait_for_deaths(processes: list[WorkerProcess], seconds: float) -> list[WorkerProcess]:
    """Wait until all processes have ended, `seconds` at most. Returns those still alive. Blocks without the GIL."""
    deadline = monotonic() + seconds
    alive = list(processes)
    poll = select.poll()
    for process in alive:
        poll.register(process.death_fd, select.POLLIN)
    while alive:
        left = deadline - monotonic()
        # Polled once even if no time is left, so that a process that has ended by then is not returned as alive.
        ended = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
        for process in [p for p in alive if p.death_fd in ended]:
            poll.unregister(process.death_fd)
            alive.remove(process)
        if left <= 0:
            break
    return alive
