"""Assigns tasks to workers and decides when a batch may go to the consumer. A pure state machine: no I/O, no clock.

Data path: sampler -> [scheduler] -> pool -> worker -> ring -> [scheduler: reorder] -> delivery -> consumer.

Each event is a method that returns actions, which `pipeline.py` carries out. Once the epoch is over there are none. The
rules:

* A task is outstanding from `Assign` until the consumer took its outcome (`Delivered`). At most ``credits * workers``
  tasks are outstanding, so no more batches exist ahead of the consumer. `credits` is torch's `prefetch_factor`, or more
  where that many batches are needed to keep enough samples in flight (`most_credits`). The pipeline lowers
  `credits` when batches turn out to be large; nothing is pulled then until enough batches were taken.
* ``assignment="round_robin"`` is torch's rule: the next worker in turn that still has data. With ``in_order=False`` a
  worker is skipped while it has its share outstanding. So the same batches come from the same workers as in torch,
  which determines what each worker's random numbers are used for.
* ``assignment="least_loaded"`` gives the task to the worker with the fewest unanswered ones. It is used where any
  worker may make any batch. Workers may then run ahead: up to `reorder_window` batches that are ready, but held back
  by an earlier batch, do not count as outstanding. A slow batch therefore stalls only the worker that makes it, while a
  slow consumer still stops all workers.
* Iterable datasets have no sampler: the scheduler offers itself one task per credit of the workers that still have
  data. When a worker's copy of the dataset ends, the tasks that it still had are void. See also `stream_scheduler.py`.
* Tasks are idempotent. A worker that dies is replaced up to `max_restarts` times, and its unanswered tasks are assigned
  again under the same sequence numbers: to the replacement if they are bound to this worker or may have caused the
  death, else to any live worker. Tasks that `reassignment.py` finds poisoned are delivered as `Poisoned`. Without
  restarts left the epoch ends with `Fail`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from asyncloader.base.events import (
    Action,
    Assign,
    Deliver,
    Died,
    Fail,
    Finish,
    Poisoned,
    Pull,
    Replace,
    Task,
    bare_index,
)
from asyncloader.epoch.reassignment import Reassignment, quarantined
from asyncloader.epoch.reorder import ReorderBuffer
from asyncloader.errors import shortened

Assignment = Literal["round_robin", "least_loaded"]


class Scheduler:
    """The state machine of one epoch.

    Args:
        workers: number of workers, at least 1.
        credits: outstanding tasks per worker, at least 1; may be lowered, and raised up to this again, at any time.
        in_order: deliver in task order (True) or as they complete.
        iterable: whether the workers iterate their own copies of the dataset, without a sampler.
        assignment: see the module's docstring.
        reorder_window: see the module's docstring; may be lowered, and raised again, at any time.
        first_worker: the worker that gets the first task (round robin).
        epoch: part of each task, to recognise answers of an abandoned epoch.
        max_restarts: how often each worker may be replaced.
        concurrent: whether a worker processes several tasks at a time (asynchronous datasets).
        lane_of: with round robin, returns the lane of an index, given the number of workers; the tasks of a lane go to
            the same worker, which reads on where it stopped. None: the tasks themselves go round.
    """

    def __init__(
        self,
        *,
        workers: int,
        credits: int,
        in_order: bool = True,
        iterable: bool = False,
        assignment: Assignment = "round_robin",
        reorder_window: int = 0,
        first_worker: int = 0,
        epoch: int = 0,
        max_restarts: int = 0,
        concurrent: bool = False,
        lane_of: Callable[[Any, int], int] | None = None,
    ) -> None:
        if workers < 1 or credits < 1:
            raise ValueError(f"workers and credits must be at least 1, got workers={workers}, credits={credits}")
        self.workers = workers
        self.credits = credits
        self.in_order = in_order
        self.iterable = iterable
        self.assignment: Assignment = assignment
        self.reorder_window = reorder_window
        self.epoch = epoch
        self._asked = 0  # indices that were requested and not yet offered
        # From the credits of the beginning: tasks that were given out before `credits` was lowered still count.
        self._most = credits * workers + reorder_window
        self._most_credits = credits
        self._share = credits + reorder_window  # most tasks that a worker may have outstanding
        self._active = [True] * workers
        self._load = [0] * workers  # tasks assigned and not yet delivered (or void)
        self._unanswered = [0] * workers  # tasks assigned and not yet completed (or void)
        self._owner: dict[int, int] = {}  # seq -> worker, for every task that is neither delivered nor void
        self._unanswered_tasks: dict[int, Task] = {}
        self._reorder: ReorderBuffer[Deliver] = ReorderBuffer()
        self._send_seq = 0
        self._recovery = Reassignment(
            workers,
            max_restarts,
            concurrent=concurrent,
            any_worker=assignment == "least_loaded" and not iterable,
        )
        self._lane_of = lane_of
        self._serves_streams = False  # whether the copies of the dataset are streams, and not the workers'
        self._next_worker = first_worker  # round robin: the worker that gets the next task
        self._offers_ended = False
        self.over = False
        """Whether `Finish` or `Fail` was issued."""

    # -------------------------------------------------------------------------------------------- reading

    @property
    def outstanding(self) -> dict[int, Task]:
        """Tasks that workers have not answered yet, by sequence number (a copy)."""
        return dict(self._unanswered_tasks)

    @property
    def head(self) -> tuple[Task, int] | None:
        """The task that the consumer waits for, and its worker; None if no worker has such a task."""
        # Out of order: the task that was assigned first. No task has the number -1.
        seq = self._reorder.next_seq if self.in_order else next(iter(self._unanswered_tasks), -1)
        task = self._unanswered_tasks.get(seq)
        return None if task is None else (task, self._owner[seq])

    def copy(self, worker: int, task: int) -> int:  # noqa: ARG002 - the streams' scheduler looks at it
        """The copy of the dataset that makes a task of the worker that is not answered."""
        return worker

    def unanswered(self, worker: int) -> int:
        """Number of tasks that the worker has not answered."""
        return self._unanswered[worker]

    def replaces(self, worker: int) -> bool:
        """Whether the worker is being replaced, or its replacement has a suspect alone."""
        return not self._recovery.free(worker)

    @property
    def undelivered(self) -> int:
        """Tasks whose outcome the consumer has not taken yet."""
        return len(self._owner)

    def __repr__(self) -> str:
        return (
            f"<Scheduler epoch={self.epoch} sent={self._send_seq} unanswered={len(self._unanswered_tasks)} "
            f"undelivered={len(self._owner)} next={self._reorder.next_seq} over={self.over}>"
        )

    # -------------------------------------------------------------------------------------------- deciding

    def abandon(self) -> list[Deliver]:
        """Give the epoch up. Returns the outcomes that were held back and will not be delivered."""
        self.over = True
        return self._reorder.drain()

    def started(self) -> list[Action]:
        """The epoch begins; every worker can take tasks."""
        if self.over:
            return []
        return self._next_of_streams() if self.iterable else self._pull(self.credits * self.workers)

    def _next_of_streams(self) -> list[Action]:
        """Offer the tasks for which the workers that still have data have credits."""
        due = self.credits * sum(self._active) - len(self._owner)
        return [action for _ in range(due) for action in self.offered(None)]

    def offered(self, index: Any) -> list[Action]:
        """The sampler gave the index of one batch.

        Raises:
            ValueError: it is beyond the credits, or behind the sampler's end.
        """
        if self.over:
            return []
        if self._offers_ended:
            raise ValueError(f"index {index!r} was offered after the sampler had ended")
        if len(self._owner) >= self._most:
            raise ValueError(
                f"a task was offered beyond the credits: {len(self._owner)} undelivered, "
                f"{self._most_credits} credits x {self.workers} workers, "
                f"{self._most - self._most_credits * self.workers} ahead"
            )
        self._asked -= 1
        if self._lane_of is not None:
            self._next_worker = self._lane_of(index, self.workers) % self.workers
        worker = self._choose()
        if worker is None:
            return []  # every worker's copy of the iterable dataset has ended
        seq = self._send_seq
        self._send_seq += 1
        task = Task(self.epoch, seq, index)
        self._owner[seq] = worker
        self._unanswered_tasks[seq] = task
        self._load[worker] += 1
        self._unanswered[worker] += 1
        # Counted as the worker's already, although it is not sent yet: the other rules see where the task will be made.
        if self._recovery.active and not self._recovery.free(worker):
            self._recovery.wait(worker, seq)
            return []
        return [Assign(worker, task)]

    def sampler_ended(self) -> list[Action]:
        """The sampler has no more indices in this epoch."""
        if self.over:
            return []
        self._offers_ended = True
        return self._finish_if_done()

    def _choose(self) -> int | None:
        worker = None
        if self.assignment == "least_loaded":
            worker = self._least_unanswered()
        else:
            for _ in range(self.workers):
                turn = self._next_worker
                # Also past a worker that gets nothing: torch's turn goes on as well.
                self._next_worker = (turn + 1) % self.workers
                if self._active[turn] and (self.in_order or self._load[turn] < self.credits):
                    worker = turn
                    break
        if worker is not None or self.iterable:
            return worker
        # An index that was pulled before `credits` was lowered: to the least loaded worker.
        return min(filter(self._active.__getitem__, range(self.workers)), key=self._load.__getitem__, default=None)

    def _least_unanswered(self) -> int | None:
        load, share = self._load, self._share
        # Nearly always there is one that may have more among the workers with the fewest: found in C, without a list.
        least = min(range(len(load)), key=self._unanswered.__getitem__)
        if self._active[least] and load[least] < share and not self._recovery.active:
            return least
        candidates = [w for w, active in enumerate(self._active) if active and load[w] < share]
        # Of workers that are being replaced, or have a suspect alone, only if there are no others: there the task must
        # wait.
        if self._recovery.active:
            candidates = [w for w in candidates if self._recovery.free(w)] or candidates
        return min(candidates, key=self._unanswered.__getitem__, default=None)

    def completed(self, worker: int, seq: int, outcome: Any) -> list[Action]:
        """A worker answered a task. `outcome` is opaque here: a batch's descriptor, or a user's error.

        Raises:
            ValueError: no such task is outstanding.
        """
        if self.over:
            return []
        if seq not in self._unanswered_tasks:
            raise ValueError(f"task {seq} was answered but not outstanding (worker {worker})")
        return self._outcome(seq, outcome)

    def _outcome(self, seq: int, outcome: Any) -> list[Action]:
        task = self._unanswered_tasks.pop(seq)
        worker = self._owner[seq]
        self._unanswered[worker] -= 1
        deliver = Deliver(seq, worker, outcome, task.index if self._serves_streams else None)
        waiting: list[Action] = []
        if self._recovery.active:
            self._recovery.answered(worker, seq)
            waiting = self._send_waiting(worker)
        ready = self._reorder.push(seq, deliver) if self.in_order else [deliver]
        if not self.in_order:
            # Nothing is held back, so only the delivery of the batch makes room for another index.
            return [*ready, *waiting]
        # A held-back batch makes room at once, within the window. A batch in order makes room only once it is taken.
        more = [] if ready or self.iterable else self._pull_ahead()
        # A pull comes last: the pipeline may offer an index, and so assign its task, before it carries out the rest.
        return [*ready, *waiting, *more]

    def delivered(self, seq: int) -> list[Action]:
        """The consumer took this task's outcome, which returns its credit. Errors as `completed`."""
        if self.over:
            return []
        worker = None if seq in self._unanswered_tasks else self._owner.pop(seq, None)
        if worker is None:
            raise ValueError(f"task {seq} was delivered twice, or before it was answered")
        self._load[worker] -= 1
        if self.iterable:
            return self._next_of_streams() + self._finish_if_done()
        if self._offers_ended:
            return self._finish_if_done()
        if self.assignment == "least_loaded":
            return self._pull_ahead()
        # Not simply 1: `credits`, or the number of workers, may have changed since the last delivery.
        number = self.credits * self.workers - len(self._owner) - self._asked
        if number <= 0:
            return []
        self._asked += number
        return [Pull(number)]

    def _pull(self, number: int) -> list[Action]:
        self._asked += number
        return [Pull(number)]

    def _pull_ahead(self) -> list[Action]:
        """Request the indices for which there is a credit now, or an idle worker that may run ahead."""
        if self.assignment == "round_robin" or self._offers_ended:
            return []
        credits = self.credits * self.workers
        # Undelivered tasks and requested indices stay within the credits, so that a slow consumer stops all workers.
        # Batches that an earlier batch holds back do not count, up to the window, or a slow batch would stop them too.
        room = credits + min(len(self._reorder), self.reorder_window) - len(self._owner) - self._asked
        # With batches held back, `room` alone would let the workers have more unanswered tasks than credits.
        idle = credits - len(self._unanswered_tasks) - self._asked
        number = min(room, idle)
        return self._pull(number) if number > 0 else []

    # ------------------------------------------------------------------------------------------- recovering

    def died(self, event: Died) -> list[Action]:
        """A worker has ended unexpectedly; all its earlier answers have been reported."""
        if self.over:
            return []
        worker, recovery = event.worker, self._recovery
        # In the order in which it got them: `recovery` blames the first.
        lost = [seq for seq in self._unanswered_tasks if self._owner[seq] == worker]
        poisoned = recovery.died(event, lost)
        # For its stream, for indices that are still to come, or for tasks that are to be made again.
        more = self._active[worker] and (self.iterable or not self._offers_ended)
        needed = more or len(lost) > len(poisoned)
        if poisoned and (self.iterable or not recovery.may_replace(worker)):
            # A stream cannot go on behind a batch that it cannot make.
            task = self._unanswered_tasks[poisoned[0]]
            why = recovery.advice(worker) if not recovery.may_replace(worker) else "A stream cannot go on behind it."
            return self.fail(quarantined(Poisoned(task, recovery.deaths(task.seq)), f"The epoch ends with it. {why}"))
        # The error has advice of its own where a replacement would die of the same cause.
        if event.error.advice:
            return self.fail(event.error)
        if not recovery.may_replace(worker):
            return self.fail(event.error.with_advice(self._was_at() + recovery.advice(worker)))
        if needed and event.obstacle:
            return self.fail(event.error.with_advice(event.obstacle))
        actions: list[Action] = []
        if needed:
            # Before its tasks are assigned again: the worker is still active, and only `down` keeps them from it.
            recovery.down(worker)
            actions.append(Replace(worker))
        else:
            # No task is left for a replacement: the sampler, or this worker's stream, has ended.
            self._active[worker] = False
        for seq in lost:
            if seq not in poisoned:
                actions += self._assign_again(seq, worker)
        # Last: a poisoned task makes room for another index, whose task must queue behind the reassigned tasks.
        for seq in poisoned:
            actions += self._outcome(seq, Poisoned(self._unanswered_tasks[seq], recovery.deaths(seq)))
        return actions

    def replaced(self, worker: int) -> list[Action]:
        """A new process has replaced the worker."""
        if self.over:
            return []
        self._recovery.up(worker)
        return self._send_waiting(worker)

    def _assign_again(self, seq: int, worker: int) -> list[Action]:
        """Assign the task to the worker that takes it over; else it waits for the dead worker's replacement."""
        # Popped and put back: a worker's tasks must be listed in the order in which it gets them.
        task = self._unanswered_tasks[seq] = self._unanswered_tasks.pop(seq)
        other = self._recovery.taken_over_by(seq, self._active, self._unanswered)
        if other is None:
            # The owner stays the same: the replacement has the dead worker's number.
            self._recovery.wait(worker, seq)
            return []
        self._owner[seq] = other
        for each, change in ((worker, -1), (other, 1)):
            self._load[each] += change
            self._unanswered[each] += change
        return [Assign(other, task)]

    def _send_waiting(self, worker: int) -> list[Action]:
        recovery, actions = self._recovery, list[Action]()
        while (seq := recovery.next_for(worker, recovery.in_hand(worker, self._unanswered[worker]))) is not None:
            actions.append(Assign(worker, self._unanswered_tasks[seq], recovery.suspected(seq)))
        return actions

    def fail(self, error: BaseException) -> list[Action]:
        """The epoch cannot continue: for example no descriptors are left, or a stream is corrupt."""
        if self.over:
            return []
        self.over = True
        return [Fail(error)]

    def _was_at(self) -> str:
        """Describe the tasks of the worker that died last, for the error."""
        struck = self._recovery.struck
        if not struck or self.iterable:
            return ""
        indices = shortened(bare_index(self._unanswered_tasks[struck[0]].index))
        if len(struck) == 1:
            return f"It was at the task for indices {indices}. "
        return f"It was at {len(struck)} tasks, the first of them for indices {indices}. "

    def exhausted(self, worker: int, task: int) -> list[Action]:  # noqa: ARG002 - the streams' scheduler looks at it
        """A worker's copy of an iterable dataset ended at this task; it ignores the tasks that follow. Of a worker that
        serves several streams: the task's stream ended, and the worker answers the tasks that follow.
        """
        if self.over:
            return []
        if not self.iterable:
            raise ValueError(f"worker {worker} says that its stream has ended, but the dataset is none")
        self._active[worker] = False
        self._recovery.void(worker)
        actions: list[Action] = []
        # Its answered tasks stay: the consumer still takes those batches. A list, because the loop changes `_owner`.
        for seq in [s for s, w in self._owner.items() if w == worker and s in self._unanswered_tasks]:
            del self._owner[seq], self._unanswered_tasks[seq]
            self._load[worker] -= 1
            self._unanswered[worker] -= 1
            self._recovery.answered(worker, seq)
            if self.in_order:
                # Otherwise later batches would wait for a number that never comes.
                actions += self._reorder.skip(seq)
        return actions + self._next_of_streams() + self._finish_if_done()

    def _finish_if_done(self) -> list[Action]:
        no_more = not any(self._active) if self.iterable else self._offers_ended
        # `_owner` has a task until it is delivered, so `Finish` follows the last delivery.
        if self._owner or not no_more:
            return []
        self.over = True
        return [Finish()]
