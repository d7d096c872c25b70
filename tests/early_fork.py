"""Starts multiprocessing's spawned processes and fork servers as forks of a child that was forked early: this spares
each the second of CPU time in which an interpreter imports torch.

A process that has called `begin` has this child, which it forked before it did anything else. The child forks what
would be new interpreters, and they become children of the process itself. They get what an interpreter would get:
arguments, standard streams, variables, folder, and the passed descriptors under their numbers. Only the imports are
done already; multiprocessing does all the rest. A process whose surroundings have changed since `begin` (environment,
signals, limits) starts an interpreter, and so does a test that is marked `spawns`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from typing import Any, NoReturn

PROGRAMS = tuple(
    before + f"from multiprocessing.{module} import"
    for before in ("", "import sys; ")  # the second from Python 3.14 on
    for module in ("spawn", "forkserver")
)

PACKAGE = (
    "asyncloader.loaders.loader",
    "asyncloader.loaders.async_loader",
    "asyncloader.remote.dataset",
    "asyncloader.service.node.cli",
)
"""Modules of the package that are imported before the forks, where what they need is installed: what most spawned
processes use, and a node with its processes.
"""

CHANGING = ("PYTEST_", "ASYNCLOADER_", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "XDG_RUNTIME_DIR")
"""The first letters of variables that differ between tests. No import reads them."""

PID = struct.Struct("i")
LARGEST_REQUEST = 1 << 17  # bytes; the command holds the paths of modules
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37

_start_interpreter = util.spawnv_passfds
_early: EarlyFork | None = None


class EarlyFork:
    """A child that forks processes for this process. It ends with this process."""

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self.owner = os.getpid()
        self.rests = False
        self._lock = threading.Lock()  # several threads start workers at a time
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = ours.detach()  # a socket that is open at the interpreter's end causes a warning
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.descriptor)
            try:
                _serve(theirs)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(1)
        theirs.close()

    def start(self, arguments: list[str], descriptors: list[int]) -> int:
        """Start a child of this process that runs `-c` with these arguments, with the standard streams and with copies
        of descriptors. Returns its pid.
        """
        asked = {"arguments": arguments, "numbers": descriptors, "variables": {**os.environ}, "folder": str(Path.cwd())}
        with self._lock, _adopting():
            connection = socket.socket(fileno=self.descriptor)
            try:
                socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2, *descriptors])
                answer = connection.recv(PID.size)
            finally:
                connection.detach()
        return int(PID.unpack(answer)[0])


def begin() -> None:
    """Fork the child that will fork this process's spawned processes and its fork server."""
    global _early  # noqa: PLW0603 - the child of this process, as multiprocessing has one `spawnv_passfds` for a process
    if sys.platform.startswith("linux"):
        early = EarlyFork()
        _early = early
        util.spawnv_passfds = _spawn


def exit_without_destructors() -> None:
    """Let this process, and its forks, exit without the C++ destructors of libraries that it has loaded.

    Those of torch take half of a fork's exit, because they write to pages that it must copy first. Python's own end is
    as always, C's streams are flushed, and what is loaded later is destroyed.
    """
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # glibc has these functions; they are called in reverse order
        for function in (libc._exit, libc.fcloseall):
            libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)  # `_exit` gets the status


def waiting() -> tuple[set[int], set[int]]:
    """Return the pid of that child, and the descriptor of the connection to it; nothing without a child."""
    if _early is None or _early.owner != os.getpid():
        return set(), set()
    return {_early.pid}, {_early.descriptor}


@contextmanager
def interpreters() -> Generator[None]:
    """Let this process start interpreters for a while, and end the fork server that it starts meanwhile."""
    early = _early
    server: Any = forkserver._forkserver
    before = server._forkserver_pid
    if early is not None:
        early.rests = True
    try:
        yield
    finally:
        if early is not None:
            early.rests = False
            if server._forkserver_pid not in (before, None):
                server._stop()


def _spawn(path: Any, args: Any, passfds: Any) -> int:
    """Take the place of `multiprocessing.util.spawnv_passfds`."""
    early = _early
    program = args[args.index("-c") + 1 :] if "-c" in args else [""]
    if (
        early is None
        or early.rests
        or early.owner != os.getpid()
        or not program[0].startswith(PROGRAMS)
        or os.fsdecode(path) != sys.executable
        or early.surroundings != _surroundings()
    ):
        return int(_start_interpreter(path, args, passfds))
    return early.start(program, sorted(map(int, passfds)))


def read_by_imports(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import may read: those that are the same in all tests."""
    return {name: value for name, value in variables.items() if not name.startswith(CHANGING)}


def _surroundings() -> tuple[object, ...]:
    """Return what an interpreter started now would take over from this process, and a fork of the child would not."""
    return (
        read_by_imports(os.environ),
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


@contextmanager
def _adopting() -> Generator[None]:
    """Make this process the parent of descendants whose parent ends."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# ------------------------------------------------------------------------------------------- in the child


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a process for each request, until the process that asks has ended."""
    owner = os.pidfd_open(os.getppid())  # a forked child of the owner may keep a copy of the connection
    at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupts are meant for the others
    while True:
        if owner in select.select([connection.fileno(), owner], [], [])[0]:
            os._exit(0)
        request, received, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 64)
        if not request:
            os._exit(0)
        pids, pids_end = os.pipe()
        adopted, adopted_end = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(adopted_end)
            pid = os.fork()
            if pid:
                os.write(pids_end, PID.pack(pid))
                os._exit(0)  # the owner adopts the other process
            os.read(adopted, 1)
            signal.signal(signal.SIGINT, at_interrupt)
            connection.detach()
            os._exit(_run(json.loads(request), received))
        os.waitpid(between, 0)
        connection.send(os.read(pids, PID.size))
        for each in (pids, pids_end, adopted, adopted_end, *received):
            os.close(each)


def of_libraries() -> set[int]:
    """Return the descriptors that shared libraries keep: some builds of libffi need that of their file for callbacks.
    A descriptor that is passed has another number, as the process that passes it has the library, too.
    """
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of that listing
            if ".so" in each.readlink().suffixes:
                found.add(int(each.name))
    return found


def _run(asked: dict[str, Any], received: list[int]) -> int:
    """Run the program as `python -c` does. Returns its exit code."""
    numbers = [0, 1, 2, *asked["numbers"]]
    # Out of the way first: a received descriptor may have a number that another one must get.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in received]
    kept = {*moved, *of_libraries()}
    for each in map(int, [each.name for each in Path("/proc/self/fd").iterdir()]):
        if each not in kept:
            with suppress(OSError):  # the descriptor of that listing
                os.close(each)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    multiprocessing_process.ORIGINAL_DIR = asked["folder"]  # type: ignore[attr-defined]
    for name, generator in (("numpy", "random"), ("torch", "default_generator")):
        if name in sys.modules:  # they are seeded when they are imported
            getattr(sys.modules[name], generator).seed()
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    sys.modules.pop("__mp_main__", None)
    source, *sys.argv[1:] = asked["arguments"]
    sys.argv[0] = "-c"
    sys.path.insert(0, "")
    code = 0
    try:
        exec(compile(source, "<string>", "exec", dont_inherit=True), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        outer = error.__traceback__  # this function's frame
        sys.excepthook(type(error), error.with_traceback(outer and outer.tb_next), None)
        code = 1
    # Of an interpreter's end, multiprocessing has done the rest.
    atexit._run_exitfuncs()
    util._flush_std_streams()  # type: ignore[attr-defined]
    return code
