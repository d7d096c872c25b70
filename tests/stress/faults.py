"""The faults themselves: those that a dataset causes in its worker, and the main process in its workers and itself.

A fault in a worker must know whether it has struck already, or no retry would ever survive it. The worker's memory is
lost with the worker. So each visit of the fatal sample makes a file, exclusively, in the case's folder: the visits are
counted across processes, however these end.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import select
import signal
import threading
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

from tests.stress.schedule import Fault

LET_GO = threading.Event()
"""Ends the calls that hang in a worker thread, which nothing else can end."""
HANG_S = 6.0
"""Seconds after which they end by themselves: more than a loader waits before it gives them up."""

GIVEN_UP: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that hung. What they do afterwards is of no consequence, so no fault may be spent on it."""

SECOND = "second epoch"
"""A file of this name in the case's folder: the second epoch has begun."""


class Rotten(Exception):
    """The error of a bad sample."""


def _raise_rotten(index: int) -> NoReturn:
    raise Rotten(f"sample {index} is rotten")


def _raise_memory(index: int) -> NoReturn:
    raise MemoryError(f"no memory for sample {index}")


def _raise_key(index: int) -> NoReturn:
    raise KeyError(index)


ERRORS = ((Rotten, _raise_rotten), (MemoryError, _raise_memory), (KeyError, _raise_key))
"""The errors of a fault of kind "raise", by its number: the class, and a function that raises it."""


class FaultPlan:
    """A dataset's faults. Sent to the workers with it.

    Args:
        folder: the case's own.
        faults: by sample index.
    """

    def __init__(self, folder: str, faults: dict[int, list[Fault]]) -> None:
        self.folder = folder
        self._faults = faults

    def visit(self, index: int) -> None:
        """The sample is being made: strike if it is to be struck."""
        faults = self._faults.get(index)
        if faults is None or threading.current_thread() in GIVEN_UP:
            return
        epoch = int(Path(self.folder, SECOND).exists())
        for number, fault in enumerate(faults):
            if fault.epoch == epoch and self._due(index, number, fault):
                _strike(fault, index)

    def _due(self, index: int, number: int, fault: Fault) -> bool:
        visit = 0
        while True:
            try:
                Path(self.folder, f"visit {index} {number} {visit}").touch(exist_ok=False)
            except FileExistsError:
                visit += 1
                continue
            return not fault.strikes or visit < fault.strikes

    def struck(self, kinds: tuple[str, ...]) -> int:
        """How often faults of these kinds have struck so far."""
        total = 0
        for index, faults in self._faults.items():
            for number, fault in enumerate(faults):
                visits = len(list(Path(self.folder).glob(f"visit {index} {number} *")))
                total += (min(visits, fault.strikes) if fault.strikes else visits) if fault.kind in kinds else 0
        return total


def _strike(fault: Fault, index: int) -> None:
    if fault.kind == "kill":
        signal.signal(fault.number, signal.SIG_DFL) if fault.number != signal.SIGKILL else None
        os.kill(os.getpid(), fault.number)
    elif fault.kind == "exit":
        os._exit(fault.number)
    elif fault.kind == "grandchild":
        _leave_a_child()
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "hang":
        threading.Event().wait()
    elif fault.kind == "hang in a thread":
        LET_GO.wait(HANG_S)
        GIVEN_UP.add(threading.current_thread())
    elif fault.kind == "hang in C":
        libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL: no Python code runs in this process any more
        while True:
            libc.pause()
    elif fault.kind == "raise":
        ERRORS[fault.number][1](index)
    elif fault.kind == "starve":
        which, limit = resource.RLIMIT_FSIZE, fault.number
        if limit < 0:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            which, limit = resource.RLIMIT_AS, pages * resource.getpagesize() + (1 << 20)
        resource.setrlimit(which, (limit, resource.getrlimit(which)[1]))
    else:
        raise AssertionError(fault)


def _leave_a_child() -> None:
    """A process that has all that the worker had open, and lives as long as the case's main process."""
    main = os.getsid(0)  # the case's process began the session
    pidfd = os.pidfd_open(main)
    if os.fork() == 0:
        select.select([pidfd], [], [])
        os._exit(0)
    os.close(pidfd)


# ------------------------------------------------------------------------------------------- from the main process


def workers_now() -> list[int]:
    """Pids of the workers of this process's loaders that run now, however they were started.

    Those that begin right now, and have not got their name yet, only if they are children of this process.
    """
    session, me = os.getsid(0), os.getpid()
    beginning = {process.pid for process in multiprocessing.active_children()}
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                state, parent, _, its_session = rest.split()[:4]
                pid = int(entry.name)
                named = command == "pt_data_worker" or (int(parent) == me and pid in beginning)
                if int(its_session) == session and state != "Z" and named:
                    found.append(pid)
    return sorted(found)


def kill_workers(fault: Fault) -> int:
    """Strike one worker or all with a signal; how many were struck."""
    pids = workers_now()
    if fault.kind != "kill all workers":
        pids = pids[fault.worker % len(pids) :][:1] if pids else []
    number = signal.SIGSTOP if fault.kind == "stop worker" else fault.number
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


@contextlib.contextmanager
def limited(fault: Fault) -> Generator[None]:
    """This process may open no more descriptors ("descriptors") or make no larger files and segments ("disk")."""
    if fault.kind == "descriptors":
        which, limit = resource.RLIMIT_NOFILE, 1 + max(int(link.name) for link in Path("/proc/self/fd").iterdir())
    else:
        which, limit = resource.RLIMIT_FSIZE, 1 << 20
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def plan_of(folder: str, placed: list[tuple[int, Fault]]) -> FaultPlan:
    """The plan of faults whose samples are known."""
    faults: dict[int, list[Any]] = {}
    for index, fault in placed:
        faults.setdefault(index, []).append(fault)
    return FaultPlan(folder, faults)
