"""What is known of workers that died in an epoch, and of the tasks that they died over. Pure: no I/O, no clock.

Data path: beside the scheduler, which asks it at every death and at nothing else.

Which task killed a worker? One that works on its tasks in their order was at the first that it had not answered. One
that works on several at a time may have died of any of them: so each is a suspect, and is tried again *alone*, that
every further death leaves no doubt. A task over which three workers died is poisoned, and not tried again: it was alone
at the second death and at the third, and two could still have met an innocent one by chance. A death that somebody else
caused makes suspects, too, but is not held against them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncloader.errors import WorkerDied
from asyncloader.events import Died

__all__ = ["KILLS", "Recovery"]

KILLS = 3
"""Deaths after which a task is not tried again; it was alone at all but the first."""


class Recovery:
    """Deaths of one epoch.

    Args:
        workers: their number.
        max_restarts: how often each of them may be replaced.
        concurrent: workers have several tasks in hand at a time.
    """

    def __init__(self, workers: int, max_restarts: int, *, concurrent: bool) -> None:
        self.max_restarts = max_restarts
        self._concurrent = concurrent
        self._restarts = [0] * workers
        self._deaths: dict[int, list[WorkerDied]] = {}  # suspect -> the deaths that are held against it
        self._down = [False] * workers
        self._alone: list[int | None] = [None] * workers  # the suspect that a worker tries, and nothing else
        self._waiting: list[deque[int]] = [deque() for _ in range(workers)]
        self.active = False
        """Whether any worker cannot be given tasks just like that: all is normal else."""
        self.struck: Sequence[int] = ()
        """The suspects of the last death."""

    # -------------------------------------------------------------------------------------------- deaths

    def died(self, event: Died, lost: Sequence[int]) -> list[int]:
        """A worker died with these tasks unanswered, in the order in which it had them. Returns those that are poisoned
        now.
        """
        worker = event.worker
        in_hand = len(lost) - len(self._waiting[worker])  # the others had not been sent
        self._waiting[worker].clear()
        self._alone[worker] = None
        if not event.retired:
            self._restarts[worker] += 1
        blames = event.at_work and not event.retired
        self.struck = lost[: in_hand if self._concurrent else min(1, in_hand)] if blames else ()
        for seq in self.struck:
            self._deaths.setdefault(seq, []).extend([] if event.outside else [event.error])
        return [seq for seq in self.struck if len(self._deaths[seq]) >= KILLS]

    def may_replace(self, worker: int) -> bool:
        """Whether its last death leaves it a restart."""
        return self._restarts[worker] <= self.max_restarts

    def advice(self, worker: int) -> str:
        """For the user whose worker may not be replaced."""
        if not self.max_restarts:
            return (
                "To have a worker that dies replaced, and its tasks done again, set max_worker_restarts (with seed= "
                "the batches are exactly those of an undisturbed run)."
            )
        return f"Worker {worker} had been replaced {self.max_restarts} times in this epoch (max_worker_restarts)."

    def deaths(self, seq: int) -> tuple[WorkerDied, ...]:
        """The deaths that are held against this task."""
        return tuple(self._deaths.get(seq, ()))

    def suspected(self, seq: int) -> bool:
        """Whether a worker died over the task."""
        return seq in self._deaths

    # ------------------------------------------------------------------------------------- who waits for whom

    def down(self, worker: int) -> None:
        """It is being replaced: what is given to it waits."""
        self._down[worker] = True
        self.active = True

    def up(self, worker: int) -> None:
        """Its replacement is there; see `next_for`."""
        self._down[worker] = False

    def free(self, worker: int) -> bool:
        """Whether it can be given any task now."""
        return not self._down[worker] and self._alone[worker] is None

    def wait(self, worker: int, seq: int) -> None:
        """The task is for this worker, when `next_for` says so."""
        self._waiting[worker].append(seq)

    def answered(self, worker: int, seq: int) -> None:
        """A task has its outcome."""
        self._deaths.pop(seq, None)
        if self._alone[worker] == seq:
            self._alone[worker] = None

    def void(self, worker: int) -> None:
        """The worker will get no task any more."""
        self._waiting[worker].clear()
        self._alone[worker] = None

    def next_for(self, worker: int, in_hand: int) -> int | None:
        """The next waiting task that the worker, which has `in_hand` others, can be sent now; None: wait."""
        waiting = self._waiting[worker]
        if not waiting or not self.free(worker):
            self.active = (
                bool(self._deaths)
                or any(self._down)
                or any(self._waiting)
                or any(seq is not None for seq in self._alone)
            )
            return None
        if self._concurrent and self.suspected(waiting[0]):
            if in_hand:
                return None  # until those are answered
            self._alone[worker] = waiting[0]
        return waiting.popleft()

    def in_hand(self, worker: int, unanswered: int) -> int:
        """How many of its unanswered tasks were sent to the worker."""
        return unanswered - len(self._waiting[worker])
