"""Runs Python programs in forks of a process that has torch imported: a tenth of a second instead of three.

`run` and `start` behave as `subprocess.run` and `subprocess.Popen`, as far as the tests need it. The program gets the
environment that `python script.py` gives it: `__main__` with its file, argv, folder, environment, pipes, process group,
and an interpreter that exits in the normal way. Only the imports are done already, and at the end C++ libraries are not
destroyed; a test of the imports, of the interpreter's start or of its exit uses `subprocess`.

Each set of interpreter options and environment variables has its own server, because both are read while modules are
imported (`early_fork.CHANGING` has the variables that are not). A server has one thread, and ends with the process that
it serves, even if a forked child of that process keeps a copy of the connection: with the process that started it, or
with `python -m tests`, whose forks share their servers.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from typing import Any, ClassVar

ANSWER = struct.Struct("i")
LARGEST_REQUEST = 1 << 17  # bytes; an environment and a -c program

SHARED = "ASYNCLOADER_SCRIPT_SERVERS"
"""The variable in which `python -m tests` names a folder for the sockets of its forks' servers, and its pid."""
# Only the forks themselves share servers, and no program that they start: programs do not get the variable.
_shared = os.environ.pop(SHARED, "").rpartition(":")


# ------------------------------------------------------------------------------------------- in the tests' process


class Forked(subprocess.Popen[str]):
    """A `Popen` of ``[sys.executable, *options, program, *arguments]`` that the server forks.

    The server is its parent process: the server waits for it, and writes its exit code into a pipe.
    """

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        passed, cwd, env = rest[3:6]
        cwd, env = cwd or Path.cwd(), os.environ if env is None else env
        pipes = rest[9:15]  # stdin, stdout, stderr: the end to read from, and the end to write to
        options, program = split(args[1:])
        self._answers, answers = os.pipe()
        standard = [given if given != -1 else own for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = json.dumps({"program": program, "cwd": os.fspath(cwd), "env": dict(env), "numbers": passed})
        try:
            server = Server.of(options, env)
            socket.send_fds(server.connection, [request.encode()], [*standard, answers, *passed])
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(answers)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = self._answer()
        self._child_created = True

    def _answer(self) -> int:
        answer = os.read(self._answers, ANSWER.size)
        if not answer:
            os.close(self._answers)
            raise RuntimeError("the script server ended")
        return int(ANSWER.unpack(answer)[0])

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.returncode = self._answer()
            os.close(self._answers)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            select.select([self._answers], [], [], timeout)
        code = self._internal_poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path,
    stdin: int | None = None,
    stderr: int = subprocess.PIPE,
    fresh: bool = False,
) -> subprocess.Popen[str]:
    """Start a program with pipes for its output. Without pidfds it is always `fresh`: in an interpreter of its own."""
    kind = subprocess.Popen if fresh or not hasattr(os, "pidfd_open") else Forked
    return kind(command, env=env, cwd=cwd, text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)


def run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does with `capture_output` and `text`."""
    with start(command, env=env, cwd=cwd) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter's options, and the program with its arguments."""
    at = 0
    while arguments[at].startswith("-") and arguments[at] not in ("-m", "-c"):
        at += 2 if arguments[at] in ("-W", "-X") else 1
    return list(arguments[:at]), list(arguments[at:])


class Server:
    """A connection of this process to a server."""

    running: ClassVar[dict[tuple[object, ...], Server]] = {}

    def __init__(self, options: Sequence[str], env: Mapping[str, str]) -> None:
        folder, _, runner = _shared
        if folder:
            self.connection = _connect(Path(folder), int(runner), options, env)
        else:
            self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                _start_server(theirs, os.getpid(), options, env)
        self.owner = os.getpid()
        atexit.register(self.stop)

    @classmethod
    def of(cls, options: Sequence[str], env: Mapping[str, str]) -> Server:
        """Return the server for these options and variables, which is started if necessary."""
        from tests.early_fork import (
            read_by_imports,
        )  # only here: in the server this module is `__main__`, and `tests` unknown

        kept = read_by_imports(env)
        key = (os.getpid(), tuple(options), *sorted(kept.items()))
        if key not in cls.running:
            cls.running[key] = cls(options, kept)
        return cls.running[key]

    def stop(self) -> None:
        """End the connection, and the server unless others share it. A forked child of the owner only closes it."""
        with self.connection:
            if os.getpid() == self.owner:
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.recv(1)


def _start_server(theirs: socket.socket, owner: int, options: Sequence[str], env: Mapping[str, str]) -> None:
    """Start a server that ends with the process `owner`. `theirs` is connected, or listens."""
    subprocess.run(
        [sys.executable, *options, __file__, str(theirs.fileno()), str(owner)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        cwd="/",
        env=env,
        check=True,
    )


def _connect(folder: Path, runner: int, options: Sequence[str], env: Mapping[str, str]) -> socket.socket:
    """Connect to the runner's server for these options and variables, which is started if necessary."""
    key = json.dumps([options, sorted(env.items())])
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two forks may connect at the same time, and only one may start the server
        if not path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(path))
                listener.listen()
                _start_server(listener, runner, options, env)
    connection.connect(str(path))
    return connection


