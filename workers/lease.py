"""The consumer's hold on a slot: ends when the last tensor that looks into the slot is gone.

Data path: ring -> [lease] -> consumer, and back to the ring when the consumer lets go.

The *anchor* of a lease is one ctypes array laid over the slot. Every tensor of the batch is built on the anchor and
keeps it alive, also through slices, `detach()`, `.numpy()` and whatever else shares its storage; so the anchor dies
exactly when nobody can look any more. A weak reference to it tells.

Guarantees: the weak reference's callback is `deque.append` itself. It takes no lock, runs no Python code, and may
therefore run in any thread, inside the garbage collector, or after a fork (where it appends to the child's copy, which
nobody reads).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["Anchor", "Lease", "make_anchor", "make_lease"]

Anchor = ctypes.Array[ctypes.c_char]


@lru_cache(maxsize=256)
def _array_type(nbytes: int) -> type[Anchor]:
    return ctypes.c_char * nbytes


def make_anchor(memory: mmap.mmap, offset: int, nbytes: int) -> Anchor:
    """Lay an array over ``memory[offset : offset + nbytes]``. It keeps the mapping alive."""
    return _array_type(nbytes).from_buffer(memory, offset)


class Lease(weakref.ref[Any]):
    """A weak reference to an anchor that knows its slot, and which use of the slot it was made for."""

    __slots__ = ("generation", "slot")

    slot: int
    generation: int


def make_lease(anchor: Anchor, released: Callable[[Any], None], slot: int, generation: int) -> Lease:
    """A lease on the anchor; `released` is called with it when the anchor dies."""
    lease = Lease(anchor, released)
    lease.slot = slot
    lease.generation = generation
    return lease
