"""Ends worker processes: all of them together, within one deadline; and all pools when the process exits.

Data path: none; this is how a pool stops, whatever state it and its workers are in.

They are asked to end; those that run after 5 seconds get SIGTERM; those that run 1.5 seconds later get SIGKILL, and the
rest of 8 seconds. A worker that still boots reads no requests, and gets SIGTERM at once; one that is stopped (SIGSTOP)
reacts only to SIGKILL. One that SIGKILL does not end (it sleeps uninterruptibly in a file system that does not answer)
is given up: its resources here are closed, a warning names it, and it is not waited for.

It blocks, in any thread, starts no threads (at exit none can be started), and changes no signal handlers. If an
exception is raised while it waits, Ctrl-C above all, everything is killed and reaped at once, and then the exception is
raised, once. Only an exception that strikes twice within the few instructions between two steps can escape earlier.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import warnings
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import at_exit
from asyncloader.workers.ipc import wire
from asyncloader.workers.process import WorkerProcess, wait_for_deaths
from asyncloader.workers.stacks import process_state

BUDGET = 8.0
"""Seconds for the whole shutdown."""
_ASK_SECONDS = 5.0  # for a worker to finish its batch, as torch waits
_TERMINATE_SECONDS = 1.5  # for a worker to end on SIGTERM
_KILL_SECONDS = 0.5  # at least this long after SIGKILL, even if the main process itself was held up
_FAILURES = 3  # errors of waiting itself after which all processes are killed and given up

Wait = Callable[[list[WorkerProcess], float], list[WorkerProcess]]
"""Waits until all have ended or the seconds are over; returns those still alive."""


def run(
    processes: Sequence[WorkerProcess], *, clock: Callable[[], float] = monotonic, wait: Wait = wait_for_deaths
) -> list[WorkerProcess]:
    """End all processes and release their resources. Blocks, 8 seconds at most; any thread.

    Two threads must not end the same processes at the same time; one after the other is fine.

    Returns:
        The processes that were given up because SIGKILL did not end them. A `RuntimeWarning` names them.

    Raises:
        BaseException: raised while it waited (KeyboardInterrupt). All processes have ended nevertheless.
    """
    ending = _Farewell(processes, clock, wait)
    try:
        ending.finish()
    except BaseException as error:  # struck between two steps; `finish` catches all others
        ending.error = ending.error or error
        ending.finish()
    message = _describe_given_up(ending.given_up)
    if ending.error is not None:
        if ending.given_up:
            ending.error.add_note(message)
        raise ending.error
    if ending.given_up:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return ending.given_up


class _Farewell:
    def __init__(self, processes: Sequence[WorkerProcess], clock: Callable[[], float], wait: Wait) -> None:
        self.error: BaseException | None = None
        """What was raised first. From then on nothing is asked: all are killed."""
        self.given_up: list[WorkerProcess] = []
        self._left = [process for process in processes if not process.released]
        self._clock, self._wait = clock, wait
        self._begun = clock()
        self._until: float | None = None  # when those that were killed are given up: a second kill gives no more time
        self._failures = 0

    def finish(self) -> None:
        """End all processes, whatever is raised."""
        # A process whose creation was interrupted has no descriptor to wait for: kill it, if possible, and drop it.
        for process in self._left:
            if not process.released and not _is_complete(process):
                _try(process.kill)
                _abandon(process)
        # If Ctrl-C has struck before, some of them are released already.
        self._left = [each for each in self._left if not each.released]
        for step in (self._ask, self._terminate):
            if self.error is None:
                self._carry_out(step)
        while self._left and self._failures < _FAILURES:
            self._carry_out(self._kill)
            if self._until is not None and self._clock() >= self._until:
                self.given_up = [*self._left]
                break
        for process in self._left:
            _abandon(process)

    def _carry_out(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            self.error = self.error or error
            # Ctrl-C does not count, however often it comes: it says nothing about the next wait.
            self._failures += isinstance(error, Exception)

    def _ask(self) -> None:
        # First those that have ended already, which must not be signalled.
        self._wait_until(self._begun)
        for process in self._left:
            if _is_stopped(process):
                _try(process.kill)
                continue
            # Also before SIGTERM: the program's main module, which a worker that boots imports, may have set a handler
            # for SIGTERM.
            _try(process.request_stop)
            if _still_booting(process):
                _try(process.terminate)
        self._wait_until(self._begun + _ASK_SECONDS)

    def _terminate(self) -> None:
        for process in self._left:
            _try(process.kill if _is_stopped(process) else process.terminate)
        self._wait_until(self._clock() + _TERMINATE_SECONDS)

    def _kill(self) -> None:
        for process in self._left:
            _try(process.kill)
        if self._until is None:
            self._until = max(self._begun + BUDGET, self._clock() + _KILL_SECONDS)
        self._wait_until(self._until)

    def _wait_until(self, time: float) -> None:
        """Wait for the processes' ends, and release those that have ended."""
        alive = self._wait([*self._left], max(0.0, time - self._clock())) if self._left else []
        for process in self._left:
            if process not in alive:
                # It counts as released even if that raises: it has ended, and `finish` must end, too.
                _try(process.release)
                process.released = True
        self._left = alive


def _abandon(process: WorkerProcess) -> None:
    """Release a process that has perhaps not ended, without waiting for it."""
    # First: if Ctrl-C strikes below, the process is not ended a second time.
    process.released = True
    # Otherwise multiprocessing's exit hook would wait for it forever.
    with contextlib.suppress(AttributeError):
        multiprocessing.process._children.discard(process.process)  # type: ignore[attr-defined]
    _try(process._close)


def _is_complete(process: WorkerProcess) -> bool:
    try:
        return process.death_fd >= 0 and process.pid > 0
    except Exception:
        return False


def _is_stopped(process: WorkerProcess) -> bool:
    return process_state(process.pid).startswith("stopped")


def _still_booting(process: WorkerProcess) -> bool:
    """Whether the process still starts up (with spawn for a second or more): it reads no requests yet."""
    try:
        # The frames may be read here: the pool has been detached, and no answer is wanted any more.
        return not process.ready and wire.READY not in [kind for kind, _ in process.channel.receive()]
    except Exception:
        return True


def _try(action: Callable[[], object]) -> None:
    # If a signal cannot be sent, the next step follows nevertheless, and the process is given up at last.
    with contextlib.suppress(Exception):
        action()


def _describe_given_up(processes: Sequence[WorkerProcess]) -> str:
    named = ", ".join(f"worker {p.worker_id} (pid {p.pid}, {process_state(p.pid)})" for p in processes)
    return (
        f"left behind: {named}. SIGKILL did not end it within {BUDGET:g} s, as when a process waits for a file system "
        "that does not answer; it ends when that does. Look at the storage that the dataset reads from."
    )


# ------------------------------------------------------------------------------------------------ at exit

_pools: LiveObjects[Any] = LiveObjects()  # of `WorkerPool`s


def stop_at_exit(pool: Any) -> None:
    """Stop this pool at exit, if it still exists."""
    # Before multiprocessing's own hook, which would end the workers, its daemonic children, by SIGTERM.
    at_exit(stop_all_pools)
    _pools.add(pool)


def stop_all_pools() -> None:
    """Stop all pools of this process, and wait for that: a hook for `at_exit`."""
    pools = list(_pools)
    # All are asked before the first is waited for, so that their workers end at the same time.
    for pool in pools:
        # A pool that cannot be asked is ended below, like the others.
        with contextlib.suppress(Exception):
            pool.detach()
            pool.request_stop()
    for pool in pools:
        pool.stop()  # also waits for a `stop` in progress
