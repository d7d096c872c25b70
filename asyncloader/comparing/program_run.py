"""Runs a program once, for a bounded time, with the recorder in each of its Python processes.

Data path: command -> [program_run: recorder in the program] -> records.

The program is a session of its own. A run is ended by SIGTERM to its process group, and after 5 s by SIGKILL to each
process that is in the session, or has the run's folder in its environment, as the workers of torchrun have.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from asyncloader.comparing.recorder import PLAN

_GRACE_S, _POLL_S, _MEMORY_S = 5.0, 0.05, 1.0
_TAIL = 4096  # bytes of standard error that are kept

_HOOK = """\
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import dirname
spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if each != dirname(__file__)])
if spec is not None and spec.loader is not None:  # the file that this one stands before
    spec.loader.exec_module(module_from_spec(spec))
from asyncloader.comparing.recorder import begin
begin()
"""


class ProgramRun(NamedTuple):
    """What a run left: the records of its processes and the reports of its workers; whether any Python process had the
    recorder; the exit code (None: the run was ended by us); the bytes that its processes used at most (PSS; None:
    unknown); the end of its standard error; and the seconds that it took.
    """

    processes: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    began: bool
    code: int | None
    memory: int | None
    errors: str
    seconds: float


def run_program(
    command: Sequence[str], plan: Mapping[str, Any], *, seconds: float, most: float, source: Path | None
) -> ProgramRun:
    """Run a program, with a copy of the folder `source` as its working directory (None: in the current one), so many
    seconds from its first batch on, but no longer than `most`. `plan` has the arguments of `ProgramRecorder`.

    Raises:
        OSError: the program cannot be started, or the folder not be copied.
    """
    with tempfile.TemporaryDirectory(prefix="asyncloader-try-", ignore_cleanup_errors=True) as made:
        folder, began, memory, due = Path(made), time.monotonic(), 0, 0.0
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(_HOOK)
        (folder / "plan.json").write_text(json.dumps(plan))
        if source is not None:
            shutil.copytree(source, folder / "cwd", symlinks=True)
        paths = [str(folder / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (folder / "stderr").open("wb") as errors:
            program = subprocess.Popen(
                command,
                cwd=None if source is None else folder / "cwd",
                env={**os.environ, PLAN: made, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        until = inf
        try:
            while (code := program.poll()) is None and (now := time.monotonic()) < min(until, began + most):
                if until == inf and any(folder.glob("process-*.json")):
                    until = now + seconds
                if now > due:
                    memory, due = max(memory, _memory(_members(program.pid, made))), now + _MEMORY_S
                time.sleep(_POLL_S)
        finally:
            _end(program, made)
        processes, workers = (
            [json.loads(each.read_text()) for each in sorted(folder.glob(f"{kind}-*.json"))]
            for kind in ("process", "worker")
        )
        tail = (folder / "stderr").read_bytes()[-_TAIL:].decode(errors="replace")
        seconds, seen = time.monotonic() - began, any(folder.glob("began-*"))
        return ProgramRun(processes, workers, seen, code, memory or None, tail, seconds)


def _end(program: subprocess.Popen[bytes], folder: str) -> None:
    """End a run, and wait until no process of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGTERM)
    until = time.monotonic() + _GRACE_S
    # One that a driver holds cannot be killed, and is left.
    while (program.poll() is None or _members(program.pid, folder)) and time.monotonic() < until + _GRACE_S:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                program.kill()
                for each in _members(program.pid, folder):
                    os.kill(each, signal.SIGKILL)
        time.sleep(_POLL_S)


def _members(session: int, folder: str) -> list[int]:
    """Return the processes of a run that still run; where there is no /proc, none."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of_session = (each / "stat").read_text().rpartition(") ")[2].split()[:4]
            if state not in "ZX" and (int(of_session) == session or folder.encode() in (each / "environ").read_bytes()):
                found.append(int(each.name))
    return found


def _memory(processes: Sequence[int]) -> int:
    """Return the bytes that some processes use, with their part of what they share."""
    total = 0
    for each in processes:
        with suppress(OSError, IndexError):
            total += 1024 * int(Path(f"/proc/{each}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
    return total
