"""The stage in which batches are copied to the device, ahead of the consumer.

Data path: reorder -> delivery -> [device stage] -> consumer.

A batch is opened and its copy is begun; the next one's follows while that is under way, so that the device's copy
engine has always something to do. A slot is held until its copy's *event* has come, not until Python lets go of the
batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from asyncloader.delivery import Opener
from asyncloader.device.accelerator import DoneEvent
from asyncloader.device.locking import RingLocker
from asyncloader.device.mover import Mover, Ready
from asyncloader.events import Action
from asyncloader.stage import Stage
from asyncloader.statistics import Statistics
from asyncloader.workers import wire
from asyncloader.workers.listener import Answer

__all__ = ["DeviceStage", "OnDevice"]

_IN_FLIGHT = 2  # copies that the device has been asked for


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
        super().__init__("asyncloader-device", forward, ahead)
        self._opener = opener
        self._mover = mover
        self._locker = RingLocker(mover.accelerator, statistics)
        self._statistics = statistics
        self._in_flight: deque[tuple[DoneEvent, Any]] = deque()  # copies, and what keeps their sources as they are

    def prepare(self, answer: Answer) -> OnDevice:
        """Begin its copy."""
        locked = self._locker.lock(answer.ring)
        while self._in_flight and self._opener.will_copy(answer):
            self._wait(len(self._in_flight) - 1)  # its slot is free then, and the batch need not leave its own
        batch, source = self._opener.open_held(answer)
        locked = locked and source is not None
        if not locked:
            self._statistics.staged += 1
        ready = self._mover.move(batch, locked=locked)
        if ready.event is not None:
            self._in_flight.append((ready.event, batch if source is None else source))
        self._wait(_IN_FLIGHT - 1)
        return OnDevice(ready, answer.result, answer.cursor, answer.bad)

    def take(self, outcome: OnDevice) -> Any:
        """The batch, for the consumer, in its thread."""
        try:
            return self._mover.take(outcome.ready)
        finally:
            self.taken()

    def rest(self) -> None:
        """The slots of all batches come back."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Until no more than so many copies are under way."""
        while len(self._in_flight) > most:
            event, _ = self._in_flight[0]
            event.synchronize()
            self._in_flight.popleft()
