"""Starts a server process, sends it jobs, and ends it with all that it has started.

Data path: jobs -> [interpreter: socket] -> server.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import asyncloader
from asyncloader.verification.descendants import descendants, end_all, marked

OTHER_ORDER = 2
"""The hash seed with which names in folders, too, come in another order: the reverse of the file system's."""

_MARK = "ASYNCLOADER_VERIFY"
_LARGEST_ANSWER = 64 << 20
_KEPT_OUTPUT = 4000
_MARGIN_S = 15.0  # for the server to end a late job


class ServerEnded(RuntimeError):
    """The server has ended, or does not answer. The text has the end of its output."""


class Interpreter:
    """A fresh Python with the user's module imported.

    Args:
        target: see `import_target`.
        hash_seed: of the order of its sets of strings, for reproducible runs, whose computations have a thread. None:
            the environment is left as it is.
        server: the module that carries out the jobs.
    """

    def __init__(self, target: str, hash_seed: int | None, server: str = "asyncloader.verification.server") -> None:
        self._output = b""
        self._import: dict[str, Any] | None = None
        self._mark = secrets.token_hex(16)
        # Sockets of start methods, and files of the user's code, are removed with the folder.
        self._folder = tempfile.TemporaryDirectory(prefix="alv", ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(Path(asyncloader.__file__).parent.parent)])
        )
        environ = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": self._folder.name,
            _MARK: self._mark,
        }
        if hash_seed is not None:
            environ |= {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
        self._socket, self._received = ours, bytearray()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", server, str(theirs.fileno()), target],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environ,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, seconds: float) -> dict[str, Any]:
        """Wait for the import of the module, and return its result. Raises as `ask`."""
        if self._import is None:
            self._import = self.answer(seconds)
        return self._import

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a job, which is ended after some seconds, and return its result.

        Raises:
            ServerEnded: the server has ended, or does not answer.
        """
        self.send(job, seconds)
        return self.answer(seconds)

    def send(self, job: dict[str, Any], seconds: float) -> None:
        """Send a job; `answer` returns its result."""
        with contextlib.suppress(OSError):  # `answer` says why
            self._socket.sendall(json.dumps({"seconds": seconds, **job, "limit": seconds}).encode() + b"\n")

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next answer. Output of the user's code is read until then, and its end is kept."""
        deadline = time.monotonic() + seconds + _MARGIN_S
        assert self._process.stdout is not None
        watched: list[Any] = [self._socket, self._process.stdout]
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            ready = select.select(watched, [], [], max(left, 0))[0]
            if not ready:
                raise ServerEnded(f"there was no answer within {seconds:.0f} s. {self.output}".strip())
            if self._process.stdout in ready:
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                self._output = (self._output + chunk)[-_KEPT_OUTPUT:]
                if not chunk:
                    watched.remove(self._process.stdout)
            if self._socket in ready:
                data = self._socket.recv(1 << 16)
                if not data or len(self._received) > _LARGEST_ANSWER:
                    raise ServerEnded(f"the process that runs the loader has ended. {self.output}".strip())
                self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return dict(json.loads(line))

    @property
    def output(self) -> str:
        """The last line that the server and the user's code have printed."""
        lines = self._output.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the server and all processes that come from it, also those that have left its session."""
        # While the server runs, it is the parent of all orphans that come from it.
        _end_while(lambda: descendants(self._process.pid))
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        mark = f"{_MARK}={self._mark}".encode()
        _end_while(lambda: marked(mark))  # where the server has ended before
        self._folder.cleanup()


def _end_while(find: Callable[[], set[int]]) -> None:
    """End the processes that are found, and those that they have started since."""
    ended: set[int] = set()
    while left := find() - ended:
        end_all(left)
        ended |= left
