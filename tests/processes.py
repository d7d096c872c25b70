"""Finds the children of processes in Linux's /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from tests import early_fork


def children_of(pid: int) -> list[int]:
    """Return the children of a process, of all of its threads, zombies included.

    Raises:
        FileNotFoundError: the process does not exist.
    """
    tasks = Path(f"/proc/{pid}/task")
    while True:
        threads = set(tasks.iterdir())
        if not any((thread / "children").exists() for thread in threads):
            return _children_by_parent(pid)  # a kernel built without those lists
        with suppress(FileNotFoundError, ProcessLookupError):
            lists = [(thread / "children").read_text() for thread in threads]
            if threads <= set(tasks.iterdir()):
                return [int(child) for children in lists for child in children.split()]
        # A thread ended between both reads: its children are now another's, whose list may have been read before.


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants, with those that have ended and were waited for."""
    # Ticks are added up before they are divided: rounded seconds would depend on which process has them.
    return _cpu_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    with suppress(OSError):  # it has ended
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, times)) + sum(map(_cpu_ticks, children_of(pid)))
    return 0


def _children_by_parent(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended since it was listed
                # pid (command) state ppid ...: the command may hold brackets, so split after the last bracket
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    found.append(int(entry.name))
    return found


def helpers_of_multiprocessing() -> tuple[set[int], set[int]]:
    """Return pids and descriptors of the resource tracker and the fork server, also of one that waits to be used. They
    live as long as this process.
    """
    servers: list[Any] = [forkserver._forkserver, resource_tracker._resource_tracker]
    values = [vars(server) for server in servers]
    pids = {v[name] for v in values for name in ("_forkserver_pid", "_pid") if v.get(name) is not None}
    fds = {v[name] for v in values for name in ("_forkserver_alive_fd", "_fd") if v.get(name) is not None}
    early_pids, early_fds = early_fork.waiting()
    return pids | early_pids, fds | early_fds


def own_children() -> list[int]:
    """Return this process's children, except for those helpers. The children of a fork server are not among them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # reaps no process
    except ChildProcessError:
        return []  # It has no children. Most tests end so, and reading /proc takes a millisecond, twice per test.
    helpers, _ = helpers_of_multiprocessing()
    return [pid for pid in children_of(os.getpid()) if pid not in helpers]
