"""A process that imports the user's module once and runs each job in a fork of itself, under a deadline.

Data path: jobs as lines of JSON -> [server: fork -> runs, causes, draws] -> results as lines of JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from typing import IO, Any

from asyncloader.plain_context import plain_context
from asyncloader.verification import causes, draws
from asyncloader.verification.descendants import adopt_orphans
from asyncloader.verification.interpreter import OTHER_ORDER
from asyncloader.verification.making import CannotVerify, IteratedAtImport, import_target
from asyncloader.verification.runs import Job, described, look, run
from asyncloader.verification.sources import Sources
from asyncloader.verification.watching import following

_LARGEST_RESULT = 64 << 20
_NOTE_BYTES = 4096
_GRACE_S = 2.0


class _NotWanted(Exception):
    """The process that sends the jobs has ended."""


CarryOut = Callable[[Job, Callable[[], Any], Callable[[str], None]], dict[str, Any]]
"""Carries out a job with the user's function, and returns its result; it also gets a function that notes in words how
far the job is.
"""


def main(fd: int, target: str) -> None:
    """Serve jobs over a socket until it is closed."""
    import torch

    torch.set_num_threads(1)
    sources = Sources()
    sources.install(turned=os.environ.get("PYTHONHASHSEED") == str(OTHER_ORDER))
    sources.importing = True  # in this process, which imports it and does nothing else
    serve(fd, target, lambda job, make, note: _carry_out(job, make, sources, note, target))


def serve(fd: int, target: str, carry_out: CarryOut) -> None:
    """Import the user's function, and carry out jobs, each in a fork of this process, until the socket is closed.

    Args:
        fd: of the socket.
        target: see `import_target`.
        carry_out: called in the forks.
    """
    connection, me = socket.socket(fileno=fd), os.getpid()
    connection.set_inheritable(False)
    warnings.simplefilter("ignore")
    adopt_orphans()
    answer: dict[str, Any] = {"ready": True}
    make: Callable[[], Any] | None = None
    try:
        with _ended_with(connection):
            make = import_target(target)
    except IteratedAtImport as error:
        answer = {"iterated": None if error.place is None else list(error.place)}
    except CannotVerify as error:
        answer = {"refused": str(error)}
    except BaseException as error:  # sys.exit() of the module is an answer, too
        answer = {"raised": described(error)}
    if os.getpid() != me:  # the module has forked while it was imported, and this process came back, too
        os._exit(0)
    _open_standard_files()
    lines = connection.makefile("rw")
    _send(lines, answer)
    with contextlib.suppress(_NotWanted):
        while make is not None and (line := lines.readline()):
            _send(lines, _in_child(json.loads(line), make, carry_out, connection))
    os._exit(0)  # threads of the module may not end


@plain_context
def _ended_with(connection: socket.socket) -> Generator[None]:
    """Context in which this process ends at once when the other end of the connection is closed: until the import is
    over, nothing is sent over it, and the signal of the system means that.
    """
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([connection], [], [], 0)[0]:  # it was closed before
        os._exit(0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the module has closed it
            fcntl.fcntl(connection, fcntl.F_SETFL, flags)


def _open_standard_files() -> None:
    """Have the numbers 0 to 2 stand for files, if the module has closed them: prints would go to the next file."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _send(lines: IO[str], answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def _in_child(job: Job, make: Callable[[], Any], carry_out: CarryOut, connection: socket.socket) -> dict[str, Any]:
    note, (reading, writing) = mmap.mmap(-1, _NOTE_BYTES), os.pipe()
    with tempfile.TemporaryFile() as stacks:
        pid = os.fork()
        if not pid:
            _child(job, make, carry_out, note, writing, stacks)
        os.close(writing)
        child = _Child(pid)
        try:
            data, status, late = _collect(child, reading, time.monotonic() + job["limit"], connection)
        finally:
            os.close(reading)
            child.end()
        if data.endswith(b"\n"):
            return dict(json.loads(data))
        stacks.seek(0)
        text = stacks.read(200_000).decode(errors="replace")
        return {
            "late" if late else "died": status,
            "stacks": text,
            "note": note[:].partition(b"\0")[0].decode(errors="replace"),
        }


