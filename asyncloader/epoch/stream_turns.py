"""Decides which of a dataset's streams makes the next batch, and how many tasks streams are offered. Pure.

Data path: scheduler -> [stream_turns] -> task; without workers beside the reader.

A dataset that says by `loader_streams` that it is a number of streams gives its batches in turn: one of each stream
that has data left, in the order of the streams' numbers. So the sequence of batches does not depend on the workers,
each of which serves some of the streams.
"""

from __future__ import annotations


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


class StreamTasks:
    """The tasks of an iterable dataset: a new one for each that was delivered, more where credits were raised, none for
    a while where they were lowered.

    Args:
        credits: outstanding tasks per worker at the beginning.
    """

    __slots__ = ("_credits", "_surplus")

    def __init__(self, credits: int) -> None:
        self._credits = credits
        self._surplus = 0  # tasks that are too many; negative: too few

    def begin(self, credits: int) -> None:
        """The first tasks are offered: so many for each worker."""
        self._credits = credits

    def due(self, credits: int, active: int, outstanding: int) -> int:
        """The number of tasks to offer for one that was delivered.

        Args:
            credits: outstanding tasks per worker now.
            active: workers that still have data.
            outstanding: tasks, without the one that was delivered.
        """
        if credits != self._credits:
            self._surplus += (self._credits - credits) * active
            self._credits = credits
        # Workers whose data has ended took tasks along: then there are fewer already.
        if self._surplus > 0 and outstanding >= credits * active:
            self._surplus -= 1
            return 0
        more, self._surplus = -min(0, self._surplus), max(0, self._surplus)
        return 1 + more
