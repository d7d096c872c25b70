"""Assigns the tasks of a dataset that is a number of streams, of which each worker serves some. Pure.

Data path: [stream_scheduler] -> pool -> worker -> ring -> [stream_scheduler: reorder] -> delivery -> consumer.

A task is for a stream, which is its index, and goes to the worker that serves it. The streams have the turns that
`Scheduler` gives to workers, so the sequence of batches does not depend on the workers. The credits are per worker: as
many tasks are outstanding as for any dataset.

A stream that has ended says so at each of the tasks that it still has. Each is replaced by a task for another stream.
`StreamTurns` is used without workers, too.
"""

from __future__ import annotations

from typing import Any

from asyncloader.base.events import Action
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.errors import TaskQuarantined


class StreamTurns:
    """The streams of one epoch that have data left, and whose turn it is.

    Args:
        streams: their number, at least 1.
        first: the stream whose turn it is first.
        workers: the number of workers, which is at most that of the streams.
    """

    def __init__(self, streams: int, first: int = 0, workers: int = 1) -> None:
        self.left = streams
        """Streams that have data left."""
        self._workers = workers
        # A ring of these streams: each knows its neighbours, so that a stream that ends leaves it in one step.
        self._after = [*range(1, streams), 0]
        self._before = [streams - 1, *range(streams - 1)]
        self._turn = first
        self._ended = [False] * streams
        self._left_of = [len(range(worker, streams, workers)) for worker in range(workers)]
        self._tasks: dict[int, int] = {}  # task -> its stream, until it is settled
        self._load = [0] * streams

    def next(self) -> int | None:
        """Return the stream whose turn it is, and pass the turn on; None if all have ended."""
        if not self.left:
            return None
        stream = self._turn
        self._turn = self._after[stream]
        return stream

    @property
    def turn(self) -> int | None:
        """The stream whose turn it is; None if all have ended."""
        return self._turn if self.left else None

    def passed(self, stream: int) -> None:
        """The turn passes to the stream after this one."""
        self._turn = self._after[stream]

    def give(self, seq: int, share: int) -> int | None:
        """Return the stream that gets this task: the next that has fewer than `share` tasks; None if there is none.

        Args:
            seq: the task's number.
            share: tasks that a stream may have; 0: any number.
        """
        for _ in range(self.left):
            stream = self.next()
            assert stream is not None
            # As torch's turn, it passes a stream that gets nothing.
            if not share or self._load[stream] < share:
                self._tasks[seq] = stream
                self._load[stream] += 1
                return stream
        return None

    def settle(self, seq: int) -> None:
        """The task's batch was delivered, or it has none."""
        self._load[self._tasks.pop(seq)] -= 1

    def end(self, stream: int) -> None:
        """The stream has no data left. Idempotent: the tasks that it still had say so, too."""
        if self._ended[stream]:
            return
        self._ended[stream] = True
        self.left -= 1
        self._left_of[self.worker(stream)] -= 1
        before, after = self._before[stream], self._after[stream]
        self._after[before], self._before[after] = after, before
        if self._turn == stream:
            self._turn = after

    def worker(self, stream: int) -> int:
        """Return the worker that serves the stream."""
        return stream % self._workers

    def serves(self, worker: int) -> bool:
        """Return whether a stream of this worker has data left."""
        return self._left_of[worker] > 0


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
        """The next stream gets a task, whatever the index."""
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
        """`Scheduler.delivered`, which also settles the task of its stream."""
        # Else it is refused below.
        if not self.over and seq in self._owner and seq not in self._unanswered_tasks:
            self._turns.settle(seq)
        return super().delivered(seq)

    def fail(self, error: BaseException) -> list[Action]:
        """`Scheduler.fail`, with an error that names no indices."""
        if isinstance(error, TaskQuarantined):
            error.indices = None  # a stream is no index
        return super().fail(error)

    def exhausted(self, worker: int, task: int) -> list[Action]:
        """A stream ended at this task. It says so at each of the tasks that it still has."""
        if self.over:
            return []
        ended = self._unanswered_tasks.pop(task, None)
        if ended is None:
            raise ValueError(f"task {task} was answered but not outstanding (worker {worker})")
        del self._owner[task]
        self._load[worker] -= 1
        self._unanswered[worker] -= 1
        self._turns.settle(task)
        self._turns.end(ended.index)
        self._active[worker] = self._turns.serves(worker)
        actions: list[Action] = []
        if self._recovery.active:
            self._recovery.answered(worker, task)
            actions += self._send_waiting(worker)
        if self.in_order:
            # Otherwise later batches would wait for a number that never comes.
            actions += self._reorder.skip(task)
        return actions + self._next_of_streams() + self._finish_if_done()
