"""Copies batches to the device ahead of the consumer, from page-locked rings where possible.

Data path: reorder -> opener -> [device_stage] -> consumer.

`DeviceStage` opens a batch and starts its copy; the next batch follows while that copy runs, so that the device's copy
engine is always busy. `RingLocker` page-locks a ring when its first batch arrives. It locks the whole ring at once,
which takes about 0.1 s per GB, and several times as long for slots whose pages do not exist yet. The lock lasts as long
as the ring's memory.

`Releaser` keeps each slot until its copy's *event* has completed. No locks, for the reason given in `stage.py`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any, TypeAlias

import torch

from asyncloader.base.events import Action
from asyncloader.delivery.accelerator import Accelerator, DoneEvent
from asyncloader.delivery.cuda import LockingUnsupported
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import OnDevice, Stage
from asyncloader.delivery.transfer import DeviceTransfer
from asyncloader.errors import warn_aside
from asyncloader.telemetry.counters import Recorder
from asyncloader.telemetry.profiler_ranges import in_range, recorded
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc.ring import Ring

_IN_FLIGHT = 2  # copies in flight when a batch is passed on: one running, one queued


class DeviceStage(Stage):
    """The stage that copies each batch to the device.

    Args:
        opener: opens the answers; used by this stage's thread alone.
        transfer: copies a batch to the device.
        statistics: counts batches that were not copied straight from a ring.
        forward: see `Stage`.
        ahead: batches that may be on the device, or in flight, and not taken by the consumer.
    """

    def __init__(
        self,
        opener: Opener,
        transfer: DeviceTransfer,
        statistics: Statistics,
        forward: Callable[[Action], None],
        ahead: int,
    ) -> None:
        super().__init__("asyncloader-device", forward, ahead)
        self._opener = opener
        self._transfer = transfer
        self._locker = RingLocker(transfer.accelerator, statistics)
        self._statistics = statistics
        # A thread of its own waits for the copies: if the stage's thread waited, it could not start the next copy, and
        # the copy engine would idle.
        self._releaser = Releaser(statistics.recorder)

    def prepare(self, answer: Answer) -> OnDevice:
        """Start the copy."""
        try:
            locked = self._locker.lock(answer.ring)
            while (held := self._releaser.count()) and self._opener.will_copy(answer):
                self._releaser.wait(held - 1)  # frees a slot, so that this batch need not be copied out of its own
        except BaseException:
            answer.discard()
            raise
        batch, source = self._opener.open_held(answer)
        locked = locked and source is not None
        if not locked and answer.result.nbytes:
            self._statistics.staged_batches += 1
        slot = torch.frombuffer(source, dtype=torch.uint8) if locked else None
        began = perf_counter()
        with in_range("asyncloader::h2d") if recorded() else nullcontext():
            ready = self._transfer.start(batch, locked=locked, slot=slot)
        del slot  # it keeps the source alive
        if ready.copied is not None:
            self._releaser.hold(ready.copied, batch if source is None else source, began)
            self._releaser.wait(_IN_FLIGHT)
        else:
            self._statistics.recorder.time("h2d", perf_counter() - began)
        return OnDevice(ready, answer.result, answer.cursor, answer.records)

    def take(self, outcome: OnDevice) -> Any:
        """The batch for the consumer. In the consumer's thread."""
        try:
            with in_range("asyncloader::take") if recorded() else nullcontext():
                return self._transfer.take(outcome.ready)
        finally:
            self.taken()

    def finish(self) -> None:
        """Wait until the slots of all batches are free."""
        try:
            self._releaser.wait(0)
        finally:
            self._releaser.stop()

    def threads(self) -> tuple[threading.Thread, ...]:
        """The stage's thread and the releaser's."""
        return (*super().threads(), self._releaser.thread)


_Held: TypeAlias = "queue.SimpleQueue[tuple[DoneEvent, Any, float] | None]"
_Done: TypeAlias = "queue.SimpleQueue[Exception | None]"


class Releaser:
    """Releases sources in the order of their copies. Used by one thread. Also ends if it is dropped without `stop`.

    Args:
        recorder: gets how long copies took, from their start; a copy may wait for those before it.
    """

    def __init__(self, recorder: Recorder) -> None:
        held: _Held = queue.SimpleQueue()
        self._held = held
        self._done: _Done = queue.SimpleQueue()  # one message per finished copy: None, or its error
        self._count = 0
        weakref.finalize(self, held.put, None).atexit = False
        # A daemon, as is the stage's thread.
        self.thread = threading.Thread(
            target=_serve, args=(held, self._done, recorder), name="asyncloader-release", daemon=True
        )
        self.thread.start()

    def hold(self, event: DoneEvent, source: Any, began: float) -> None:
        """Keep `source` until the event of the copy that began then has completed."""
        self._count += 1
        self._held.put((event, source, began))

    def wait(self, most: int) -> None:
        """Wait until at most `most` sources are held.

        Raises:
            Exception: waiting for an event failed, so the device has failed.
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
        """Number of sources held, without waiting. Raises as `wait`."""
        while not self._done.empty():
            self.wait(self._count - 1)
        return self._count

    def stop(self) -> None:
        """Wait until nothing is held, and end the thread. Not in the releaser's own thread. Idempotent."""
        self._held.put(None)
        self.thread.join()


def _serve(held: _Held, done: _Done, recorder: Recorder) -> None:
    while (item := held.get()) is not None:
        event, source, began = item
        failure: Exception | None = None
        try:
            event.synchronize()
            recorder.time("h2d", perf_counter() - began)
        except Exception as error:
            failure = error.with_traceback(None)
        # Deleted before the message: its receiver must find the slot free.
        del item, event, source
        done.put(failure)
        del failure


class RingLocker:
    """Page-locks rings for one device.

    Args:
        accelerator: the device.
        statistics: counts locked bytes and seconds.
    """

    def __init__(self, accelerator: Accelerator, statistics: Statistics) -> None:
        self._accelerator = accelerator
        self._statistics = statistics

    def lock(self, ring: Ring | None) -> bool:
        """Page-lock the ring unless it is locked. Returns whether its batches lie in page-locked memory.

        Raises:
            PageLockError: the driver refuses to lock this ring. (If it would refuse any ring, this warns instead, and
                batches are copied to torch's pinned memory from then on.)
            RingMemoryError: there is not enough memory for all of the ring's pages.
        """
        lock = self._accelerator.lock
        if ring is None or lock is None:
            return False
        if not ring.locked:
            began = perf_counter()
            try:
                ring.lock_pages(lock)
            except LockingUnsupported as error:
                self._do_without(str(error))
                return False
            self._statistics.page_locked_bytes += ring.nbytes
            self._statistics.page_lock_s += perf_counter() - began
        return True

    def _do_without(self, reason: str) -> None:
        accelerator = self._accelerator
        accelerator.lock, accelerator.unlocked_because = None, reason
        warn_aside(
            f"{accelerator.device} cannot copy straight from the workers' rings, as they cannot be page-locked here: "
            f"{reason}. Each batch is copied to page-locked memory first, by a thread of this process.",
            RuntimeWarning,
            stacklevel=2,
        )
