"""Keeps memory pages and threads near the device, on machines with several NUMA nodes. Otherwise does nothing.

Data path: ring -> device_stage: lock -> [numa].

A copy from another node's memory crosses the link between the nodes, which other copies need, too. Sources: Linux's
sysfs-bus-pci (`numa_node`), mbind(2), sched_setaffinity(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_MOST_NODES = 64  # one word of a mask


def node_of(pci: str) -> int | None:
    """The node of the device at this PCI address ("0000:3B:00.0"); None if unknown, or the machine has one."""
    try:
        node = int((_PCI / pci.lower() / "numa_node").read_text())
        several = len(list(_NODES.glob("node[0-9]*"))) > 1
    except (OSError, ValueError):
        return None
    return node if several and 0 <= node < _MOST_NODES else None


def stay_near(node: int | None) -> None:
    """Bind this thread to the node's cores, as far as it may run there. No other thread is affected."""
    if node is None:
        return
    with suppress(OSError, ValueError, AttributeError):
        near = os.sched_getaffinity(0) & _cores((_NODES / f"node{node}" / "cpulist").read_text())
        if near:
            os.sched_setaffinity(0, near)


def prefer_node(address: int, nbytes: int, node: int | None) -> None:
    """Let pages of this range that do not exist yet be allocated on the node, as long as it has free memory."""
    number = _MBIND.get(platform.machine())
    if node is None or number is None or platform.system() != "Linux":
        return
    mask = ctypes.c_ulong(1 << node)
    # The kernel reads one bit less than the length that it is given, hence `_MOST_NODES + 1`.
    ctypes.CDLL(None).syscall(  # if it fails, the kernel chooses as by default
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_MOST_NODES + 1),
        ctypes.c_uint(0),
    )


def _cores(text: str) -> set[int]:
    """The numbers of a list like "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
