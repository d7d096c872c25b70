"""How many CPUs this process may use: its affinity, and its control groups' quota.

Data path: none; read for warnings and `explain`.

A thread of the loader's computes on one core.

Data path: none; the first thing that a stage's thread does.

torch splits what it computes, copies included, among all cores: in a thread beside the training loop they are taken
from that loop and from the workers. `torch.set_num_threads` would be the wrong call: it also sets what threads begin
with that have not computed yet, the caller's own among them.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

__all__ = [
    "affinity",
    "cpu_quota",
    "usable_cpus",
    "use_one_core",
]


def usable_cpus() -> int:
    """CPUs that this process may use: affinity, and the control group's quota."""
    quota = cpu_quota()
    return affinity() if quota is None else max(1, min(affinity(), quota))


def affinity() -> int:
    """CPUs that the process is bound to."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota() -> int | None:
    """The tightest CPU quota of this process's control groups in whole CPUs, rounded up; None when there is none."""
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
    return max(1, math.ceil(min(quotas))) if quotas else None


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
    """From now on torch computes in this thread alone what it is asked for in this thread. Where torch has another
    thread pool than OpenMP's, nothing happens.
    """
    torch.get_num_threads()  # a thread gets its number when it first computes: now, and not over ours
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    with suppress(OSError, AttributeError):
        # It is loaded already, and finds the OpenMP that torch itself uses, if there are several.
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_set_num_threads(ctypes.c_int(1))
