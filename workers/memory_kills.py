"""Whether the kernel killed for want of memory: control groups keep an account of it.

Data path: beside a worker's start and its death.

SIGKILL does not tell who sent it: the kernel, because a task took too much memory, or somebody else, for reasons that
are no task's. The kernel counts its own kills in the control group of the process that it kills, and does so before the
signal arrives. The account is one for all processes of the group, so a kill of another one is taken for this process's;
where there is no account (macOS, no memory controller, a kernel before 4.13), memory is assumed not to have run out.
"""

from __future__ import annotations

from pathlib import Path

from asyncloader.workers.segment import memory_groups

__all__ = ["MemoryKills"]

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

    def words(self) -> str:
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
