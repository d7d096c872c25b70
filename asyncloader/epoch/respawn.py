"""Has processes made for workers that died, where a process may be started.

Data path: pipeline -> [replacing] -> pool.

*Where.* A fork copies the whole process at one moment, with every lock that some other thread holds then. So a forked
replacement is made in the thread that iterates, inside `next()`, as the first workers were: there the user's code, and
the libraries that it calls, are known to be at rest. The async loader's loop runs in that thread. The sync facade's
does not: it leaves the request for `next()`, and wakes it. Spawned workers, and those of a fork server, are started in
a thread of their own, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.process import WorkerProcess

__all__ = ["Request", "WorkerRespawner", "weakly"]


class Request(NamedTuple):
    """A worker's place is empty.

    Attributes:
        worker: its number.
        start: what the replacement begins with.
        handover: the random numbers' state of the worker before, if it could give it.
        attachment: the pool's number for this epoch.
    """

    worker: int
    start: EpochStart
    handover: bytes
    attachment: int

    def setup(self, common: WorkerSetup) -> WorkerSetup:
        """The set-up for the replacement, from that of the pool."""
        starts = list(common.starts)
        starts[self.worker] = self.start
        return common._replace(starts=starts, attachment=self.attachment, handover=self.handover)


class WorkerRespawner:
    """Makes replacements for one epoch.

    Args:
        pool: the workers.
        setup: gives the set-up for this request; None once there is no iterator any more. It must not keep the iterator
            alive.
        wake: has the iterating thread call `work`; None: the loop's thread is the iterating one.
    """

    def __init__(
        self, pool: WorkerPool, setup: Callable[[Request], WorkerSetup | None], wake: Callable[[], None] | None
    ) -> None:
        self._pool = pool
        self._setup = setup
        self._wake = wake
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: Callable[[WorkerProcess | Exception], None] | None = None
        self.requests: deque[Request] = deque()
        """For the iterating thread."""

    def attach(self, done: Callable[[WorkerProcess | Exception], None]) -> None:
        """In the loop's thread. `done` is called there with each process, or with why there is none."""
        self._loop, self._done = asyncio.get_running_loop(), done

    def request(self, request: Request) -> None:
        """Have a process made. In the loop's thread; returns at once, but for a fork where that is the place for it."""
        if self._pool.start_method != "fork":
            threading.Thread(target=self._make, args=(request,), name="asyncloader-start", daemon=True).start()
            return
        self.requests.append(request)
        if self._wake is None:
            self.work()
        else:
            self._wake()

    def work(self) -> None:
        """Make what was requested. In the thread that iterates."""
        while self.requests:
            self._make(self.requests[0])
            # Now: Ctrl-C in the middle leaves it to the next call. `close`, in another thread, may have been faster.
            with contextlib.suppress(IndexError):
                self.requests.popleft()

    def _make(self, request: Request) -> None:
        made: WorkerProcess | Exception
        try:
            setup = self._setup(request)
            if setup is None:
                return
            (made,) = self._pool.make([request.worker], setup)
        except Exception as error:
            made = error
        loop = self._loop
        assert loop is not None  # requests come after `attach`
        try:
            loop.call_soon_threadsafe(self._give, made)
        except RuntimeError:  # the loop is closed
            self._discard(made)

    def _give(self, made: WorkerProcess | Exception) -> None:
        if self._done is None:
            self.discard_soon(made)
        else:
            self._done(made)

    def discard_soon(self, made: WorkerProcess | Exception) -> None:
        """Nobody wants it. In a thread, which waits for the process's end."""
        threading.Thread(target=self._discard, args=(made,), name="asyncloader-stop", daemon=True).start()

    def _discard(self, made: WorkerProcess | Exception) -> None:
        if isinstance(made, WorkerProcess):
            self._pool.discard(made)

    def close(self) -> None:
        """Processes that are still being made are for nobody. In the loop's thread."""
        self._done = None
        self.requests.clear()


def weakly(setup: Callable[[Request], WorkerSetup]) -> Callable[[Request], WorkerSetup | None]:
    """A bound method that does not keep its object alive: None once that is gone."""
    method = weakref.WeakMethod(setup)

    def call(request: Request) -> WorkerSetup | None:
        alive = method()
        return None if alive is None else alive(request)

    return call
