"""How much memory of its own this process has: for workers that must not grow beyond a bound.

Data path: beside the worker's tasks, before each of them where a bound is set.

Counted is anonymous memory that is mapped here: what Python, its libraries and the dataset allocated. Pages of the
rings are not counted, nor are files. A forked worker begins with all that its parent had, so that only the growth says
something.

Whether the kernel killed for want of memory: control groups keep an account of it.

Data path: beside a worker's start and its death.

SIGKILL does not tell who sent it: the kernel, because a task took too much memory, or somebody else, for reasons that
are no task's. The kernel counts its own kills in the control group of the process that it kills, and does so before the
signal arrives. The account is one for all processes of the group, so a kill of another one is taken for this process's;
where there is no account (macOS, no memory controller, a kernel before 4.13), memory is assumed not to have run out.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from asyncloader.workers.memory.segment import memory_groups

__all__ = [
    "MemoryKills",
    "PrivateMemory",
]

_PAGE = resource.getpagesize()


class PrivateMemory:
    """Tells the growth since it was made. Costs one system call a question (2 microseconds)."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # macOS: the most that there ever was is all that can be had cheaply
            self._fd = -1
        self._begun = self._now()

    def growth(self) -> int:
        """Bytes of private memory beyond those at the beginning; negative if it has become less."""
        return self._now() - self._begun

    def _now(self) -> int:
        if self._fd < 0:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else most * 1024
        _, resident, shared, *_ = os.pread(self._fd, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE


_ACCOUNTS = "memory.events", "memory.oom_control"  # of v2, of v1


class MemoryKills:
    """Counts the out-of-memory kills in a process's control group since this was made. Some small reads each time.

    Args:
        groups: the directories of the process's own control group and of those above it, which also count what happens
            below them (in v2).
    """

    def __init__(self, groups: list[Path]) -> None:
        # In a container the path that the kernel tells may lie outside: the nearest one that is there counts.
        accounts = (group / name for group in groups for name in _ACCOUNTS)
        self._account = next((account for account in accounts if _kills(account) is not None), None)
        self._begun = self._now()

    @classmethod
    def of(cls, pid: int) -> MemoryKills:
        """Of this process, from now on."""
        return cls(memory_groups(pid))

    def describe(self) -> str:
        """What the account says, for an error's reader; empty if it says nothing, or if there is none."""
        kills = self._now() - self._begun
        if kills <= 0:
            return ""
        return f"Memory ran out: {self._account} counts {kills} out-of-memory kill{'s'[: kills - 1]} since it began."

    def _now(self) -> int:
        return 0 if self._account is None else _kills(self._account) or 0


def _kills(account: Path) -> int | None:
    try:
        for line in account.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