def descriptors() -> set[int]:
    """Return the descriptors of the connections to servers."""
    return {server.connection.fileno() for server in Server.running.values()}


# ------------------------------------------------------------------------------------------- in the server


def serve(channel: socket.socket, owner: int) -> dict[str, Any]:
    """Fork a child for each request, and answer with its pid and later with its exit code.

    Args:
        channel: is connected, or listens for connections.
        owner: a pidfd. The server ends with this process, or with the last connection if `channel` is connected.

    Returns only in a child: the request.
    """
    at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupts are meant for the programs
    listens = bool(channel.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    channels = {channel.fileno(): channel}
    children: dict[int, tuple[int, int]] = {}
    while channels:
        ready: list[int] = select.select([owner, *channels, *children], [], [])[0]
        if owner in ready:
            break
        for pidfd in {*ready} & {*children}:
            pid, answers = children.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(BrokenPipeError):
                os.write(answers, ANSWER.pack(code))
            os.close(answers)
            os.close(pidfd)
        for number in {*ready} & {*channels}:
            if listens and number == channel.fileno():
                accepted = channel.accept()[0]
                channels[accepted.fileno()] = accepted
                continue
            request, received, _, _ = socket.recv_fds(channels[number], LARGEST_REQUEST, 64)
            if not request:
                channels.pop(number).close()
                continue
            standard, answers, passed = received[:3], received[3], received[4:]
            if (pid := os.fork()) == 0:
                asked: dict[str, Any] = json.loads(request)
                for copied, descriptor in enumerate(standard):
                    os.dup2(descriptor, copied)
                held = [owner, *received, *channels, *children, *(each for _, each in children.values())]
                for each in channels.values():
                    each.detach()
                numbers = asked.pop("numbers")
                unused = max(*held, *numbers) + 1
                moved = [fcntl.fcntl(each, fcntl.F_DUPFD, unused) for each in passed]
                libraries: set[int] = import_module("early_fork").of_libraries()
                for descriptor in {*range(3, unused)} - libraries:
                    with suppress(OSError):  # of no open file
                        os.close(descriptor)
                for descriptor, its_number in zip(moved, numbers, strict=True):
                    os.dup2(descriptor, its_number)
                    os.close(descriptor)
                signal.signal(signal.SIGINT, at_interrupt)
                return asked
            children[os.pidfd_open(pid)] = pid, answers
            os.write(answers, ANSWER.pack(pid))
            for descriptor in (*standard, *passed):
                os.close(descriptor)
    os._exit(0)


def become(program: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    """Run the program as `__main__` of this process.

    Args:
        program: a file, `-m` or `-c`, and its arguments.
        cwd: the program's folder.
        env: its environment variables.

    Raises:
        SystemExit: with 1, after an uncaught exception.
    """
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing_process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    for generator in GENERATORS:
        generator()
    if starts_interpreters(program):
        import_module("early_fork").begin()
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    # A worker that is not forked knows the program's definitions by the second name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    kind, *arguments = program
    if kind == "-m":
        import runpy

        sys.path.insert(0, cwd)
        sys.argv = program[1:]  # type: ignore[assignment]
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        return
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        source, name = arguments[0].encode(), "<string>"
    else:
        from importlib.machinery import SourceFileLoader

        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))  # noqa: PTH120
        sys.argv = list(program)
        source, name = Path(kind).read_bytes(), kind
        vars(main).update(__file__=kind, __cached__=None, __loader__=SourceFileLoader("__main__", kind))
    try:
        exec(compile(source, name, "exec", dont_inherit=True), vars(main))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        outer = error.__traceback__  # this function's frame
        sys.excepthook(type(error), error.with_traceback(outer and outer.tb_next), None)
        sys.exit(1)


def starts_interpreters(program: Sequence[str]) -> bool:
    """Whether the program may have spawned processes or a fork server: it names them, a remote dataset, or a node."""
    if program[0] == "-m":
        return program[1:3] == ["asyncloader", "serve"] or program[1] == "asyncloader.service.node.agent"
    source = program[1].encode() if program[0] == "-c" else Path(program[0]).read_bytes()
    return re.search(rb"spawn|forkserver|\bserve\b|Remote|Shards", source) is not None


if __name__ == "__main__":
    given, its_owner = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    if os.fork():
        os._exit(0)  # the server must not be a child of a test's process, because tests check their process's children
    early_fork: Any = import_module("early_fork")
    del sys.path[0]  # this file's folder
    import numpy as np
    import torch

    for name in early_fork.PACKAGE:
        with suppress(ImportError):
            import_module(name)
    GENERATORS = (np.random.seed, torch.default_generator.seed)
    early_fork.exit_without_destructors()
    gc.collect()
    gc.freeze()  # the imported objects: at its end a program would copy all of their pages, which takes a second
    become(**serve(given, its_owner))
