from __future__ import annotations

import ctypes
import mmap
from collections import deque

import pytest
import torch

from asyncloader.workers.memory.ring import Anchor, Lease, make_anchor, make_lease


def memory() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


def test_anchor_is_a_window() -> None:
    """The anchor reads and writes exactly its range of the memory."""
    base = memory()
    base[:8] = b"abcdefgh"
    anchor = make_anchor(base, 2, 3)
    assert anchor.raw == b"cde"
    ctypes.memset(anchor, ord("x"), 3)
    assert base[:8] == b"abxxxfgh"


def test_anchor_keeps_the_mapping() -> None:
    """The memory is mapped as long as the anchor lives, even if nothing else refers to it."""
    base = memory()
    base[0] = 9
    anchor = make_anchor(base, 0, 10)
    del base
    assert anchor.raw[0] == 9


@pytest.mark.parametrize(("offset", "nbytes"), [(4090, 7), (4097, 1), (0, 4097)])
def test_anchor_stays_inside_the_memory(offset: int, nbytes: int) -> None:
    """A range beyond the memory is refused, not read."""
    with pytest.raises(ValueError, match=r"[Bb]uffer|offset"):
        make_anchor(memory(), offset, nbytes)


def test_lease_tells_once_what_was_released() -> None:
    """When the last user of the anchor is freed, the lease itself is reported, with its slot."""
    released: deque[Lease] = deque()
    anchor = make_anchor(memory(), 0, 16)
    lease = make_lease(anchor, released.append, slot=3)
    tensor = torch.frombuffer(anchor, dtype=torch.int32)
    del anchor
    assert not released
    del tensor
    assert list(released) == [lease]
    assert (lease.slot, lease()) == (3, None)


def test_a_dropped_lease_tells_nothing() -> None:
    """If the lease was dropped before, the release is not reported."""
    released: deque[Lease] = deque()
    anchor: Anchor = make_anchor(memory(), 0, 16)
    lease = make_lease(anchor, released.append, 0)
    del lease, anchor
    assert not released
