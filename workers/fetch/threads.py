"""A pool of daemon threads that run jobs from one queue and report results to an event loop.

Data path: worker: fetch -> [threads: blocking reads, decoding] -> collate -> codec -> ring. Also without workers.

The executor of the standard library is not used because it wakes the loop for every job, and at exit waits for its
jobs, even for one that never ends. These threads are daemons, so a stuck job delays neither the end of the loader nor
that of the process. They wake the loop once for all results that are ready by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

from asyncloader.workers.fetch.data_end import not_the_end

_Job = Callable[[], None]


class Failure(NamedTuple):
    """In place of a sample: what making it raised."""

    error: Exception


class _Notices:
    """Calls that threads have an event loop make. Jobs and the loop refer to this, and not to the `JobThreads`, whose
    threads would otherwise live until a loop that is stopped is closed.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], list[Any]]] = deque()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send calls to this loop from now on."""
        if self._loop is not loop:
            self._loop = loop
            # A wake-up of the loop before may never have run, because that loop was closed.
            self._woken = False

    def send(self, function: Callable[..., None], arguments: list[Any]) -> None:
        """Have the loop call `function` with these arguments, which are taken out of the list. Any thread. Does nothing
        if the loop is closed.
        """
        # Append before reading the flag; `_drain` clears the flag before reading. So no call is missed.
        self._calls.append((function, arguments))
        loop = self._loop
        if not self._woken and loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._woken = False
        calls = self._calls
        while calls:
            function, arguments = calls.popleft()
            function(*arguments)
            # The thread that sent them may not have left `send` yet, and still refers to this list. It must not keep
            # an error, and with it the frames of the code that catches it, after that code has dropped it.
            arguments.clear()


class JobThreads:
    """At most `threads` threads, started as needed. They end with `close`, or when this object is garbage.

    Used in one loop's thread, except `put` and `notify`, which any thread may call.

    Args:
        threads: the maximum, at least 1.
        name: prefix of the threads' names.

    Attributes:
        attach: `_Notices.attach` of the calls below.
        notify: `_Notices.send`: has the loop call a function.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._started = 0
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        notices = _Notices()
        self.attach, self.notify = notices.attach, notices.send
        self._lock = threading.Lock()  # for starting threads: several threads may call `put`

    @property
    def most(self) -> int:
        """How many jobs may run at a time, at least 1."""
        return max(1, self._most)

    def put(self, job: _Job) -> None:
        """Have a thread call `job`, in the order of the calls. The job may not raise. After `close`: a no-op.

        Raises:
            RuntimeError: not a single thread can be started.
        """
        if self._closed:
            return  # its result is not wanted
        # One more thread per job up to the maximum: to know whether one is idle would take another lock.
        if self._started < self._most:
            with self._lock:
                if self._started < self._most:  # another thread may have started the last between the two looks
                    self._start_one()
        self._jobs.put(job)

    def _start_one(self) -> None:
        name = f"{self._name}-{self._started + 1}"
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: those that exist do all
            if not self._threads:
                raise
            self._most = self._started
        else:
            self._started += 1
            self._threads.append(thread)

    def call(
        self, function: Callable[[Any], Any], argument: Any, context: Context | None = None
    ) -> asyncio.Future[Any]:
        """Call `function` in a thread, in a copy of `context` (default: the current one), and return a future.

        If the future is cancelled before the call begins, the call is skipped.
        """
        loop = asyncio.get_running_loop()
        self.attach(loop)
        future: asyncio.Future[Any] = loop.create_future()
        inner = copy_context() if context is None else context.copy()
        self.put(partial(_call, self.notify, [future], inner, function, argument))
        return future

    def close(self) -> None:
        """Let the threads end once the queued jobs are done. Does not wait."""
        # No lock, because finalizers call it. A thread that is just being started ends when this object is garbage.
        self._closed = True
        self._most = 0  # start no new threads
        self._end_threads()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of each thread, at most this long. After `close`; not in one of them."""
        for thread in self._threads:
            thread.join(seconds)

    def _end_threads(self) -> None:
        for _ in range(self._started):
            self._jobs.put(None)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # `_lock` is set last in `__init__`: without it no thread was started.
        if not exiting() and hasattr(self, "_lock"):
            self._end_threads()


async def run_each(
    threads: JobThreads | None,
    make: Callable[[int], Any],
    contexts: Iterable[Context],
    took: list[float],
    *,
    until_failure: bool,
) -> list[Any]:
    """Return what `make` returns for 0, 1 and so on, one for each context and called in it; or a `Failure`.

    Every thread takes the next when it is done with one: a future for each would cost as much as a quick call. If this
    is cancelled, calls that have not begun are left out, and results of those that have begun are ignored.

    Args:
        threads: None: all are made here.
        make: makes one.
        contexts: different objects. Those of one call may be those of another that has ended.
        took: the seconds of each are added to these; where it is empty, it is filled.
        until_failure: begin no other after one has failed; then results behind the first failure mean nothing.
    """
    left = deque(enumerate(contexts))
    found: list[Any] = [None] * len(left)
    took += [0.0] * (len(left) - len(took))
    caught = Exception if threads is None else BaseException  # SystemExit in a thread must not end the process

    def work(_: object) -> None:
        while left:
            try:
                item, context = left.popleft()
            except IndexError:  # another thread has taken the last
                return
            began = perf_counter()
            try:
                found[item] = context.run(make, item)
                took[item] += perf_counter() - began
            except caught as error:
                stops = not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration)
                found[item] = Failure(not_the_end(error, "the sample's code") if stops else error)  # type: ignore[arg-type]
                if until_failure:
                    left.clear()  # all before it were taken before it, and are made

    if threads is None:
        work(None)
        return found
    jobs = [threads.call(work, None) for _ in range(min(threads.most, len(found)))]
    try:
        for job in jobs:
            await job
    finally:
        # Nothing is left unless this is cancelled: then no thread begins another.
        left.clear()
        for job in jobs:
            job.cancel()
    return found


# The threads refer only to the queue, so an unused JobThreads is garbage, and its finalizer ends them.
def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # before waiting for the next job, because it refers to a sample


def _call(
    notify: Callable[..., None],
    answer: list[Any],
    context: Context,
    function: Callable[[Any], Any],
    argument: Any,
) -> None:
    """Call the function in the thread. `answer` has the future, and gets the call's result or error: the thread refers
    to both by this list alone, so that the loop can take them from it.
    """
    # It may have been cancelled while it waited in the queue.
    if answer[0].cancelled():
        return
    deliver: Callable[[asyncio.Future[Any], Any], None] = _done
    try:
        answer.append(context.run(function, argument))
    except BaseException as error:
        answer.append(error)
        deliver = _failed
    notify(deliver, answer)


def _done(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _failed(future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, (StopIteration, StopAsyncIteration)):  # a future cannot hold the first
        error = not_the_end(error, "a call in a thread")
    future.set_exception(error)
