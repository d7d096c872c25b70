"""Assigns the tasks of a dataset that is a number of streams, of which each worker serves some. Pure.

Data path: [stream_scheduler] -> pool -> worker -> ring -> [stream_scheduler: reorder] -> delivery -> consumer.

A task is for a stream, which is its index, and goes to the worker that serves it. The streams have the turns that
`Scheduler` gives to workers, so the sequence of batches does not depend on the workers. The credits are per worker: as
many tasks are outstanding as for any dataset.

A stream that has ended says so at each of the tasks that it still has. Each is replaced by a task for another stream.
"""

from __future__ import annotations

from typing import Any

from asyncloader.epoch.scheduler import Scheduler
from asyncloader.epoch.stream_turns import StreamTurns
from asyncloader.errors import TaskQuarantined
from asyncloader.events import Action, Exhausted


class StreamScheduler(Scheduler):
    """A `Scheduler` of streams.

    Args:
        turns: the streams.
        options: those of `Scheduler`; `iterable` is True.
    """

    def __init__(self, turns: StreamTurns, **options: Any) -> None:
        super().__init__(iterable=True, **options)
        self._turns = turns
        self._serves_streams = True
        self._chosen = 0  # the worker of the task that is offered

    def copy(self, worker: int, task: int) -> int:
        """The stream that makes the task with this number."""
        found = self._unanswered_tasks.get(task)
        return worker if found is None else int(found.index)

    def offered(self, index: Any) -> list[Action]:
        """`handle` for `Offered`, of any index: the next stream gets a task."""
        del index
        if self.over:
            return []
        share = 0 if self.in_order else max(1, self.credits * self.workers // max(1, self._turns.left))
        stream = self._turns.give(self._send_seq, share)
        if stream is None:
            return []
        self._chosen = self._turns.worker(stream)
        return super().offered(stream)

    def _choose(self) -> int:
        return self._chosen

    def delivered(self, seq: int) -> list[Action]:
        """`handle` for `Delivered`."""
        # Else it is refused below.
        if not self.over and seq in self._owner and seq not in self._unanswered_tasks:
            self._turns.settle(seq)
        return super().delivered(seq)

    def _fail(self, error: BaseException) -> list[Action]:
        if isinstance(error, TaskQuarantined):
            error.indices = None  # a stream is no index
        return super()._fail(error)

    def _exhausted(self, event: Exhausted) -> list[Action]:
        worker, seq = event
        task = self._unanswered_tasks.pop(seq, None)
        if task is None:
            raise ValueError(f"task {seq} was answered but not outstanding (worker {worker})")
        del self._owner[seq]
        self._load[worker] -= 1
        self._count(worker, -1)
        self._turns.settle(seq)
        self._turns.end(task.index)
        self._active[worker] = self._turns.serves(worker)
        actions: list[Action] = []
        if self._recovery.active:
            self._recovery.answered(worker, seq)
            actions += self._send_waiting(worker)
        if self.in_order:
            # Otherwise later batches would wait for a number that never comes.
            actions += self._reorder.skip(seq)
        if self._failed:
            actions += self._after_failure(worker)
        return actions + self.offered(None) + self._finish_if_done()
