"""The stage in which batches are copied to the device, ahead of the consumer.

Data path: reorder -> delivery -> [device stage] -> consumer.

A batch is opened and its copy is begun; the next one's follows while that is under way, so that the device's copy
engine has always something to do. A slot is held until its copy's *event* has come, not until Python lets go of the
batch.

What copies to the device read from is kept until they are done, by a thread that waits for nothing else.

Data path: delivery -> stage -> [release] -> ring.

The stage's own thread must not wait for a copy while it could begin the next one: the device's copy engine would stand
still between the two. So it hands over each copy's event, with what holds the slot, and hears of the end.

No locks, for the reason given in `stage.py`.

Rings are page-locked, each when the first batch comes in it.

Data path: reorder -> delivery -> [locking] -> stage -> consumer.

A whole ring at a time: it costs about 0.1 s for a GB, and several times as much to get the pages of slots that were
never used. The locks go with the ring's memory, when nobody looks into it any more.
"""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncloader.delivery.accelerator import Accelerator, DoneEvent
from asyncloader.delivery.cuda import LockingUnsupported
from asyncloader.delivery.numa import prefer_node, stay_near
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import Stage
from asyncloader.delivery.transfer import DeviceTransfer, Ready
from asyncloader.events import Action
from asyncloader.statistics import Statistics
from asyncloader.workers.ipc import wire
from asyncloader.workers.listener import Answer
from asyncloader.workers.memory.ring import Ring

__all__ = [
    "DeviceStage",
    "OnDevice",
    "Releaser",
    "RingLocker",
]

_IN_FLIGHT = 2  # copies that the device has been asked for when a batch is passed on: one is under way, one is next


class OnDevice(NamedTuple):
    """A batch on its way to the device, with the descriptor that it came with."""

    ready: Ready
    result: wire.Result
    cursor: bytes
    bad: bytes


class DeviceStage(Stage):
    """Copies what passes.

    Args:
        opener: opens the answers; used by this stage's thread alone.
        transfer: of the device.
        statistics: where is counted what was not copied straight from a ring.
        forward: as `Stage`'s.
        ahead: batches that may be on the device, or on their way, and not taken by the consumer.
    """

    def __init__(
        self,
        opener: Opener,
        transfer: DeviceTransfer,
        statistics: Statistics,
        forward: Callable[[Action], None],
        ahead: int,
    ) -> None:
        super().__init__("asyncloader-device", forward, ahead, partial(stay_near, transfer.accelerator.node))
        self._opener = opener
        self._transfer = transfer
        self._locker = RingLocker(transfer.accelerator, statistics)
        self._statistics = statistics
        self._releaser = Releaser()

    def prepare(self, answer: Answer) -> OnDevice:
        """Begin its copy."""
        try:
            locked = self._locker.lock(answer.ring)
            while (held := self._releaser.count()) and self._opener.will_copy(answer):
                self._releaser.wait(held - 1)  # a slot is free then, and the batch need not leave its own
        except BaseException:
            answer.discard()
            raise
        batch, source = self._opener.open_held(answer)
        locked = locked and source is not None
        if not locked and answer.result.nbytes:
            self._statistics.staged += 1
        slot = torch.frombuffer(source, dtype=torch.uint8) if locked else None
        ready = self._transfer.start(batch, locked=locked, slot=slot)
        del slot  # it keeps the source
        if ready.copied is not None:
            self._releaser.hold(ready.copied, batch if source is None else source)
            self._releaser.wait(_IN_FLIGHT)
        return OnDevice(ready, answer.result, answer.cursor, answer.bad)

    def take(self, outcome: OnDevice) -> Any:
        """The batch, for the consumer, in its thread."""
        try:
            return self._transfer.take(outcome.ready)
        finally:
            self.taken()

    def finish(self) -> None:
        """The slots of all batches come back."""
        try:
            self._releaser.wait(0)
        finally:
            self._releaser.stop()

    def threads(self) -> tuple[threading.Thread, ...]:
        """Its own, and the one that it waits for."""
        return (*super().threads(), self._releaser.thread)


_Held: TypeAlias = "queue.SimpleQueue[tuple[DoneEvent, Any] | None]"
_Done: TypeAlias = "queue.SimpleQueue[Exception | None]"


class Releaser:
    """Lets go of sources in the order of their copies. One thread uses it. Dropped without `stop` it ends, too."""

    def __init__(self) -> None:
        held: _Held = queue.SimpleQueue()
        self._held = held
        self._done: _Done = queue.SimpleQueue()  # a message for each copy that has ended: None, or its error
        self._count = 0
        weakref.finalize(self, held.put, None).atexit = False
        # A daemon, as the stage's.
        self.thread = threading.Thread(target=_serve, args=(held, self._done), name="asyncloader-release", daemon=True)
        self.thread.start()

    def hold(self, event: DoneEvent, source: Any) -> None:
        """Keep `source` until the event has come."""
        self._count += 1
        self._held.put((event, source))

    def wait(self, most: int) -> None:
        """Until no more than so many are held.

        Raises:
            Exception: what waiting for an event raised: the device has failed.
        """
        while self._count > most:
            error = self._done.get()
            self._count -= 1
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame

    def count(self) -> int:
        """How many are held, as far as is known. Raises as `wait`."""
        while not self._done.empty():
            self.wait(self._count - 1)
        return self._count

    def stop(self) -> None:
        """Nothing more will be held; returns when nothing is. Not in the releaser's own thread. Idempotent."""
        self._held.put(None)
        self.thread.join()


def _serve(held: _Held, done: _Done) -> None:
    while (item := held.get()) is not None:
        event, source = item
        failure: Exception | None = None
        try:
            event.synchronize()
        except Exception as error:
            failure = error.with_traceback(None)
        # Between two copies this thread refers to nothing of them; who hears of the end finds the slot free.
        del item, event, source
        done.put(failure)
        del failure


class RingLocker:
    """Locks rings for one device.

    Args:
        accelerator: the device.
        statistics: where bytes and seconds are counted.
    """

    def __init__(self, accelerator: Accelerator, statistics: Statistics) -> None:
        self._accelerator = accelerator
        self._statistics = statistics

    def lock(self, ring: Ring | None) -> bool:
        """Whether a batch in this ring lies in page-locked memory, which this call sees to.

        Raises:
            PageLockError: the device's driver refuses this ring. (Where it would refuse any, a warning says so, and
                batches are copied to page-locked memory of torch's from then on.)
            RingMemoryError: there is no memory for all of the ring's pages.
        """
        lock = self._accelerator.lock
        if ring is None or lock is None:
            return False
        if not ring.locked:
            began = perf_counter()
            try:
                ring.lock_pages(lock, partial(prefer_node, node=self._accelerator.node))
            except LockingUnsupported as error:
                self._do_without(str(error))
                return False
            self._statistics.locked_bytes += ring.nbytes
            self._statistics.lock_s += perf_counter() - began
        return True

    def _do_without(self, reason: str) -> None:
        accelerator = self._accelerator
        accelerator.lock, accelerator.unlocked_because = None, reason
        warnings.warn(
            f"{accelerator.device} cannot copy straight from the workers' rings, as they cannot be page-locked here: "
            f"{reason}. Each batch is copied to page-locked memory first, by a thread of this process.",
            RuntimeWarning,
            stacklevel=2,
        )
