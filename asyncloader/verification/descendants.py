"""Finds and ends all processes that come from a process, whatever session, environment or parent they have.

Data path: none; between `interpreter` and `server`.

Linux only; elsewhere nothing is found, and `interpreter` ends the sessions that it knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_SET_CHILD_SUBREAPER = 36  # of Linux' prctl
_ENDING_S = 5.0


def adopt_orphans() -> None:
    """Become the parent of the descendants whose parents end, so that `descendants` finds them."""
    with contextlib.suppress(OSError, AttributeError):  # no prctl on this system
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Return the processes that come from a process that has called `adopt_orphans`, without itself."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children[int(parent)].append(int(entry.name))
    found: set[int] = set()
    left = [pid]
    while left:
        new = set(children[left.pop()]) - found
        found |= new
        left += new
    return found - {pid}


def marked(mark: bytes) -> set[int]:
    """Return the processes that have inherited an environment with this entry."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "ZX" and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def end_all(pids: Iterable[int]) -> None:
    """Kill processes, and wait until they have ended, for some seconds at most."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                try:
                    select.select([fd], [], [], _ENDING_S)
                finally:
                    os.close(fd)