def _collect(child: _Child, reading: int, deadline: float, connection: socket.socket) -> tuple[bytes, int, bool]:
    """Read a child's result; end the child at the deadline. Returns the bytes, its status, and whether it was late.

    Raises:
        _NotWanted: the other end of the connection was closed, over which nothing is sent before there is a result.
    """
    data, late = bytearray(), False
    watched: list[Any] = [reading, connection]
    pidfd = os.pidfd_open(child.pid) if hasattr(os, "pidfd_open") else None
    if pidfd is not None:
        watched.append(pidfd)
    try:
        while not data.endswith(b"\n") and len(data) < _LARGEST_RESULT:
            left = deadline - time.monotonic()
            if left <= 0:
                late = True
                child.kill(signal.SIGABRT)  # the stacks are written
                break
            # Without pidfds the child's end is looked for now and then; its workers may hold the pipe open.
            ready = select.select(watched, [], [], left if pidfd is not None else min(left, 0.1))[0]
            if connection in ready:
                raise _NotWanted
            if reading in ready:
                chunk = os.read(reading, 1 << 16)
                data += chunk
                if not chunk:
                    break
            elif pidfd in ready or child.has_ended():
                break
    finally:
        if pidfd is not None:
            os.close(pidfd)
    if not data.endswith(b"\n"):
        child.wait(_GRACE_S)
    return bytes(data), child.end(), late


class _Child:
    """A forked process, and the group that it leads."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def has_ended(self) -> bool:
        """Whether it has ended. Does not wait."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the module's code ignores SIGCHLD, so that the system has taken the status
                self._status = 0
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, for so long at most."""
        end = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < end:
            select.select([], [], [], 0.02)

    def kill(self, number: int) -> None:
        """Send a signal to the process and its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if not self.has_ended():  # its number may be another process's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def end(self) -> int:
        """End the process and its group. Returns its exit code, or the signal that ended it as a negative number."""
        self.kill(signal.SIGKILL)
        while not self.has_ended():
            with contextlib.suppress(ChildProcessError):
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status or 0


def _child(
    job: Job, make: Callable[[], Any], carry_out: CarryOut, note: mmap.mmap, writing: int, stacks: IO[bytes]
) -> None:
    """Carry out a job in this fork, write the result, and end the process."""
    try:
        me = os.getpid()
        os.setsid()
        faulthandler.enable(stacks, all_threads=True)

        def write(text: str) -> None:
            data = text.encode(errors="replace")[: _NOTE_BYTES - 1]
            note[: len(data) + 1] = data + b"\0"

        try:
            result = carry_out(job, make, write)
        except CannotVerify as error:
            result = {"refused": str(error)}
        except BaseException as error:  # sys.exit() of user code is an answer, too
            result = {"raised": described(error)}
        if os.getpid() != me:  # user code has forked, and the fork came back, too
            os._exit(0)
        write("its result was being written")
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    finally:
        os._exit(0)


def _carry_out(
    job: Job, make: Callable[[], Any], sources: Sources, note: Callable[[str], None], target: str
) -> dict[str, Any]:
    sources.importing = False  # in this fork
    match job["do"]:
        case "look":
            return look(make, job)
        case "run":
            return run(make, job, note)
        case "last_line":
            with following(note):
                return run(make, job, lambda _: None)
        case "state":
            return causes.state(make, job)
        case "sites":
            return causes.sites(make, job, sources)
        case "setup":
            return causes.setup(make, job, sources)
        case "drawn in samples":
            return draws.in_samples(make, job)
        case "drawn at import":
            return draws.at_import(target, job, sources)
        case "kept":
            return causes.kept_values(make, job)
        case "aliasing":
            return {"lines": causes.aliasing(make, job)}
        case _:
            return {"lines": causes.length(make, job)}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
