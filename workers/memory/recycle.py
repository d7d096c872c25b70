"""Reuses the memory of large batches that are collated in the consumer's own process.

Data path: without workers: fetch -> inline_collate -> [recycle] -> consumer.

An allocator returns large blocks (over 32 MiB in glibc) to the system with every `free`. The next batch would get them
page by page and zeroed: 2 GB/s instead of 20. So large batches are stacked into memory that is kept. The
consumer's hold on it is a lease, as on a ring's slot.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections import deque

from asyncloader.workers.memory.layout import PAGE, align
from asyncloader.workers.memory.ring import Anchor, Lease, make_anchor, make_lease

LARGE = 32 << 20
"""Size from which on tensors are recycled: glibc's `DEFAULT_MMAP_THRESHOLD_MAX`. `malloc` keeps smaller blocks."""

_KEPT = 2
"""Free blocks that are kept: a consumer holds one batch while the next is made."""


class Recycler:
    """Hands out blocks of private memory, and reuses each once its last view has died. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._leases: dict[int, tuple[Lease, mmap.mmap]] = {}
        self._released: deque[Lease] = deque()
        self._count = 0

    def take(self, nbytes: int) -> Anchor:
        """Return a block of `nbytes`, with arbitrary content. It is reused once the anchor dies.

        Raises:
            MemoryError: the system has no memory for the block.
        """
        wanted = align(nbytes, PAGE)
        # The callback of a lease does not take it: it only appends, in whatever thread the last view dies, which may
        # hold the lock at that moment.
        with self._lock:
            while self._released:
                self._free.append(self._leases.pop(self._released.popleft().slot)[1])
            # Of the same size only: in a larger block a small batch would keep more memory than it needs.
            memory = next((block for block in self._free if len(block) == wanted), None)
            if memory is None:
                memory = _allocate(wanted)
            else:
                self._free.remove(memory)
            # The oldest go, such as those of a batch size that comes no more.
            del self._free[:-_KEPT]
            anchor = make_anchor(memory, 0, nbytes)
            # A new number for each lease: a block that is used again has another lease than before.
            self._count += 1
            self._leases[self._count] = make_lease(anchor, self._released.append, self._count), memory
        return anchor


def _allocate(nbytes: int) -> mmap.mmap:
    # Copied on write in a forked child; Windows has neither forks nor flags.
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        memory = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(f"no memory for a batch of {nbytes:,} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # the first write takes 4 instead of 17 ms for 38 MB
    return memory
