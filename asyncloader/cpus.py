"""Counts the CPUs that this process may use, and limits a thread's torch computations to one core.

Data path: none. The count is read for warnings and `explain`; `use_one_core` runs first in the threads of stages.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch


def usable_cpus() -> int:
    """CPUs that this process may use: the smaller of its affinity and its control groups' quota."""
    quota = cpu_quota()
    return affinity() if quota is None else max(1, min(affinity(), quota))


def affinity() -> int:
    """CPUs that the process is bound to."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_limit() -> float:
    """CPU seconds per second that this process may use: as `usable_cpus`, a quota not rounded."""
    return min(affinity(), _quota() or float("inf"))


def busy_seconds() -> float | None:
    """CPU seconds since the machine started in which the CPUs that this process is bound to were busy, for any process;
    None where the kernel does not report them.
    """
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        bound = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = 0
    for name, *counts in map(str.split, lines):
        if name in bound:
            user, nice, system, _idle, _waiting, *interrupts = map(int, counts)
            ticks += user + nice + system + sum(interrupts[:2])
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_quota() -> int | None:
    """The tightest CPU quota of this process's control groups in whole CPUs, rounded up; None without a quota."""
    quota = _quota()
    return None if quota is None else max(1, math.ceil(quota))


def _quota() -> float | None:
    quotas: list[float] = []
    for group in _cpu_groups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:
                quota = (group / "cpu.cfs_quota_us").read_text().strip()
                period = (group / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cpu_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    groups: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = root if not controllers else root / controllers
        if not controllers or "cpu" in controllers.split(","):
            group = top / path.lstrip("/")
            groups += [p for p in (group, *group.parents) if p == top or top in p.parents]
    return groups


def use_one_core() -> None:
    """Make torch compute single-threaded in this thread. No effect if torch does not use OpenMP.

    torch spreads computations, copies included, over all cores. In a thread beside the training loop those cores would
    be taken from the loop and from the workers. `torch.set_num_threads` is not usable here: it also changes the
    default for threads that have not computed yet, possibly the caller's.
    """
    # a thread's default is set when it first computes: do that now, so that it does not overwrite ours
    torch.get_num_threads()
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    with suppress(OSError, AttributeError):
        # torch's library is loaded already, and resolves to the OpenMP that torch itself uses, if there are several.
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_set_num_threads(ctypes.c_int(1))
