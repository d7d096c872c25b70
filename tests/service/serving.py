"""Starts nodes as users do, with the command line, and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests import script_server
from tests.helpers.running import PATIENCE_S, ROOT, environment

MODULE = "tests.service.definitions"
ALL = [
    "numbers",
    "with_functions",
    "awaited",
    "stream",
    "async_stream",
    "broken",
    "deadly",
    "odd",
    "large",
]


class NodeProcess:
    """A running `asyncloader serve`."""

    def __init__(self, process: subprocess.Popen[str], said: dict[str, Any]) -> None:
        self.process = process
        self.said = said
        self.addresses: list[str] = said["addresses"]

    @property
    def tcp(self) -> str:
        """The node's TCP address."""
        return next(each for each in self.addresses if each.startswith("tcp:"))

    @property
    def unix(self) -> str:
        """The address of the node's Unix socket."""
        return next(each for each in self.addresses if each.startswith("unix:"))

    def workers(self) -> list[psutil.Process]:
        """Return the node's processes. A process has torch's name for a worker from its first worker connection on."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                if each.name() in ("asyncloader_lane", "pt_data_worker"):
                    found.append(each)
        return found

    def kill(self) -> None:
        """Kill the node: to its loaders it looks like a loss of power."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def serving(
    folder: Path,
    names: Sequence[str] = ALL,
    *flags: str,
    listen: Sequence[str] = (),
    workers: int = 2,
    module: str = MODULE,
    within: Sequence[str] = (),
    cwd: Path = ROOT,
    **variables: str,
) -> Generator[NodeProcess]:
    """Start a node that serves these definitions of a module, by default at a TCP port and a Unix socket. At the end it
    is asked to exit, and must exit with code 0 and without a traceback. `within` is a command that runs it in another
    network or with other limits.
    """
    places = list(listen) or ["127.0.0.1:0", f"unix:{folder}/node.sock"]
    command = [*within, sys.executable, "-m", "asyncloader", "serve", *(f"{module}:{name}" for name in names)]
    command += [part for place in places for part in ("--listen", place)]
    log = folder / f"node-{os.urandom(4).hex()}.log"
    with log.open("w") as stderr:
        process = script_server.start(
            [*command, "--workers", str(workers), *flags],
            env=environment() | variables,
            cwd=cwd,
            stderr=stderr.fileno(),
            fresh=bool(within),
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield NodeProcess(process, json.loads(line))
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(PATIENCE_S)
        if process.stdout is not None:
            process.stdout.close()
