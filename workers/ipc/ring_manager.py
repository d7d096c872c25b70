"""Manages the rings of one worker: sizes them by the batches seen, and replaces a ring that is too small.

Data path: scheduler -> [ring_manager, one per worker] -> worker -> ring -> consumer.

A worker starts with a small ring. A batch that does not fit comes in a one-off segment, and before its next task the
worker is sent a larger ring. The old ring is freed with its last reference, when its last task is answered and its last
lease ends; it is not closed explicitly.

How many outstanding batches find a slot depends on how large they turn out to be. The manager says how many there may
be (`credits`, `reorder_window`), and the scheduler keeps to that.

The manager knows the slot of each unanswered task, so that the slots of tasks that will never be answered (the dataset
ended, the epoch was abandoned) are freed.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from contextlib import suppress
from typing import NamedTuple, Self

from asyncloader.errors import RingMemoryError
from asyncloader.workers.ipc import segment, wire
from asyncloader.workers.ipc.layout import (
    FIRST_SLOT_BYTES,
    HEADROOM,
    PAGE,
    fit_slot_bytes,
    grown_slot_bytes,
    slot_count,
)
from asyncloader.workers.ipc.ring import Ring

CREDIT_BYTES = 256 << 20
"""Memory per ring for outstanding batches beyond the least credits, if the user set no `ring_bytes`: enough for 256
samples in flight of a megabyte each."""

RUN_AHEAD_BYTES = 64 << 20
"""Memory per ring for batches that wait for an earlier batch, if the user set no `ring_bytes`."""


class RingManager:
    """Manages the rings of one worker.

    Args:
        credits: tasks that the worker may have outstanding, as long as slots for them fit into `ring_bytes` or, without
            a bound, into `CREDIT_BYTES`.
        ring_bytes: upper bound on the ring's size; None: no bound.
        reorder_window: batches that may wait for an earlier batch, in addition to the credits. They get slots as long
            as these fit into `ring_bytes` or, without a bound, into `RUN_AHEAD_BYTES`.
        workers: number of workers with such a ring, to check that the rings of all of them fit.
        least_credits: tasks that may be outstanding however large batches are; default: `credits`.

    Raises:
        RingMemoryError: `workers` rings of `ring_bytes` exceed the memory of the machine or the control group.
    """

    def __init__(
        self,
        credits: int,
        ring_bytes: int | None,
        reorder_window: int = 0,
        workers: int = 1,
        least_credits: int | None = None,
    ) -> None:
        self.workers = workers
        """Number of workers with such a ring; their memory must suffice for all of them."""
        self._most_ahead = reorder_window
        self._least_credits = credits if least_credits is None else least_credits
        self._most_extra = credits - self._least_credits
        self._least_slots = slot_count(self._least_credits)
        self.ring_bytes = ring_bytes
        extra, ahead = self._affordable(FIRST_SLOT_BYTES if ring_bytes is None else PAGE)
        self.credits = self._least_credits + extra
        """Tasks that the worker may have outstanding, given the batch sizes seen."""
        self.reorder_window = ahead
        """Batches that may wait for an earlier batch, in addition to the credits."""
        self._slots = self._least_slots + extra + ahead
        if ring_bytes is not None:
            segment.check_room(workers * ring_bytes, f"{workers} rings of ring_bytes={ring_bytes}")
        self.ring: Ring | None = None
        self.nbytes = 0
        """Size of the newest ring, also after it was closed."""
        self.tasks: dict[tuple[int, int], tuple[Ring, int] | None] = {}
        """The unanswered tasks, by epoch and number: the slot of each; None if it has no slot."""
        self._slot_bytes = FIRST_SLOT_BYTES if ring_bytes is None else self._fixed_slot_bytes(ring_bytes)
        self._grown = True  # the first ring has to be sent
        self._inherited = False  # `ring` comes from an earlier worker, and has not been sent to this worker yet
        self._number = -1  # of the newest ring

    def too_small_for(self, nbytes: int) -> int:
        """Return 0 if batches of this size fit into the slots, or will; else the `ring_bytes` that would do."""
        if nbytes <= self._slot_bytes:
            return 0
        return self._least_slots * (-(-nbytes // PAGE) * PAGE)

    def _fixed_slot_bytes(self, ring_bytes: int) -> int:
        return max(PAGE, ring_bytes // self._slots // PAGE * PAGE)

    def replacement(self, most_bytes: int | None = None) -> Ring | None:
        """Return a ring that must be sent to the worker before its next task, or None.

        Args:
            most_bytes: of a ring with more, slots are left out; it has two at least. None: no bound.

        Raises:
            RingMemoryError: there is no memory for it, or for filling it and the rings of the other workers.
        """
        if self._inherited:
            self._inherited = False
            # Asked now, not in `successor`: then, batches on their way to the consumer may still have held slots.
            if self.ring is not None and self.ring.reusable:
                return self.ring
            self._grown = True
        # `retired` is tested first because it costs less than `worn`: this runs for every task.
        if not self._grown and (self.ring is None or not self.ring.retired or not self.ring.worn):
            return None
        if self.ring_bytes is None and self._slot_bytes > FIRST_SLOT_BYTES:
            # Check first: the kernel would overcommit and, at the control group's limit, kill a process.
            try:
                self._check_room()
            except RingMemoryError:
                if self._slots == self._least_slots:
                    raise
                # Those beyond the least only improve speed.
                self.credits, self.reorder_window, self._slots = self._least_credits, 0, self._least_slots
                self._check_room()
        # A task names its ring by this number, so that the worker does not write a batch of the old ring to the new
        # one.
        self._number += 1
        slots = self._slots
        if most_bytes is not None:
            slots = min(slots, max(2, most_bytes // self._slot_bytes))
        self.ring = Ring(slots, self._slot_bytes, min(self._slots - HEADROOM, slots - 1), self._number)
        self.nbytes = self.ring.nbytes
        self._grown = False
        return self.ring

    def _check_room(self) -> None:
        credits = self._slots - HEADROOM
        need = self.workers * credits * self._slot_bytes
        segment.check_room(need, f"{self.workers} rings for {credits} batches of {self._slot_bytes:,} bytes each")

    def assign(self, epoch: int, seq: int) -> tuple[int, int]:
        """Return the ring number and the slot for a task; `wire.NO_SLOT` if no slot is free."""
        ring = self.ring
        assert ring is not None
        slot = ring.take()
        if slot is None:
            self.tasks[epoch, seq] = None
            return ring.number, wire.NO_SLOT
        self.tasks[epoch, seq] = (ring, slot)
        return ring.number, slot

    def answered(self, epoch: int, seq: int, slot: int, nbytes: int) -> Ring | None:
        """Note that the task was answered. Returns the ring of `slot`, if the batch is in a slot; an unused slot is
        freed. The batch's size decides whether the ring must grow.

        Raises:
            ValueError: the worker was not assigned this slot, or the slot is smaller. Nothing is changed.
        """
        # Checked before anything changes: after a ValueError the task is as unanswered as before.
        held = self.tasks.get((epoch, seq))
        if slot < wire.ONEOFF or (held is not None and slot >= 0 and (slot != held[1] or nbytes > held[0].slot_bytes)):
            given = "none" if held is None else f"slot {held[1]} of {held[0]!r}"
            raise ValueError(f"a worker's answer is broken: {nbytes} bytes in slot {slot}, but it was given {given}")
        self.tasks.pop((epoch, seq), None)
        # A smaller batch came in a segment of its own because no slot was free. A larger ring would not help.
        if slot == wire.ONEOFF:
            self._learn(nbytes)
        if held is None:
            return None
        if slot < 0:
            held[0].give_back(held[1])
            return None
        return held[0]

    def _learn(self, nbytes: int) -> None:
        """Set the sizes for batches of this many bytes, if those are the largest so far."""
        if nbytes <= self._slot_bytes:
            return
        extra, ahead = self._affordable(grown_slot_bytes(nbytes))
        slots = self._least_slots + extra + ahead
        wanted = fit_slot_bytes(nbytes, slots, self.ring_bytes)
        # Otherwise `ring_bytes` allows no larger slots, and such batches go on coming in segments of their own.
        if wanted > self._slot_bytes:
            self._slot_bytes, self._slots = wanted, slots
            self.credits, self.reorder_window = self._least_credits + extra, ahead
            self._grown = True

    def _affordable(self, slot_bytes: int) -> tuple[int, int]:
        """Return how many slots of this size are affordable: for credits beyond the least, and for running ahead."""
        if self.ring_bytes is None:
            room = CREDIT_BYTES // slot_bytes - self._least_credits
            return min(self._most_extra, max(0, room)), min(self._most_ahead, RUN_AHEAD_BYTES // slot_bytes)
        room = max(0, self.ring_bytes // slot_bytes - self._least_slots)
        extra = min(self._most_extra, room)
        return extra, min(self._most_ahead, room - extra)

    def void(self) -> None:
        """Free the slots of all tasks: the worker will answer none of them."""
        for held in list(self.tasks.values()):
            if held is not None:
                held[0].give_back(held[1])
        self.tasks.clear()

    def reset_done(self, epoch: int) -> None:
        """The worker has dropped every task older than `epoch`: free their slots."""
        # Tasks of the epoch itself were sent after the RESET: the worker has yet to answer them.
        for key in [key for key in self.tasks if key[0] < epoch]:
            held = self.tasks.pop(key)
            if held is not None:
                held[0].give_back(held[1])

    def abandon(self) -> None:
        """The worker is dead: give up its ring, which a child process of it, or a pending write, may still change. The
        replacement gets a new ring; the old one is freed with its last lease.
        """
        self.tasks.clear()
        self.ring = None
        self._grown = True

    def successor(self) -> Self:
        """Return a manager for another worker. It starts with the sizes learned here, and with the ring if that is
        page-locked. This manager has no ring afterwards.

        The worker must have ended in order: child processes of a killed worker may still write to the ring.
        """
        self.void()
        successor = copy.copy(self)
        successor.tasks = {}
        successor._inherited = self.ring is not None and self.ring.locked and not self._grown
        # A ring that is not locked costs less to make again than to keep; a ring that is too small would be replaced
        # anyway.
        if not successor._inherited:
            successor.ring, successor._grown = None, True
        self.ring = None
        return successor

    def close(self) -> None:
        """Release the rings. Views that the consumer holds stay valid."""
        if self.ring is not None:
            self.ring.close_fd()
        self.ring = None
        self.tasks.clear()


class RingOptions(NamedTuple):
    """The arguments of a `RingManager`; rings are reused only for equal ones."""

    credits: int
    ring_bytes: int | None
    reorder_window: int
    workers: int
    least_credits: int | None


class KeptRings:
    """A cache for the page-locked rings of the loader's last pool. It holds no more memory than an epoch uses.

    Page-locking a ring takes long, and delays other calls of the device. So where a loader's workers end with the
    epoch, their locked rings are kept for the next workers, with the sizes learned. Rings that are not locked are not
    kept: a new one costs less than the memory that the old one would hold between two epochs.

    Any thread may call it. A dropped ring is page-unlocked once its last view has died.
    """

    def __init__(self) -> None:
        # No lock: a pool may end in any thread, also inside a finalizer that interrupts a holder of the lock.
        # `append`, `pop` and `clear` of a deque are atomic.
        self._left: deque[tuple[RingOptions, list[RingManager]]] = deque(maxlen=1)
        self._closed = False
        weakref.finalize(self, self._left.clear)  # runs at exit, too, while modules and drivers still work

    def take(self, options: RingOptions) -> list[RingManager] | None:
        """Take the kept managers, one per worker; None if none was kept with these options."""
        # Another thread may take them between a test and `pop`.
        with suppress(IndexError):
            # Rings for other options are dropped here: the next pool would never take them.
            kept_options, managers = self._left.pop()
            if kept_options == options:
                return managers
        return None

    def keep(self, options: RingOptions, managers: list[RingManager]) -> None:
        """Keep these managers for the next pool."""
        self._left.append((options, managers))
        if self._closed:  # checked after appending: `close` has cleared only the rings that were appended before it
            self._left.clear()

    def close(self) -> None:
        """Drop the rings, and keep none from now on."""
        self._closed = True
        self._left.clear()
