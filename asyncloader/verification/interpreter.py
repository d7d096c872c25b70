"""Starts a server process, sends it jobs, and ends it with all that it has started.

Data path: jobs -> [interpreter: connection] -> server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, Self

import asyncloader
from asyncloader.verification.target import CannotVerify
from asyncloader.verification.user_code import UserFailure

_KEPT_OUTPUT = 4000
_MARGIN_S = 15.0  # for the server to end a late job
_ENDING_S = 30.0  # for the server to end what it has started


class ServerEnded(RuntimeError):
    """The server has ended, or does not answer. The text has the last line that it has printed."""


class Interpreter:
    """A fresh Python with the user's module imported.

    Args:
        target: see `import_target`.
        hash_seed: of the order of its sets of strings, for reproducible runs, whose computations have a thread. None:
            the environment is left as it is.
    """

    def __init__(self, target: str, hash_seed: int | None) -> None:
        self._output = b""
        self._imported: list[Any] = []  # its result, once it is known
        # Sockets of start methods, and files of the user's code, are removed with the folder.
        self._folder = tempfile.TemporaryDirectory(prefix="alv", ignore_cleanup_errors=True)
        path = [os.environ.get("PYTHONPATH"), str(Path(asyncloader.__file__).parent.parent)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
        environ["TMPDIR"] = self._folder.name
        if hash_seed is not None:
            environ |= {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncloader.verification.server", str(theirs.fileno()), target],
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

    def ready(self, seconds: float) -> UserFailure | None:
        """Wait for the import of the module, and return why it failed; None: it did not. Raises as `ask`."""
        if not self._imported:
            self._imported.append(self._answer(seconds))
        found: UserFailure | None = self._imported[0]
        return found

    def ask(self, job: Any, seconds: float) -> Any:
        """Send a job, which is ended after some seconds, and return its result, or a `UserFailure`.

        Raises:
            ServerEnded: the server has ended, or does not answer.
            CannotVerify: there is no such function, or it makes no loader that can be verified.
        """
        with contextlib.suppress(OSError):  # the answer says why
            self._connection.send((job, seconds))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        """Return the next answer. The output of the user's code is read meanwhile, and its end is kept."""
        deadline = time.monotonic() + seconds + _MARGIN_S
        printed: Any = self._process.stdout
        watched: list[Any] = [self._connection, printed]
        why = "the process that runs the loader has ended"
        while ready := wait(watched, max(deadline - time.monotonic(), 0)):
            if printed in ready:
                chunk = os.read(printed.fileno(), 1 << 16)
                self._output = (self._output + chunk)[-_KEPT_OUTPUT:]
                if not chunk:
                    watched.remove(printed)
                continue
            try:
                found = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(found, CannotVerify):
                raise found
            return found
        else:
            why = f"there was no answer within {seconds:.0f} s"
        lines = self._output.decode(errors="replace").strip().splitlines()
        raise ServerEnded(". ".join([why, *lines[-1:]]))

    def close(self) -> None:
        """End the server and all processes that come from it. Idempotent."""
        self._connection.close()
        if self._imported:  # else it does not look at the connection yet
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # waits, and closes its output
            self._folder.cleanup()
