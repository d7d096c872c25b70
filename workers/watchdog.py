"""Tells of workers that take too long over one task.

Data path: beside the pool, in the loop's thread; only where a `worker_timeout` is set.

One timer for all workers. It is set for the first deadline that there could be, and looks when it fires whether that
still stands: answers do not touch it. While nobody has a task there is none.

A worker is not blamed for our own delay: what it has sent and nobody has read is read first; and if the loop itself was
held up (by a long call in its thread, or because the whole job was suspended), everybody's time begins anew. Nor for
that of others: while it waits for an assignment of shards, which depends on other workers and on the consumer, no time
counts. That hides no worker that hangs: it asks in the task that it is at, and the others are past that task sooner or
later, or are late themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["START_SECONDS", "Watch"]

_RESOLUTION = 0.001  # seconds by which a timer of uvloop may fire too early
_HELD_UP = 1.0  # seconds that the loop's timer may be late before that says something about the loop

START_SECONDS = 60.0
"""Seconds that a worker's start-up has at least: importing torch, unpickling the dataset, reading a stream again."""


class Watch:
    """Deadlines of a pool's workers.

    Args:
        loop: the loop whose thread calls everything here.
        seconds: for one task.
        workers: their number.
        concurrent: a worker is at all of its tasks at a time; else at the first that it has not answered.
        catch_up: called with a worker's number before it is judged: reads what it has sent.
        late: called with a worker's number and the seconds that it took so far; the worker has no tasks afterwards.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        workers: int,
        *,
        concurrent: bool,
        catch_up: Callable[[int], None],
        late: Callable[[int, float], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._concurrent = concurrent
        self._catch_up = catch_up
        self._late = late
        self._tasks: list[dict[int, float]] = [{} for _ in range(workers)]  # task -> when it was given
        self._since = [loop.time()] * workers  # the last start, or answer
        self._starting = [True] * workers
        self._waiting = [False] * workers  # for a lease
        self._timer: asyncio.Handle | None = None
        self._due = (
            0.0  # when it fires: uvloop gives a handle that does not tell if that is less than a millisecond away
        )

    def starts(self, worker: int) -> None:
        """A new process starts, or an epoch: the user's start-up code runs now."""
        self._since[worker] = self._loop.time()
        self._starting[worker] = True
        self._waiting[worker] = False

    def cleared(self, worker: int) -> None:
        """The worker is past one more task of the epoch before, or past all of them: its start-up code begins only
        then.
        """
        self._since[worker] = self._loop.time()

    def started(self, worker: int) -> None:
        """That code has run."""
        self._since[worker] = self._loop.time()
        self._starting[worker] = False
        self._arm()

    def assigned(self, worker: int, seq: int) -> None:
        """The worker was given a task."""
        now = self._tasks[worker][seq] = self._loop.time()
        self._arm_by(now)

    def asked(self, worker: int) -> None:
        """The worker asked for an assignment of shards."""
        self._waiting[worker] = True

    def assignment_sent(self, worker: int) -> None:
        """It got the answer."""
        self._waiting[worker] = False
        now = self._since[worker] = self._loop.time()
        self._arm_by(now)

    def answered(self, worker: int, seq: int) -> None:
        """The worker answered a task."""
        self._tasks[worker].pop(seq, None)
        if not self._concurrent:
            self._since[worker] = self._loop.time()

    def forget(self, worker: int) -> None:
        """The worker is gone, or its tasks are void."""
        self._tasks[worker].clear()

    def close(self) -> None:
        """No deadlines any more."""
        for tasks in self._tasks:
            tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deadline(self, worker: int) -> float | None:
        tasks = self._tasks[worker]
        if not tasks or self._waiting[worker]:
            return None
        if self._starting[worker]:
            return self._since[worker] + max(self._seconds, START_SECONDS)
        return max(next(iter(tasks.values())), self._since[worker]) + self._seconds

    def _arm_by(self, now: float) -> None:
        """See to it that the timer is there for a worker's deadline that is counted from now."""
        if self._timer is None or self._due > now + self._seconds:  # it waits for another's start-up
            self._arm()

    def _arm(self) -> None:
        deadlines = [due for worker in range(len(self._tasks)) if (due := self._deadline(worker)) is not None]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadlines:
            self._due = min(deadlines)
            self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        reached = now + _RESOLUTION
        self._timer = None
        if now - self._due > _HELD_UP:
            self._since = [now] * len(self._since)
            self._arm()
            return
        for worker in range(len(self._tasks)):
            due = self._deadline(worker)
            if due is not None and due <= reached:
                self._catch_up(worker)
                due = self._deadline(worker)
            if due is not None and due <= reached:
                taken = now - max(next(iter(self._tasks[worker].values())), self._since[worker])
                self.forget(worker)
                self._late(worker, taken)
        self._arm()
