"""Tracks the deaths of workers and the tasks that may have caused them, and chooses who tries these again. Pure.

Data path: beside the scheduler, which uses `Reassignment` only after a death.

The tasks that may have killed a worker become suspects. A worker that processes several tasks at a time retries each
suspect *alone*, so that any further death is certain to be its doing. A task over which three workers died is poisoned
and not retried. If another process killed the worker, its tasks become suspects too, but the death is not counted
against them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncloader.base.events import Died, Poisoned, bare_index
from asyncloader.errors import QUARANTINE_ADVICE, TaskQuarantined, WorkerDied

# Not two, which could still hit an innocent task by chance.
KILLS = 3
"""Deaths after which a task is not retried; it was alone at all but the first."""


class Reassignment:
    """The deaths and suspects of one epoch.

    Args:
        workers: number of workers.
        max_restarts: how often each worker may be replaced.
        concurrent: whether a worker processes several tasks at a time.
        any_worker: whether any worker may process any task: a map dataset's, where tasks go to the least loaded one.
    """

    def __init__(self, workers: int, max_restarts: int, *, concurrent: bool, any_worker: bool = False) -> None:
        self.max_restarts = max_restarts
        self._concurrent = concurrent
        self._any_worker = any_worker
        self._restarts = [0] * workers
        self._deaths: dict[int, list[WorkerDied]] = {}  # suspect -> the deaths that count against it
        self._down = [False] * workers
        self._alone: list[int | None] = [None] * workers  # the suspect that a worker is processing alone
        self._waiting: list[deque[int]] = [deque() for _ in range(workers)]
        self.active = False
        """Whether the scheduler must ask before it gives a worker a task; False in normal operation."""
        self.struck: Sequence[int] = ()
        """The suspects of the last death."""

    # -------------------------------------------------------------------------------------------- deaths

    def died(self, event: Died, lost: Sequence[int]) -> list[int]:
        """Record a death. Returns the tasks that are poisoned now.

        Args:
            event: the death.
            lost: the worker's unanswered tasks, in the order in which it got them.
        """
        worker = event.worker
        in_hand = lost[: len(lost) - len(self._waiting[worker])]  # the rest had not been sent
        # The scheduler assigns all of `lost` again, also the tasks that waited here.
        self._waiting[worker].clear()
        self._alone[worker] = None
        blameless = event.left or event.lost
        # A worker that left because of its size, or whose connection was lost, has not failed: restarts are for those
        # that did.
        if not blameless:
            self._restarts[worker] += 1
        blames = event.at_work and not blameless
        self.struck = ()
        if blames:
            # A worker that processes its tasks in order died at the first without an answer; a concurrent worker may
            # have died of any that it was sent.
            self.struck = in_hand if self._concurrent else in_hand[:1]
        for seq in self.struck:
            # Entered also with no death that counts: that makes it a suspect, which is tried alone.
            self._deaths.setdefault(seq, []).extend([] if event.outside else [event.error])
        return [seq for seq in self.struck if len(self._deaths[seq]) >= KILLS]

    def taken_over_by(self, seq: int, active: Sequence[bool], unanswered: Sequence[int]) -> int | None:
        """Return the worker that gets a dead worker's task at once: the live worker with the fewest unanswered tasks.
        None: the task waits for the dead worker's replacement. So does a suspect, which no healthy worker should get.
        """
        if not self._any_worker or self.suspected(seq):
            return None
        free = [worker for worker, alive in enumerate(active) if alive and self.free(worker)]
        return min(free, key=unanswered.__getitem__, default=None)

    def may_replace(self, worker: int) -> bool:
        """Whether the worker may be replaced once more."""
        # `died` has counted the death that is being handled.
        return self._restarts[worker] <= self.max_restarts

    def advice(self, worker: int) -> str:
        """Advice for the error when a worker may not be replaced."""
        if not self.max_restarts:
            return (
                "To have a worker that dies replaced, and its tasks done again, set max_worker_restarts (with seed= "
                "the batches are exactly those of an undisturbed run)."
            )
        return f"Worker {worker} had been replaced {self.max_restarts} times in this epoch (max_worker_restarts)."

    def deaths(self, seq: int) -> tuple[WorkerDied, ...]:
        """The deaths that count against this task."""
        return tuple(self._deaths.get(seq, ()))

    def suspected(self, seq: int) -> bool:
        """Whether a worker died over the task."""
        return seq in self._deaths

    # ------------------------------------------------------------------------------------- tasks that wait for a worker

    def down(self, worker: int) -> None:
        """Mark the worker as being replaced: its tasks wait."""
        self._down[worker] = True
        self.active = True

    def up(self, worker: int) -> None:
        """The worker's replacement has started; see `next_for`."""
        # `active` stays set, because tasks may wait for this worker. `next_for` clears it.
        self._down[worker] = False

    def free(self, worker: int) -> bool:
        """Whether the worker can be given any task now."""
        return not self._down[worker] and self._alone[worker] is None

    def wait(self, worker: int, seq: int) -> None:
        """Queue the task for this worker until `next_for` returns it."""
        self._waiting[worker].append(seq)

    def answered(self, worker: int, seq: int) -> None:
        """A worker answered a task, or the task got another outcome."""
        # An answer clears the task: the earlier deaths are taken to have another cause.
        self._deaths.pop(seq, None)
        if self._alone[worker] == seq:
            self._alone[worker] = None

    def void(self, worker: int) -> None:
        """The worker will get no more tasks: forget those that wait for it."""
        self._waiting[worker].clear()
        self._alone[worker] = None

    def next_for(self, worker: int, in_hand: int) -> int | None:
        """The next waiting task to send to the worker, which has `in_hand` others; None if it must wait."""
        waiting = self._waiting[worker]
        if not waiting or not self.free(worker):
            # Computed where no task can be sent to the worker: until the last trace of a death is gone, the scheduler
            # must ask.
            self.active = (
                bool(self._deaths)
                or any(self._down)
                or any(self._waiting)
                or any(seq is not None for seq in self._alone)
            )
            return None
        if self._concurrent and self.suspected(waiting[0]):
            if in_hand:
                return None  # a suspect is sent only to an idle worker
            self._alone[worker] = waiting[0]
        return waiting.popleft()

    def in_hand(self, worker: int, unanswered: int) -> int:
        """How many of its unanswered tasks the worker was sent."""
        return unanswered - len(self._waiting[worker])


def quarantined(poisoned: Poisoned, advice: str = QUARANTINE_ADVICE) -> TaskQuarantined:
    """The error for a task that is not tried again."""
    deaths: tuple[WorkerDied, ...] = poisoned.deaths
    who = [(death.worker_id, death.pid, death.exitcode) for death in deaths]
    advice = " ".join(filter(None, [deaths[-1].reason, advice]))
    return TaskQuarantined(bare_index(poisoned.task.index), who, deaths[-1].trace, advice)
