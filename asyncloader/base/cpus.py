"""Counts the CPUs that this process may use, and limits a thread's torch computations to one core.

Data path: none. The count is read for warnings and `explain`; `use_one_core` runs first in the threads of stages.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import torch

_OWN_GROUPS, _GROUPS = "/proc/self/cgroup", "/sys/fs/cgroup"


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
    groups = _cpu_groups()
    limits = [text.split() for text in _texts([f"{group}/cpu.max" for group in groups])]
    # Groups of the older version have two files.
    older = [group for group, limit in zip(groups, limits, strict=True) if not limit]
    quotas = _texts([f"{group}/cpu.cfs_quota_us" for group in older])
    periods = _texts([f"{group}/cpu.cfs_period_us" for group in older])
    found: list[float] = []
    for limit in (*limits, *zip(quotas, periods, strict=True)):
        with suppress(ValueError, ArithmeticError):  # "max", or whatever a container shows in its place
            quota, period = map(int, limit)
            if (cpus := quota / period) > 0:  # -1: no quota
                found.append(cpus)
    return min(found, default=None)


def _cpu_groups() -> list[str]:
    groups: list[str] = []
    for line in _texts([_OWN_GROUPS])[0].splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            # The group itself, and those above it.
            names = [f"{_GROUPS}/{controllers}" if controllers else _GROUPS, *filter(None, path.split("/"))]
            groups += ["/".join(names[:depth]) for depth in range(len(names), 0, -1)]
    return groups


def _texts(paths: Iterable[str]) -> list[str]:
    """The texts of small files of the kernel's; empty where there is none."""
    texts: list[str] = []
    # Without pathlib and text files: a loader's constructor reads six, and this takes a fifth of the time.
    for path in paths:
        try:
            with FileIO(path) as file:
                texts.append(file.readall().decode())
        except (OSError, ValueError):
            texts.append("")
    return texts


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
