"""Detects workers that take too long over one task.

Data path: beside the pool, in the loop's thread; only with a `worker_timeout`.

There is one timer for all workers, set for the earliest possible deadline. While no worker has a task there is no
timer.

A worker is blamed neither for delays of the main process nor for other workers or a slow consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_RESOLUTION = 0.001  # seconds by which a uvloop timer may fire early
_HELD_UP = 1.0  # seconds of delay of the timer from which on the loop counts as held up

START_SECONDS = 60.0
"""Minimal time limit for a start-up: importing torch, unpickling the dataset, reading a stream again."""


class TaskWatchdog:
    """Tracks the deadlines of a pool's workers.

    Args:
        loop: the event loop; everything here is called in its thread.
        seconds: time limit per task.
        workers: number of workers.
        concurrent: a worker carries out all of its tasks at a time; else only the oldest unanswered one.
        catch_up: called with a worker's id before its deadline is checked: reads the frames that it has sent.
        on_timeout: called with a worker's id and the seconds that its task took so far. Its tasks are forgotten.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        workers: int,
        *,
        concurrent: bool,
        catch_up: Callable[[int], None],
        on_timeout: Callable[[int, float], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._concurrent = concurrent
        self._catch_up = catch_up
        self._on_timeout = on_timeout
        self._tasks: list[dict[int, float]] = [{} for _ in range(workers)]  # task -> time of its assignment
        self._since = [loop.time()] * workers  # time of the last start or answer
        self._starting = [True] * workers
        self._waiting = [False] * workers  # for an assignment from the main process
        self._timer: asyncio.Handle | None = None
        # When the timer fires. Kept here because a uvloop handle reports no time that is less than a millisecond away.
        self._due = 0.0

    def starts(self, worker: int) -> None:
        """A new process or a new epoch starts: the user's start-up code runs now."""
        self._since[worker] = self._loop.time()
        self._starting[worker] = True
        self._waiting[worker] = False

    def cleared(self, worker: int) -> None:
        """The worker is done with a task of an earlier epoch, or with all of them. Its start-up code begins only after
        them, so its time starts again.
        """
        self._since[worker] = self._loop.time()

    def started(self, worker: int) -> None:
        """The user's start-up code is over."""
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
        # The timer stays as it is: when it fires, the deadlines are computed again.
        self._tasks[worker].pop(seq, None)
        if not self._concurrent:
            self._since[worker] = self._loop.time()

    def forget(self, worker: int) -> None:
        """Drop the deadlines of a worker that has ended, or whose tasks are void."""
        self._tasks[worker].clear()

    def close(self) -> None:
        """Drop all deadlines."""
        for tasks in self._tasks:
            tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _deadline(self, worker: int) -> float | None:
        tasks = self._tasks[worker]
        # An assignment may have to wait for other workers, or for a slow consumer: that is not this worker's time. If
        # this worker hangs, it is found nevertheless: the others get past its task, or time out themselves.
        if not tasks or self._waiting[worker]:
            return None
        if self._starting[worker]:
            return self._since[worker] + max(self._seconds, START_SECONDS)
        # The oldest task comes first. A worker with one task at a time began it when it was assigned, or when it had
        # answered the task before, whichever was later. With several at a time an answer does not change `_since`: each
        # task's time counts.
        return max(next(iter(tasks.values())), self._since[worker]) + self._seconds

    def _arm_by(self, now: float) -> None:
        """Make sure that the timer fires early enough for a deadline that counts from now."""
        # A deadline that counts from now is the latest of all, except for the start-ups, which have START_SECONDS or
        # more.
        if self._timer is None or self._due > now + self._seconds:  # it is set for another worker's start-up
            self._arm()

    def _arm(self) -> None:
        deadlines = [due for worker in range(len(self._tasks)) if (due := self._deadline(worker)) is not None]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadlines:
            self._due = min(deadlines)
            self._timer = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        reached = now + _RESOLUTION
        self._timer = None
        # The loop itself was held up, by a long call in its thread, or because the whole job was suspended: the workers
        # may have been suspended with it, so their times start again.
        if now - self._due > _HELD_UP:
            self._since = [now] * len(self._since)
            self._arm()
            return
        for worker in range(len(self._tasks)):
            due = self._deadline(worker)
            if due is not None and due <= reached:
                # Its answer may lie in the socket, unread because this thread was busy.
                self._catch_up(worker)
                due = self._deadline(worker)
            if due is not None and due <= reached:
                # A start-up is not a task's: tasks may have been assigned at its end only.
                began = self._since[worker]
                if not self._starting[worker]:
                    began = max(next(iter(self._tasks[worker].values())), began)
                taken = now - began
                # Before `_arm` below, which would otherwise set the timer for a worker that is being killed.
                self.forget(worker)
                self._on_timeout(worker, taken)
        self._arm()
