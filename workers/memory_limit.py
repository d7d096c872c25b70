"""Measures a worker's private memory, and finds out whether the kernel killed it because memory ran out.

`PrivateMemory` (data path: in the worker, before each task if there is a memory limit) counts anonymous memory mapped
by this process: what Python, its libraries and the dataset allocated, but neither ring pages nor files.

`MemoryKills` (in the main process, at a worker's start and at its death) finds out whether a SIGKILL came from the
out-of-memory killer or from outside. The kernel counts its kills in the control group of the killed process. The
counter covers all processes of the group, so the kill of another process is attributed to this worker. Where there is
no counter (macOS, no memory controller, a kernel before 4.13), memory is assumed not to have run out.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from asyncloader.workers.ipc.segment import memory_groups, numbers_in

if sys.platform != "win32":
    import resource

_PAGE = mmap.PAGESIZE


class PrivateMemory:
    """Measures the growth of private memory since its creation. One system call (2 microseconds) per measurement."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # macOS: only the peak can be read cheaply
            self._fd = -1
        # A forked worker begins with all memory of its parent, so only the growth says anything.
        self._begun = self._now()

    def growth(self) -> int:
        """Return the growth of private memory in bytes; negative if it has shrunk."""
        return self._now() - self._begun

    def _now(self) -> int:
        if self._fd < 0:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else most * 1024
        # The kernel writes the numbers anew for each read at offset 0; the file stays open, which saves two system
        # calls.
        _, resident, shared, *_ = os.pread(self._fd, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE


def private_bytes(pid: int) -> int:
    """Return the memory of a process that it shares with no other, its parent's included; 0 where that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


class MemoryKills:
    """Counts the out-of-memory kills in the control group of process `pid` from now on, by reading small files."""

    def __init__(self, pid: int) -> None:
        # In a container the group's path may not be visible: its nearest visible ancestor counts, which includes the
        # counts of its descendants (in v2).
        counters = [group / name for group in memory_groups(pid) for name in ("memory.events", "memory.oom_control")]
        self._counter = next((each for each in counters if "oom_kill" in numbers_in(each)), None)
        self._begun = self._count()

    def _count(self) -> int:
        return 0 if self._counter is None else numbers_in(self._counter).get("oom_kill", 0)

    def describe(self) -> str:
        """Return a sentence about the kills for an error message; empty if there were none, or no counter."""
        # Complete at a worker's death: the kernel counts a kill before the signal arrives.
        kills = self._count() - self._begun
        if kills <= 0:
            return ""
        return f"Memory ran out: {self._counter} counts {kills} out-of-memory kill{'s'[: kills - 1]} since it began."
