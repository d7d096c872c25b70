"""Threads that take jobs from one line, and tell a loop what came of them.

Data path: worker: fetch -> [job_threads: blocking reads, decoding] -> collate -> codec -> ring. Also without workers.

Not an executor of the standard library: that wakes the loop for every job, and at exit waits for the jobs that it has,
also for one that never ends. These threads are daemons: a job that is stuck holds up neither the loader's end nor the
process's. They wake the loop once for all that was done by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["JobThreads"]

_Job = Callable[[], None]


class JobThreads:
    """At most `threads` threads, started as they are needed; they end with `close`, or when nobody has this object.

    Used in one loop's thread, but for `put` and `notify`, which any may call.

    Args:
        threads: how many, at least 1.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._started = 0
        self._closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._notices: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # for starting threads: jobs may be put from several

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """What is told from now on is told to this loop."""
        if self._loop is not loop:
            self._loop = loop
            self._woken = False

    def put(self, job: _Job) -> None:
        """Have a thread call `job`, after all that were put before were taken. The job may not raise. Once closed:
        nothing.
        """
        if self._closed:
            return  # nobody waits for it
        self._jobs.put(job)
        # A thread a job until there are enough: whether one of them is idle cannot be known without a lock of its own.
        if self._started < self._most:
            with self._lock:
                if self._started >= self._most:
                    return
                self._started += 1
                thread = threading.Thread(
                    target=_work, args=(self._jobs,), name=f"{self._name}-{self._started}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had: those that there are must do, or this one
                    self._started -= 1
                    self._most = max(1, self._started)
                    alone = not self._started
                else:
                    return
            if alone:
                self._work_here()

    def _work_here(self) -> None:
        with contextlib.suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job()

    def notify(self, function: Callable[..., None], *args: Any) -> None:
        """Have the loop call `function`. From a thread; a loop that is closed is told nothing."""
        # Appended first, and looked at after the flag was cleared (`_drain_notices`): what comes between is not missed.
        self._notices.append((function, args))
        loop = self._loop
        if not self._woken and loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._drain_notices)

    def _drain_notices(self) -> None:
        self._woken = False
        told = self._notices
        while told:
            function, args = told.popleft()
            function(*args)

    def call(
        self, function: Callable[[Any], Any], argument: Any, context: Context | None = None
    ) -> asyncio.Future[Any]:
        """What `function` gives, called in a thread in a copy of this context (default: the present one).

        A future that is cancelled keeps a call that has not begun from beginning.
        """
        loop = asyncio.get_running_loop()
        self.attach(loop)
        future: asyncio.Future[Any] = loop.create_future()
        inner = copy_context() if context is None else context.copy()

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = inner.run(function, argument)
            except BaseException as error:
                self.notify(_failed, future, error)
                del error
            else:
                self.notify(_done, future, result)

        self.put(job)
        return future

    def close(self) -> None:
        """Let the threads end when they have done what was put before. Does not wait."""
        # No lock: finalizers call it. A thread that is being started this moment ends with this object.
        self._closed = True
        self._most = 0  # no new ones
        self._end_threads()

    def _end_threads(self) -> None:
        for _ in range(self._started):
            self._jobs.put(None)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and hasattr(self, "_lock"):
            self._end_threads()


# The threads refer to the line, and to nothing else: threads that nobody has any more are collected, and end them.
def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # before waiting for the next one: it refers to a sample


def _done(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _failed(future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration | StopAsyncIteration):  # a future cannot carry it; a stream would end by it
        wrapped = RuntimeError(f"a call in a thread raised {type(error).__name__}")
        wrapped.__cause__ = error
        error = wrapped
    future.set_exception(error)
