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

from asyncloader.workers.memory.segment import memory_groups

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


_COUNTER_FILES = "memory.events", "memory.oom_control"  # of v2, of v1


class MemoryKills:
    """Counts the out-of-memory kills in a process's control group since its creation, by reading small files.

    Args:
        groups: the directories of the process's control group and of its ancestors, which include the counts of their
            descendants (in v2).
    """

    def __init__(self, groups: list[Path]) -> None:
        self._counter, self._begun = _find_counter(groups)

    @classmethod
    def of(cls, pid: int) -> MemoryKills:
        """Count the kills in the control group of process `pid` from now on."""
        return cls(memory_groups(pid))

    def describe(self) -> str:
        """Return a sentence about the kills for an error message; empty if there were none, or no counter."""
        # Complete at a worker's death: the kernel counts a kill before the signal arrives.
        kills = 0 if self._counter is None else (_kills(self._counter) or 0) - self._begun
        if kills <= 0:
            return ""
        return f"Memory ran out: {self._counter} counts {kills} out-of-memory kill{'s'[: kills - 1]} since it began."


def _find_counter(groups: list[Path]) -> tuple[Path | None, int]:
    """Return the first file that counts kills, and its count now; None and 0 where no file does."""
    # In a container the group's path may not be visible: its nearest visible ancestor counts.
    for group in groups:
        for name in _COUNTER_FILES:
            counter = group / name
            if os.access(counter, os.R_OK) and (kills := _kills(counter)) is not None:
                return counter, kills
    return None, 0


def _kills(counter: Path) -> int | None:
    try:
        for line in counter.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
