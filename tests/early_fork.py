"""Starts multiprocessing's fork server in a child that was forked early, which spares it a second of importing torch.

A fork server is a new interpreter that imports torch before it forks workers. In a process that has called `begin`, it
is a child instead, which `begin` forked before the process did anything else. The child gets what an interpreter would
get: arguments, standard streams, and the passed descriptors under their numbers. Only the imports are done already. A
process whose surroundings have changed since `begin` (environment, folder, signals, limits) starts an interpreter, and
so does one that needs a second fork server.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import sys
import types
from contextlib import suppress
from multiprocessing import process as multiprocessing_process
from multiprocessing import util
from pathlib import Path
from typing import Any

CHANGING = "PYTEST_CURRENT_TEST"  # the only variable that differs between any two tests
LARGEST_REQUEST = 1 << 17  # bytes; the command holds the paths of modules
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_start_interpreter = util.spawnv_passfds
_early: EarlyFork | None = None


class EarlyFork:
    """A child that waits until it is to run a program. It ends when this process ends first."""

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self.owner = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = ours.detach()  # a socket that is open at the interpreter's end causes a warning
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.descriptor)
            try:
                _wait_and_run(theirs)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(1)
        theirs.close()

    def run(self, arguments: list[str], descriptors: list[int]) -> None:
        """Let the child run `-c` with these arguments, with the standard streams and with copies of descriptors."""
        request = json.dumps({"arguments": arguments, "numbers": descriptors, "test": os.environ.get(CHANGING)})
        with socket.socket(fileno=self.descriptor) as connection:
            socket.send_fds(connection, [request.encode()], [0, 1, 2, *descriptors])


def begin() -> None:
    """Fork the child that will be this process's fork server, if it needs one."""
    global _early  # noqa: PLW0603 - the child of this process, as multiprocessing has one fork server for a process
    early = EarlyFork()
    _early = early
    util.spawnv_passfds = _spawn


def waiting() -> tuple[set[int], set[int]]:
    """Return the pid of the child that waits, and the descriptor of the connection to it; nothing if none waits."""
    if _early is None or _early.owner != os.getpid():
        return set(), set()
    return {_early.pid}, {_early.descriptor}


def _spawn(path: Any, args: Any, passfds: Any) -> int:
    """Take the place of `multiprocessing.util.spawnv_passfds`."""
    global _early  # noqa: PLW0603
    early = _early
    program = args[args.index("-c") + 1 :] if "-c" in args else [""]
    if (
        early is None
        or early.owner != os.getpid()
        or "from multiprocessing.forkserver import main" not in program[0]
        or early.surroundings != _surroundings()
    ):
        return int(_start_interpreter(path, args, passfds))
    _early = None
    early.run(program, [int(each) for each in passfds])
    return early.pid


def _surroundings() -> tuple[object, ...]:
    """Return what an interpreter started now would take over from this process."""
    return (
        {name: value for name, value in os.environ.items() if name != CHANGING},
        Path.cwd(),
        os.getpgrp(),
        os.getsid(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
        [resource.getrlimit(limit) for limit in LIMITS],
        (os.getresuid(), os.getresgid()),
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        util._args_from_interpreter_flags(),  # type: ignore[attr-defined]
    )


def _wait_and_run(connection: socket.socket) -> None:
    """Wait for a request, and run its program as `python -c` does. Returns if the other process ended first."""
    request, received, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 64)
    if not request:
        return
    asked = json.loads(request)
    numbers = [0, 1, 2, *asked["numbers"]]
    # Out of the way first: a received descriptor may have a number that another one must get.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in received]
    connection.detach()
    for each in map(int, [each.name for each in Path("/proc/self/fd").iterdir()]):
        if each not in moved:
            with suppress(OSError):  # the descriptor of that listing
                os.close(each)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if asked["test"] is not None:
        os.environ[CHANGING] = asked["test"]
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    sys.modules.pop("__mp_main__", None)
    source, *sys.argv[1:] = asked["arguments"]
    sys.argv[0] = "-c"
    sys.path.insert(0, "")
    multiprocessing_process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    with suppress(SystemExit):
        exec(compile(source, "<string>", "exec", dont_inherit=True), vars(main))
    os._exit(0)
