"""Bugs to be planted, each in the process of a case before it begins. The runner must find every one of them.

Workers are forked from that process and have the bug, too. Only the main process's part matters here, so that cases
with other start methods show it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncloader.base.events import Action
from asyncloader.epoch.reorder import ReorderBuffer
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.workers.ipc.ring import Ring
from asyncloader.workers.watchdog import TaskWatchdog


def _replace(owner: type, name: str, method: Callable[..., Any]) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner.__name__} has no {name} any more: plant the bug where its work is done now")
    setattr(owner, name, method)


def no_generation_check() -> None:
    """Every release frees its slot, also one of an older generation: that of a slot that was retired before a fork.

    Such a release is rare. The leases of retired slots are kept here, so that it comes each time.
    """
    retire, kept = Ring.retire, list[Any]()

    def retire_and_hear(self: Ring) -> None:
        kept.extend(self._leases.values())
        retire(self)

    def reclaim(self: Ring) -> None:
        while self._released:
            lease = self._released.popleft()
            self._leases.pop(lease.slot, None)
            self.retired.discard(lease.slot)
            self._free.append(lease.slot)

    _replace(Ring, "retire", retire_and_hear)
    _replace(Ring, "reclaim", reclaim)


def no_reissue() -> None:
    """The tasks of a worker that died are not reassigned."""

    def forget(self: Scheduler, seq: int, worker: int) -> list[Action]:
        return []

    _replace(Scheduler, "_assign_again", forget)


def slots_not_reclaimed() -> None:
    """Slots whose last view has died stay leased."""

    def reclaim(self: Ring) -> None:
        self._released.clear()

    _replace(Ring, "reclaim", reclaim)


def reorder_off_by_one() -> None:
    """A batch may overtake the batch before it."""
    push = ReorderBuffer.push

    def early(self: ReorderBuffer[Any], seq: int, item: Any) -> list[Any]:
        ready = push(self, seq, item)
        if not ready and seq == self._next + 1:
            self._skipped.add(seq)
            return [self._held.pop(seq)]
        return ready

    _replace(ReorderBuffer, "push", early)


def deadline_ignored() -> None:
    """A worker's deadline is not checked."""

    def look(self: TaskWatchdog) -> None:
        self._timer = None

    _replace(TaskWatchdog, "_check", look)


PLANTS: dict[str, Callable[[], None]] = {
    "no generation check": no_generation_check,
    "no re-issue": no_reissue,
    "slots not reclaimed": slots_not_reclaimed,
    "reorder off by one": reorder_off_by_one,
    "deadline ignored": deadline_ignored,
}
