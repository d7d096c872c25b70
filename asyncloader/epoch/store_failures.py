"""Keeps the tasks at which a store failed until the consumer comes again, and assigns them once more. Pure.

Data path: part of the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncloader.base.events import Action, Assign, StoreFailed, Task

if TYPE_CHECKING:
    from asyncloader.base.events import Deliver
    from asyncloader.epoch.reassignment import Reassignment
    from asyncloader.epoch.reorder import ReorderBuffer


class StoreFailures:
    """The base of `Scheduler`, which has the tasks: how they are assigned again."""

    iterable: bool
    in_order: bool
    over: bool
    _active: list[bool]
    _unanswered: list[int]
    _load: list[int]
    _owner: dict[int, int]
    _unanswered_tasks: dict[int, Task]
    _reorder: ReorderBuffer[Deliver]
    _recovery: Reassignment
    _failed: dict[int, Task]
    _errors: dict[int, Exception]
    _failures: int
    _raised: bool
    _older: set[int]
    _due: set[int]

    def _count(self, worker: int, change: int) -> None:
        raise NotImplementedError

    def failed(self, worker: int, seq: int, error: Exception) -> list[Action]:
        """A store failed at this task. Errors as `completed`."""
        if self.over:
            return []
        if seq not in self._unanswered_tasks:
            raise ValueError(f"task {seq} was answered but not outstanding (worker {worker})")
        worker = self._owner[seq]
        self._failed[seq], self._errors[seq] = self._unanswered_tasks.pop(seq), error
        self._count(worker, -1)
        waiting: list[Action] = []
        if self._recovery.active:
            self._recovery.answered(worker, seq)
            waiting = self._send_waiting(worker)
        if seq in self._older:
            self._older.discard(seq)
            self._due.add(worker)
        return waiting + self._after_failure(worker)

    def again(self, number: int) -> list[Action]:
        """The consumer comes again after this failure."""
        if self.over or not self._raised or number != self._failures:
            return []
        self._raised = False
        self._older = set(self._unanswered_tasks)
        self._due.update(self._owner[seq] for seq in self._failed)
        return [action for worker in sorted(self._due) for action in self._assign_due(worker)]

    def _after_failure(self, worker: int) -> list[Action]:
        """While there are failed tasks, after each answer of a worker."""
        actions = self._assign_due(worker)
        if self._failed and not self._raised and not self._due:
            # In its batch's place. Of a stream at once: other workers may wait for shards that this one asks for first.
            first = min(self._failed)
            if self.iterable or not self.in_order or first == self._reorder.next_seq:
                self._raised = True
                self._failures += 1
                # Taken out: once it is raised its traceback refers to the iterator, which must be freed when dropped.
                actions.append(StoreFailed(self._failures, self._errors.pop(first)))
        return actions

    def _assign_due(self, worker: int) -> list[Action]:
        # A worker reads a stream in order: behind a failure it answers all tasks with the same until it gets the first
        # of them again. A later task that was still on its way would get that one's samples.
        if worker not in self._due or (self.iterable and self._unanswered[worker]):
            return []
        self._due.discard(worker)
        return [action for seq in self._reopen(worker) for action in self._assign_failed(seq)]

    def _reopen(self, worker: int) -> list[int]:
        """Make the failed tasks of a worker unanswered ones, in their order."""
        again = sorted(seq for seq in self._failed if self._owner[seq] == worker)
        for seq in again:
            self._unanswered_tasks[seq] = self._failed.pop(seq)
            self._errors.pop(seq, None)
            self._count(worker, 1)
        return again

    def _assign_failed(self, seq: int) -> list[Action]:
        worker = self._owner[seq]
        if not self._recovery.free(worker):
            self._recovery.wait(worker, seq)
            return []
        return [Assign(worker, self._unanswered_tasks[seq])]

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
            self._count(each, change)
        return [Assign(other, task)]

    def _send_waiting(self, worker: int) -> list[Action]:
        recovery, actions = self._recovery, list[Action]()
        while (seq := recovery.next_for(worker, recovery.in_hand(worker, self._unanswered[worker]))) is not None:
            actions.append(Assign(worker, self._unanswered_tasks[seq], recovery.suspected(seq)))
        return actions
