r"""Manages one worker's ring: a fixed number of slots in one shared segment, and the consumer's leases on them.

Data path: scheduler -> worker -> [ring] -> reorder -> consumer, and back to the ring when the consumer's views have
died.

States of a slot, all of them known to the main process alone:

    free --take()--> assigned --lend()--> leased --last view dies--> free
                         \----give_back() (copied out, nothing in it, void)----> free
    leased --retire()--> retired: never used again (a forked child may still look into it)

The worker learns its slot with the task and writes only there; it keeps no list of slots. So a worker that is killed
cannot leave a lock held or a list half changed.

*No deadlock by construction.* A ring has more slots than credits. A task holds at most one slot from its assignment
until its batch is delivered, so tasks hold at most `credits` slots. `may_lend` is true only while fewer than
``slots - credits`` slots are leased or retired; otherwise the caller copies the batch out and gives the slot back at
once. Hence a free slot is left for every task that the credits allow, however many batches the consumer keeps. (While
an abandoned epoch still drains, a task may find no free slot nevertheless; it writes to a one-off segment.)

Leases: the *anchor* of a lease is one ctypes array laid over the slot. Every tensor of the batch is built on the anchor
and keeps it alive, also through slices, `detach()`, `.numpy()` and whatever else shares its storage. So the anchor dies
exactly when the last view dies, and a `Lease`, a weak reference to it, reports that.

Threads: `take` and `give_back` may be called by the loop thread while the consumer thread calls `lend` and `may_lend`.
They share `_free` alone; everything about leases belongs to the consumer's side.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.process_hooks import before_fork
from asyncloader.workers.ipc import segment
from asyncloader.workers.ipc.layout import PAGE, align

LOCK_BYTES = 1 << 30
"""Bytes that are page-locked by one call, unless a slot is larger."""


class Ring:
    """The main process's side of a ring.

    Args:
        slots: number of slots.
        slot_bytes: size of each, a multiple of the page.
        credits: slots that tasks may hold at a time, less than `slots`.
        number: distinguishes this ring from the worker's earlier rings.

    Raises:
        RingMemoryError: there is no memory for a ring of this size.
    """

    fd: int | None = None
    """The segment's descriptor; None before it is created and after `close_fd`."""

    def __init__(self, slots: int, slot_bytes: int, credits: int, number: int = 0) -> None:
        if not 0 < credits < slots:
            raise ValueError(f"a ring needs more slots than credits, got slots={slots}, credits={credits}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.credits = credits
        self.number = number
        self._owner = os.getpid()
        self.fd = segment.create(slots * slot_bytes)
        try:
            self._memory = segment.map_segment(self.fd, slots * slot_bytes)
        except BaseException:
            self.close_fd()
            raise
        # Last in, first out: the slot freed last is the warmest in the caches, and slots that are never needed are
        # never touched. The loop thread and the consumer thread share the deque without a lock: `append` and `pop` are
        # atomic.
        self._free: deque[int] = deque(reversed(range(slots)))
        self._leases: dict[int, Lease] = {}  # slot -> its current lease
        self._released: deque[Lease] = deque()
        self.retired: set[int] = set()
        """Slots that are never used again."""
        # The weak references' callback. A built-in method, not a function of ours: it takes no lock and runs no Python
        # code, so it may run in any thread, inside the garbage collector, or in a forked child, where it appends to a
        # copy that is never read.
        self._append_released = self._released.append
        self.locked = False
        """Whether its pages are locked, see `lock_pages`."""
        # Last: another thread may fork at any moment, and its hook reads the fields above.
        _live_rings.add(self)

    @property
    def nbytes(self) -> int:
        """Size of the whole ring (virtual: a slot takes memory when it is first used)."""
        return self.slots * self.slot_bytes

    @property
    def leased(self) -> int:
        """Slots that the consumer holds, as far as is known."""
        return len(self._leases)

    @property
    def in_use(self) -> int:
        """Slots that are assigned or leased, as far as is known."""
        return self.slots - len(self._free) - len(self.retired)

    @property
    def worn(self) -> bool:
        """Whether retired slots fill the headroom: no slot can ever be lent again, so the ring should be replaced."""
        return len(self.retired) >= self.slots - self.credits

    @property
    def idle(self) -> bool:
        """Whether no slot is assigned, leased or retired."""
        self.reclaim()
        return len(self._free) == self.slots

    @property
    def reusable(self) -> bool:
        """Whether the ring may be given to another worker: no slot is assigned. Leased slots stay leased.

        Any thread.
        """
        # At the same time, the thread that delivers may move slots from leased to free, and a thread that forks from
        # leased to retired. In this order a moved slot is missed, and the ring refused, rather than counted twice.
        there = len(self._free)
        there += len(self.retired)
        there += len(self._leases)
        return there == self.slots and not self.worn

    def __repr__(self) -> str:
        return (
            f"<Ring {self.number}: {self.slots} slots x {self.slot_bytes} bytes, "
            f"{len(self._free)} free, {len(self._leases)} leased, {len(self.retired)} retired>"
        )

    def close_fd(self) -> None:
        """Close the descriptor, once it will be sent to no other worker. The mapping stays."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # Only in the owner: a forked child may have closed the descriptor and reused its number.
        if not exiting() and self.fd is not None and os.getpid() == self._owner:
            self.close_fd()

    def lock_pages(self, lock: Callable[[int, int], Callable[[], None]]) -> None:
        """Allocate all pages of the ring, and page-lock them.

        Args:
            lock: locks a range of memory, given its address and its length in bytes; returns a function that unlocks
                it, and is called before the memory is unmapped, once the last view has died. A ring of more than
                `LOCK_BYTES` is locked in several ranges.

        Raises:
            RingMemoryError: there is no memory for the pages.
            Exception: whatever `lock` raises.
        """
        address = ctypes.addressof(make_anchor(self._memory, 0, self.nbytes))
        segment.populate(self._memory, address)
        unlocks: list[Callable[[], None]] = []
        # In parts of whole slots, so that no batch crosses a boundary; some kernels lock at most 2 GB at a time.
        part = max(1, LOCK_BYTES // self.slot_bytes) * self.slot_bytes
        try:
            # A loop, not a comprehension: if a range cannot be locked, those before it must be unlocked.
            for start in range(0, self.nbytes, part):
                unlocks.append(lock(address + start, min(part, self.nbytes - start)))  # noqa: PERF401
        except BaseException:
            _call_all(unlocks)
            raise
        # Only now, when all are locked: `watch` makes Python code run when the memory is unmapped.
        self._memory.watch(partial(_call_all, unlocks))
        self.locked = True

    # ------------------------------------------------------------------------------------- loop thread

    def take(self) -> int | None:
        """Return a free slot for a task, or None."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, slot: int) -> None:
        """Free an assigned slot that is not needed any more (nothing was written, or it was copied out)."""
        self._free.append(slot)

    # ------------------------------------------------------------------------------------- consumer thread

    def reclaim(self) -> None:
        """Free the slots whose last view has died since the last call."""
        released, leases, free = self._released, self._leases, self._free
        while released:
            slot = released[0].slot
            # A lease that is not the current one is stale: the slot was retired, or has been lent again since.
            if leases.get(slot) is released[0]:
                # No function is called in this block, so Ctrl-C cannot strike in between.
                del leases[slot]
                free += (slot,)
            # Removed last: after Ctrl-C the entry is met again, and is stale if its slot was freed.
            del released[0]

    def may_lend(self) -> bool:
        """Whether a slot may be lent; if not, the batch must be copied out."""
        # Tested before the call: usually nothing was released, and this runs for every batch.
        if self._released:
            self.reclaim()
        return len(self._leases) + len(self.retired) < self.slots - self.credits

    def lend(self, slot: int, nbytes: int) -> Anchor:
        """Lease the first `nbytes` of an assigned slot to the consumer. The slot comes back when the anchor dies.

        Raises:
            ValueError: the slot has no such bytes, or is leased already.
        """
        # Only after a wrong answer of the worker. A second lease would free the slot while the first still views
        # it.
        if slot in self._leases:
            raise ValueError(f"a worker's answer is broken: slot {slot} of {self!r} is the consumer's already")
        if not (0 <= slot < self.slots and 0 <= nbytes <= self.slot_bytes):
            raise self._outside(slot, nbytes)
        anchor = _array_type(nbytes).from_buffer(self._memory, slot * self.slot_bytes)  # as `look`, without the call
        lease = Lease(anchor, self._append_released)  # as `make_lease`, without the call
        lease.slot = slot
        self._leases[slot] = lease
        return anchor

    def take_back(self, slot: int) -> None:
        """Undo `lend` before the view was handed out: the slot is assigned again. A no-op if it was not lent. Call it
        before `reclaim`.
        """
        # The weak reference goes with it, so the death of the anchor reports nothing.
        self._leases.pop(slot, None)

    def look(self, slot: int, nbytes: int) -> Anchor:
        """Return an anchor without a lease, to copy an assigned slot out.

        Raises:
            ValueError: the slot has no such bytes.
        """
        if not (0 <= slot < self.slots and 0 <= nbytes <= self.slot_bytes):
            raise self._outside(slot, nbytes)
        return _array_type(nbytes).from_buffer(self._memory, slot * self.slot_bytes)

    def bytes_of(self, slot: int, nbytes: int) -> memoryview:
        """Return the bytes of an assigned slot, to send them. They keep the memory mapped. Errors as `look`."""
        if not (0 <= slot < self.slots and 0 <= nbytes <= self.slot_bytes):
            raise self._outside(slot, nbytes)
        start = slot * self.slot_bytes
        return memoryview(self._memory)[start : start + nbytes]

    def _outside(self, slot: int, nbytes: int) -> ValueError:
        return ValueError(f"a worker's answer is broken: {nbytes} bytes in slot {slot} of {self!r}")

    def retire(self) -> None:
        """Retire the leased slots: after a fork the child may look into them as long as it lives."""
        # A copy: the hook runs in whichever thread forks, while the consumer thread lends and reclaims.
        for slot, lease in list(self._leases.items()):
            if lease() is None:
                continue  # the last view has died; `reclaim` will free it
            # First: `may_lend` in another thread may count the slot twice for a moment, but never misses it.
            self.retired.add(slot)
            self._leases.pop(slot, None)


def _call_all(functions: list[Callable[[], None]]) -> None:
    while functions:
        functions.pop()()


class WorkerRing:
    """The worker's side of a ring: the offset of each slot, and the allocation of its pages on first use.

    Args:
        fd: the segment's descriptor, owned by this object.
        slots: number of slots.
        slot_bytes: size of each.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self.memory = segment.map_segment(fd, slots * slot_bytes)
        self._reserved = [0] * slots  # bytes of each slot whose pages are allocated

    def offset(self, slot: int, nbytes: int) -> int:
        """Return the offset of the slot. The pages of its first `nbytes` are allocated.

        Raises:
            RingMemoryError: no memory for pages that are used for the first time.
        """
        start = slot * self.slot_bytes
        # Allocated pages stay, so this is done once for a slot, and again only for a larger batch.
        if self._reserved[slot] < nbytes:
            wanted = min(align(nbytes, PAGE), self.slot_bytes)
            segment.reserve(self.fd, start, wanted)
            self._reserved[slot] = wanted
        return start

    def __del__(self) -> None:
        # Not earlier: a task in progress may still write to a ring that has been replaced.
        os.close(self.fd)


def oneoff_anchor(fd: int, nbytes: int) -> Anchor:
    """Map a segment that holds one batch. The descriptor stays open; the memory is freed with it and the last view.

    Raises:
        ValueError: the segment is smaller than `nbytes`. (Access behind its end would be a SIGBUS.)
        RingMemoryError: no address space for it.
    """
    there = os.fstat(fd).st_size
    if not 0 < nbytes <= there:
        raise ValueError(f"a worker's answer is broken: {nbytes} bytes in a segment of {there}")
    return make_anchor(segment.map_segment(fd, nbytes), 0, nbytes)


# Rings of this process, for the fork hook. They are not closed explicitly.
_live_rings: LiveObjects[Ring] = LiveObjects()


def _retire_before_fork() -> None:
    for ring in _live_rings:
        ring.retire()


@functools.cache
def install_fork_hook() -> None:
    """Retire leased slots before every fork of this process from now on."""
    before_fork(_retire_before_fork)


Anchor = ctypes.Array[ctypes.c_char]


@lru_cache(maxsize=256)
def _array_type(nbytes: int) -> type[Anchor]:
    return ctypes.c_char * nbytes


def make_anchor(memory: mmap.mmap, offset: int, nbytes: int) -> Anchor:
    """Return an array over ``memory[offset : offset + nbytes]`` that keeps the mapping alive."""
    return _array_type(nbytes).from_buffer(memory, offset)


class Lease(weakref.ref[Any]):
    """A weak reference to an anchor, with its slot."""

    __slots__ = ("slot",)

    slot: int


def make_lease(anchor: Anchor, released: Callable[[Any], None], slot: int) -> Lease:
    """Return a lease on the anchor; `released` is called with it when the anchor dies."""
    lease = Lease(anchor, released)
    lease.slot = slot
    return lease
