"""The stage in which batches are copied to the device, ahead of the consumer.

Data path: reorder -> delivery -> [device stage] -> consumer.

A batch is opened and its copy is begun; the next one's follows while that is under way, so that the device's copy
engine has always something to do. A slot is held until its copy's *event* has come, not until Python lets go of the
batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from asyncloader.delivery import Opener
from asyncloader.device.locking import RingLocker
from asyncloader.device.mover import Mover, Ready
from asyncloader.device.numa import stay_near
from asyncloader.device.release import Releaser
from asyncloader.events import Action
from asyncloader.stage import Stage
from asyncloader.statistics import Statistics
from asyncloader.workers import wire
from asyncloader.workers.listener import Answer

__all__ = ["DeviceStage", "OnDevice"]

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
        mover: of the device.
        statistics: where is counted what was not copied straight from a ring.
        forward: as `Stage`'s.
        ahead: batches that may be on the device, or on their way, and not taken by the consumer.
    """

    def __init__(
        self, opener: Opener, mover: Mover, statistics: Statistics, forward: Callable[[Action], None], ahead: int
    ) -> None:
        super().__init__("asyncloader-device", forward, ahead, partial(stay_near, mover.accelerator.node))
        self._opener = opener
        self._mover = mover
        self._locker = RingLocker(mover.accelerator, statistics)
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
        ready = self._mover.move(batch, locked=locked, slot=slot)
        del slot  # it keeps the source
        if ready.copied is not None:
            self._releaser.hold(ready.copied, batch if source is None else source)
            self._releaser.wait(_IN_FLIGHT)
        return OnDevice(ready, answer.result, answer.cursor, answer.bad)

    def take(self, outcome: OnDevice) -> Any:
        """The batch, for the consumer, in its thread."""
        try:
            return self._mover.take(outcome.ready)
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
