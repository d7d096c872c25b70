"""Real memory, in forked processes: tens of megabytes, so that the process's other memory does not matter."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import pytest

from asyncloader.workers.ipc import segment
from asyncloader.workers.memory_limit import PrivateMemory
from tests.unit.workers.in_child import in_child

MEGA = 1 << 20
MUCH = 64 * MEGA
LITTLE = 16 * MEGA

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counted is what Linux's /proc tells")


def touched(nbytes: int) -> mmap.mmap:
    """Return private memory fresh from the system. (An allocator may return an old block, which is no growth.)"""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch(memory)
    return memory


def touch(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1


def _grown_and_freed() -> tuple[int, int, int]:
    footprint = PrivateMemory()
    begun = footprint.growth()
    memory = touched(MUCH)
    grown = footprint.growth()
    memory.close()
    return begun, grown, footprint.growth()


@linux
def test_private_memory_counts_while_it_is_there() -> None:
    """Growth is 0 at the beginning, then the memory that was allocated and touched, and 0 again once that is freed."""
    begun, grown, freed = in_child(_grown_and_freed).result
    assert abs(begun) < LITTLE
    assert MUCH - LITTLE < grown < MUCH + LITTLE
    assert abs(freed) < LITTLE


def _shared() -> tuple[int, int]:
    fd = segment.create(MUCH)
    segment.reserve(fd, 0, MUCH)
    footprint = PrivateMemory()
    memory = segment.map_segment(fd, MUCH)
    touch(memory)
    shared = footprint.growth()
    with touched(MUCH):
        return shared, footprint.growth()


@linux
def test_shared_memory_does_not_count() -> None:
    """A ring belongs to the loader: its pages are no growth, and hide none."""
    shared, both = in_child(_shared).result
    assert abs(shared) < LITTLE
    assert MUCH - LITTLE < both < MUCH + LITTLE


def _inherited(memory: mmap.mmap) -> tuple[int, int]:
    footprint = PrivateMemory()
    begun = footprint.growth()
    touch(memory)  # copied on write
    return begun, footprint.growth()


@linux
def test_what_the_parent_had_does_not_count() -> None:
    """A forked worker begins with all of its parent's memory; that is no growth, even when it is written to."""
    with touched(MUCH) as memory:
        begun, after = in_child(_inherited, memory).result
    assert abs(begun) < LITTLE
    assert abs(after) < LITTLE


def _without_proc() -> tuple[int, int]:
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return opened(path, *args, **options)

    os.open = refuse
    try:
        footprint = PrivateMemory()
    finally:
        os.open = opened
    begun = footprint.growth()
    with touched(4 * MUCH):
        pass
    return begun, footprint.growth()


def test_without_proc_the_most_that_there_was_tells() -> None:
    """Without /proc (macOS) growth beyond the peak is still seen."""
    begun, grown = in_child(_without_proc).result
    assert begun >= 0
    assert grown > 2 * MUCH
