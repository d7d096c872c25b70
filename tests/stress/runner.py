"""The processes of many cases: each in a fork of this process, in a session of its own, with a deadline.

This process has imported all that a case needs and runs no thread, so that a fork is cheap and safe. It reaps
all processes that a case leaves behind: workers without a parent are found by their session, and fail the case.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import pkgutil
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncloader
from tests.stress.child import run_case

DEADLINE_S = 60.0  # of a case whose workers are forked; spawned workers import torch again, one by one
GRACE_S = 15.0  # for helpers of multiprocessing, which end after their parent has ended
START_S = 60.0  # for a worker that is stopped while it starts, or begins an epoch
STACKS_S = 3.0  # before the deadline, the stacks of a case that hangs are written to its log
PR_SET_CHILD_SUBREAPER = 36


_Run = Callable[[Any, Path], dict[str, Any]]


@dataclass
class Outcome:
    """How a case ended."""

    case: Any
    problems: list[str]
    report: dict[str, Any]
    log: str
    seconds: float
    hung: bool = False


@dataclass
class _Running:
    case: Any
    pid: int
    pidfd: int
    folder: Path
    started: float
    deadline: float


def run_cases(
    cases: Iterable[Any],
    jobs: int = 2,
    deadline: float = DEADLINE_S,
    prepare: Callable[[], object] | None = None,
    run: _Run = run_case,
) -> Iterator[Outcome]:
    """Run the cases, `jobs` at a time; gives each outcome as soon as its case has ended.

    Args:
        cases: the cases.
        jobs: how many at a time.
        deadline: seconds for each.
        prepare: called in each case's process before it begins.
        run: runs a case in its folder, and returns its report.
    """
    _import_all()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    waiting = iter(cases)
    running: dict[int, _Running] = {}
    poll = select.poll()
    try:
        while True:
            while len(running) < jobs and (case := next(waiting, None)) is not None:
                one = _start(case, _seconds(case, deadline), prepare, run)
                running[one.pidfd] = one
                poll.register(one.pidfd, select.POLLIN)
            if not running:
                return
            left = min(one.deadline for one in running.values()) - time.monotonic()
            ended = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
            late = {fd for fd, one in running.items() if one.deadline <= time.monotonic()} - ended
            for fd in ended | late:
                poll.unregister(fd)
                yield _finish(running.pop(fd), hung=fd in late)
    finally:
        for one in running.values():
            _finish(one, hung=True)


def _import_all() -> None:
    """Import all of the package now: modules imported late in a run of an hour could be of another version."""
    for module in pkgutil.walk_packages(asyncloader.__path__, "asyncloader."):
        if not module.name.startswith("asyncloader.integrations"):
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(module.name)


def _seconds(case: Any, deadline: float) -> float:
    """Seconds that the case has."""
    if case.having("stop worker"):
        deadline += START_S
    return deadline if case.method in ("fork", "threads") else 2 * deadline


def _start(case: Any, seconds: float, prepare: Callable[[], object] | None, run: _Run) -> _Running:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _child(case, folder, seconds, prepare, run)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    now = time.monotonic()
    return _Running(case, pid, os.pidfd_open(pid), folder, now, now + seconds)


def _child(case: Any, folder: Path, seconds: float, prepare: Callable[[], object] | None, run: _Run) -> int:
    os.setsid()
    # `_finish` removes what is left there: multiprocessing's folder stays when a process ends by `os._exit`.
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.dump_traceback_later(max(1.0, seconds - STACKS_S), exit=False)
    if prepare is not None:
        prepare()
    report = run(case, folder)
    faulthandler.cancel_dump_traceback_later()
    (folder / "report.part").write_text(json.dumps(report))
    (folder / "report.part").rename(folder / "report.json")
    return 0


def _finish(one: _Running, *, hung: bool) -> Outcome:
    seconds = time.monotonic() - one.started
    stacks = _states(one.pid) if hung else ""
    if hung:
        _kill_session(one.pid)
    os.close(one.pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
    report: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        report = json.loads((one.folder / "report.json").read_text())
    log = ""
    with contextlib.suppress(OSError):
        log = (one.folder / "log").read_text(errors="replace")
    problems: list[str] = list(report.get("problems", []))
    if hung:
        problems.append(f"hang: no end after {seconds:.0f} s")
    elif not report:
        problems.append(f"the case's process ended with exit code {code} and without a report: {log[-1500:]}")
    problems += _orphans(one.pid)
    shutil.rmtree(one.folder, ignore_errors=True)
    return Outcome(one.case, problems, report, log + stacks, seconds, hung)


def _session(session: int) -> dict[int, tuple[str, str]]:
    """The processes of a session: state and command by pid."""
    found: dict[int, tuple[str, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                state, _, _, its_session = rest.split()[:4]
                if int(its_session) == session:
                    found[int(entry.name)] = (state, command)
    return found


def _states(session: int) -> str:
    return "".join(f"\n{pid} {state} {command}" for pid, (state, command) in _session(session).items())


def _kill_session(session: int) -> None:
    for pid in _session(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _orphans(session: int) -> list[str]:
    """Wait for the session's remaining processes; a process that does not end is killed, and reported."""
    problems: list[str] = []
    deadline = time.monotonic() + GRACE_S
    for pid, (state, command) in _session(session).items():
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                problems.append(f"orphan: {command} (pid {pid}, state {state}) outlived the case")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                select.select([pidfd], [], [], GRACE_S)
        finally:
            os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return problems
