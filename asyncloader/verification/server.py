"""A process that imports the user's module once and runs each job in a fork of itself, under a deadline.

Data path: jobs -> [server: fork -> runs, causes] -> results, all pickled: both ends are this package's.

A job's process leads a session of its own. When it ends, or is ended, all processes that it has started end with it; so
do all of the server's when the command ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import torch

from asyncloader.verification.causes import search
from asyncloader.verification.runs import LookJob, RunJob, look, run
from asyncloader.verification.target import CannotVerify, import_target
from asyncloader.verification.user_code import CodeLine, UserFailure, line_of_stacks

CarryOut = Callable[[Any, Callable[[], Any], Callable[[str], None]], Any]
"""Carries out a job with the user's function, and returns its result; it also gets a function that notes in words how
far the job is.
"""

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of Linux' prctl
_GRACE_S = 2.0  # for the stacks of a late process


def main(fd: int, target: str) -> None:
    """Verify loaders: serve jobs over a connection until it is closed."""
    torch.set_num_threads(1)  # forks have no thread but one
    serve(fd, target, _carry_out)


def _carry_out(job: Any, make: Callable[[], Any], note: Callable[[str], None]) -> Any:
    match job:
        case LookJob():
            return look(make)
        case RunJob():
            return run(make, job, note)
        case _:
            return search(make, job)


def serve(fd: int, target: str, carry_out: CarryOut) -> None:
    """Import the user's function, and carry out jobs, each in a fork of this process, until the connection is closed.

    Args:
        fd: of the connection.
        target: see `import_target`.
        carry_out: called in the forks.
    """
    connection, me = Connection(fd), os.getpid()
    os.set_inheritable(fd, False)
    warnings.simplefilter("ignore")
    _prctl(_SET_CHILD_SUBREAPER, 1)  # become the parent of orphans, so that `_descendants` finds them
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)  # until jobs are waited for: an import may never end
    answer: UserFailure | CannotVerify | None = None
    make: Callable[[], Any] | None = None
    try:
        make = import_target(target)
    except CannotVerify as error:
        answer = error
    except BaseException as error:  # sys.exit() of the module is an answer, too
        answer = UserFailure.of(error)
    if os.getpid() != me:  # the module has forked while it was imported, and this process came back, too
        os._exit(0)
    _prctl(_SET_PDEATHSIG, 0)
    with contextlib.suppress(EOFError, OSError):  # the other end was closed
        connection.send(answer)
        while make is not None:
            job, seconds = connection.recv()
            connection.send(_in_fork(job, seconds, make, carry_out, connection))
    _end_descendants()
    os._exit(0)  # threads of the module may not end


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # this system has none
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _in_fork(job: Any, seconds: float, make: Callable[[], Any], carry_out: CarryOut, connection: Connection) -> Any:
    """Carry out a job in a fork of this process. Returns its result, or why there is none.

    Raises:
        EOFError: the other end of the connection was closed, over which nothing is sent before there is a result.
    """
    reading, writing = Pipe(duplex=False)
    with tempfile.TemporaryFile() as stacks, reading:
        fork = _JobProcess(lambda: _child(job, make, carry_out, writing, stacks))
        writing.close()
        deadline, note, late = time.monotonic() + seconds, "", False
        try:
            while True:
                ready = wait([reading, fork.ended, connection], max(deadline - time.monotonic(), 0))
                if connection in ready:
                    raise EOFError
                if reading in ready:
                    with contextlib.suppress(EOFError):  # it has ended: the next round says so
                        name, value = reading.recv()
                        if name == "result":
                            return value
                        note = value
                        continue
                if not ready:
                    late = True
                    fork.signal(signal.SIGABRT)  # the stacks are written
                    wait([fork.ended], _GRACE_S)
                break
        finally:
            status = fork.end()
        stacks.seek(0)
        return _failure(status, late, note, line_of_stacks(stacks.read(200_000).decode(errors="replace")))


def _failure(status: int, late: bool, note: str, line: CodeLine | None) -> UserFailure:
    during = f" while {note}" if note else ""
    if late and line is None:  # the loader itself, the start of processes, a busy machine
        text = f"did not end in time{during}, and no line of the module was running in the main process"
        return UserFailure(text, advice="give more --seconds", late=True)
    if late:
        advice = "this line was running: a lock of another process, a read without a time limit, or an endless loop"
        return UserFailure(f"did not end in time{during}", line, advice, late=True)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
    advice = "code of a loader must raise, not end its process"
    return UserFailure(f"has no result: the process {how}{during}", line, advice)


class _JobProcess:
    """A forked process, which leads a session.

    Attributes:
        ended: can be read when the process has ended.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._pid = os.fork()
        if not self._pid:
            try:
                os.setsid()
                work()
            finally:
                os._exit(0)
        # No pidfd, which Linux alone has; and the child's end of a pipe may be held open by processes that it starts.
        self.ended, self._ending = Pipe(duplex=False)
        self._status = 0
        self._thread = threading.Thread(target=self._reap)
        self._thread.start()

    def _reap(self) -> None:
        with self._ending, contextlib.suppress(ChildProcessError):  # user code ignores SIGCHLD: there is no status
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)
        if self._thread.is_alive():  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, number)

    def end(self) -> int:
        """End the process and its group. Returns its exit code, or the signal that ended it as a negative number."""
        self.signal(signal.SIGKILL)
        self._thread.join()
        self.ended.close()
        return self._status


def _child(job: Any, make: Callable[[], Any], carry_out: CarryOut, writing: Connection, stacks: IO[bytes]) -> None:
    """Carry out a job in this process, and write the result."""
    me = os.getpid()
    faulthandler.enable(stacks, all_threads=True)
    result: Any
    try:
        result = carry_out(job, make, lambda text: writing.send(("note", text)))
    except CannotVerify as error:
        result = error
    except BaseException as error:  # sys.exit() of user code is an answer, too
        result = UserFailure.of(error)
    if os.getpid() == me:  # else user code has forked, and the fork came back, too
        writing.send(("result", result))
        with contextlib.suppress(Exception):
            sys.stdout.flush()


# ------------------------------------------------------------------------------------------ processes of user code


def _end_descendants() -> None:
    """Kill all processes that come from this one, also those that have left its session, and those that they have
    started since. Linux only; elsewhere nothing is found.
    """
    while left := _descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # not a child of this process yet, as orphans become
                os.waitpid(pid, 0)


def _descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children[int(parent)].append(int(entry.name))
    found, left = set[int](), [pid]
    while left:
        new = children[left.pop()]
        found.update(new)
        left += new
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
