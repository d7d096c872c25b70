"""Runs jobs with the user's code: in a process that imports the user's module once, and forks for each job.

Data path: verify -> [server: Interpreter -> process -> fork -> runs, causes] -> results.

Jobs and results are pickled: both ends are this package's. A job's process leads a session of its own, which ends with
the job; the server ends with the command. A process that user code moves to another session is not ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, Self

import torch

import asyncloader
from asyncloader.verification.runs import CannotVerify, import_target
from asyncloader.verification.user_code import CodeLine, UserFailure, line_of_stacks

_MARGIN_S = 15.0  # for the server to end a late job
_ENDING_S = 30.0  # for the server to end its job when the command ends
_GRACE_S = 2.0  # for the stacks of a late process
_POLL_S = 0.1  # between two looks whether a job's process has ended


class ServerEnded(RuntimeError):
    """The server has ended, or does not answer. The text has the last line that it has printed."""


class Interpreter:
    """A fresh Python with the user's module imported.

    Args:
        target: see `import_target`.
        hash_seed: of the order of its sets of strings.
    """

    def __init__(self, target: str, hash_seed: int) -> None:
        self._imported: list[Any] = []  # its result, once it is known
        # Sockets of start methods, files of the user's code, and its output are removed with the folder.
        self._folder = tempfile.TemporaryDirectory(prefix="alv", ignore_cleanup_errors=True)
        self._printed = Path(self._folder.name, "printed")
        path = [os.environ.get("PYTHONPATH"), str(Path(asyncloader.__file__).parent.parent)]
        environ = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
        # One thread, for reproducible computations.
        environ |= {"TMPDIR": self._folder.name, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
        self._connection, theirs = Pipe()
        with theirs, self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.verification.server", str(theirs.fileno()), target],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=os.environ | environ,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server, and its job."""
        self._connection.close()
        if self._imported:  # else it does not look at the connection yet
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def ready(self, seconds: float) -> UserFailure | None:
        """Wait for the import of the module, and return why it failed; None: it did not. Raises as `ask`."""
        if not self._imported:
            self._imported.append(self._answer(seconds))
        found: UserFailure | None = self._imported[0]
        return found

    def ask(self, job: Any, seconds: float) -> Any:
        """Send a job, which is ended after some seconds, and return its result, or a `UserFailure`.

        Args:
            job: is called with the user's function, and with a function that notes how far it is.
            seconds: after which it is ended.

        Raises:
            ServerEnded: the server has ended, or does not answer.
            CannotVerify: the function does not exist, or it makes no loader that can be verified.
        """
        with contextlib.suppress(OSError):  # the answer says why
            self._connection.send((job, seconds))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        why = "the process that runs the loader has ended"
        try:
            if self._connection.poll(seconds + _MARGIN_S):
                found = self._connection.recv()
                if isinstance(found, CannotVerify):
                    raise found
                return found
            why = f"no answer came within {seconds:.0f} s"
        except (EOFError, OSError):
            pass
        lines = self._printed.read_text(errors="replace").strip().splitlines()
        raise ServerEnded(". ".join([why, *lines[-1:]]))


# ------------------------------------------------------------------------------------------------- in the server


def serve(fd: int, target: str) -> None:
    """Import the user's function, and carry out jobs, each in a fork of this process, until the connection is closed.

    Args:
        fd: of the connection.
        target: see `import_target`.
    """
    torch.set_num_threads(1)  # so that a fork lacks no thread
    connection, me = Connection(fd), os.getpid()
    os.set_inheritable(fd, False)
    warnings.simplefilter("ignore")
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
    with contextlib.suppress(EOFError, OSError):  # the other end was closed
        connection.send(answer)
        while make is not None:
            job, seconds = connection.recv()
            connection.send(_in_fork(job, seconds, make, connection))
    os._exit(0)  # threads of the module may not end


def _in_fork(job: Any, seconds: float, make: Callable[[], Any], connection: Connection) -> Any:
    """Carry out a job in a fork of this process. Returns its result, or a `UserFailure`.

    Raises:
        EOFError: the other end of the connection was closed, over which nothing is sent before the result has come.
    """
    reading, writing = Pipe(duplex=False)
    with tempfile.TemporaryFile() as stacks, reading:
        if not (pid := os.fork()):
            try:
                os.setsid()
                _carry_out(job, make, writing, stacks)
            finally:
                os._exit(0)
        writing.close()
        deadline, note, late = time.monotonic() + seconds, "", False
        code: int | None = None
        try:
            while not late:
                # In this order: all that the process has written before its end can be read then. Its end does not show
                # at the pipe, which processes that it has started may hold open.
                code = _exit_code(pid, os.WNOHANG)
                ready = wait([reading, connection], _POLL_S if code is None else 0)
                if connection in ready:
                    raise EOFError
                if reading in ready:
                    with contextlib.suppress(EOFError):
                        name, value = reading.recv()
                        if name == "result":
                            return value
                        note = value
                        continue
                    time.sleep(_POLL_S)  # it has closed the pipe, and ends
                if code is not None:
                    break
                late = time.monotonic() > deadline
            if late:
                _send_signal(pid, signal.SIGABRT)  # the stacks are written
                until = time.monotonic() + _GRACE_S
                while (code := _exit_code(pid, os.WNOHANG)) is None and time.monotonic() < until:
                    time.sleep(_POLL_S)
        finally:
            _send_signal(pid, signal.SIGKILL, alone=code is None)
            code = _exit_code(pid) if code is None else code
        stacks.seek(0)
        return _failure(code or 0, late, note, line_of_stacks(stacks.read(200_000).decode(errors="replace")))


def _exit_code(pid: int, options: int = 0) -> int | None:
    """Return a child's exit code, or minus the signal that ended it; None: it runs, with ``os.WNOHANG``."""
    try:
        ended, status = os.waitpid(pid, options)
    except ChildProcessError:  # user code ignores SIGCHLD: the status is lost
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


def _send_signal(pid: int, number: int, *, alone: bool = True) -> None:
    """Send a signal to a process's group; `alone`: to the process, too, which may not lead its group yet."""
    for send in (os.killpg, os.kill) if alone else (os.killpg,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def _failure(code: int, late: bool, note: str, line: CodeLine | None) -> UserFailure:
    during = f" while {note}" if note else ""
    if late and line is None:  # the loader itself, the start of processes, a busy machine
        text = f"did not end in time{during}, and no line of the module was running in the main process"
        return UserFailure(text, advice="give more --seconds", late=True)
    if late:
        advice = "this line was running: a lock of another process, a read without a time limit, or an endless loop"
        return UserFailure(f"did not end in time{during}", line, advice, late=True)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    advice = "code of a loader must raise, not end its process"
    return UserFailure(f"has no result: the process {how}{during}", line, advice)


def _carry_out(job: Any, make: Callable[[], Any], writing: Connection, stacks: IO[bytes]) -> None:
    """Carry out a job in this process, and write the result; before that, notes on how far it is."""
    me = os.getpid()
    result: Any
    faulthandler.enable(stacks, all_threads=True)
    try:
        result = job(make, lambda text: writing.send(("note", text)))
    except CannotVerify as error:
        result = error
    except BaseException as error:  # sys.exit() of user code is an answer, too
        result = UserFailure.of(error)
    if os.getpid() == me:  # else user code has forked, and the fork came back, too
        writing.send(("result", result))
        with contextlib.suppress(Exception):
            sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
