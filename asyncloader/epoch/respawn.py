"""Starts replacements for workers that died, in a thread where a process may be started.

Data path: pipeline -> [respawn] -> pool.

A forked replacement is made in the iterating thread, inside `next()`, as the first workers were. The async loader's
loop runs in that thread. The sync loader's loop does not, so it queues the request for `next()` and wakes it. Workers
that are spawned, or started by a fork server, are made at once in a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.pool import WorkerPool
from asyncloader.workers.source import WorkerHandle


class Request(NamedTuple):
    """A request to replace a worker.

    Attributes:
        worker: the worker's number.
        start: where the replacement begins.
        rng_state: the RNG state of its predecessor, if that could send it; else empty.
        attachment: the pool's number of this epoch.
    """

    worker: int
    start: EpochStart
    rng_state: bytes
    attachment: int

    def setup(self, common: WorkerSetup) -> WorkerSetup:
        """The worker's setup, from that of the pool."""
        starts = list(common.starts)
        starts[self.worker] = self.start
        return common._replace(starts=starts, attachment=self.attachment, rng_state=self.rng_state)


class WorkerRespawner:
    """Makes one epoch's replacements.

    Args:
        pool: the workers.
        setup: gives the setup of the pool's workers; None once the iterator was freed, which it must not keep alive.
        wake: makes the iterating thread call `work`; None if the loop runs in the iterating thread.
    """

    def __init__(
        self, pool: WorkerPool, setup: Callable[[], WorkerSetup | None], wake: Callable[[], None] | None
    ) -> None:
        self._pool = pool
        self._setup = setup
        self._wake = wake
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: Callable[[WorkerHandle | Exception], None] | None = None
        self.requests: deque[Request] = deque()
        """Pending requests, for the iterating thread."""

    def attach(self, done: Callable[[WorkerHandle | Exception], None]) -> None:
        """Set the callback for new processes and errors. It runs in the loop's thread, where this is called, too."""
        self._loop, self._done = asyncio.get_running_loop(), done

    def request(self, request: Request) -> None:
        """Request a process. In the loop's thread; returns at once, unless it forks here."""
        # A fork copies every lock that another thread holds at that moment, so it waits for `next()`: there the user's
        # code, and the libraries that it calls, are at rest. Other start methods copy nothing.
        if self._pool.start_method != "fork":
            threading.Thread(target=self._make, args=(request,), name="asyncloader-start", daemon=True).start()
            return
        # In the list before the wake-up: the iterating thread looks into the list as soon as it is woken.
        self.requests.append(request)
        if self._wake is None:
            self.work()
        else:
            self._wake()

    def work(self) -> None:
        """Make the requested processes. In the iterating thread."""
        # Until the list is empty. Not `while self.requests`: `close`, in another thread, may clear it between any two
        # steps.
        with contextlib.suppress(IndexError):
            while True:
                self._make(self.requests[0])
                # Removed only now: after Ctrl-C the next call makes it.
                self.requests.popleft()

    def _make(self, request: Request) -> None:
        made: WorkerHandle | Exception
        try:
            setup = self._setup()
            if setup is None:
                return
            (made,) = self._pool.make([request.worker], request.setup(setup))
        except Exception as error:
            made = error
        loop = self._loop
        assert loop is not None  # requests come after `attach`
        try:
            loop.call_soon_threadsafe(self._give, made)
        except RuntimeError:  # the loop is closed
            self._discard(made)

    def _give(self, made: WorkerHandle | Exception) -> None:
        if self._done is None:
            # `close` came while the process was made. Not `_discard`, which may hold up the loop for seconds.
            self.discard_soon(made)
        else:
            self._done(made)

    def discard_soon(self, made: WorkerHandle | Exception) -> None:
        """Discard a process that is not needed, in a thread that waits for its end."""
        threading.Thread(target=self._discard, args=(made,), name="asyncloader-stop", daemon=True).start()

    def _discard(self, made: WorkerHandle | Exception) -> None:
        if not isinstance(made, Exception):
            self._pool.discard(made)

    def close(self) -> None:
        """Discard the processes that are still being made. In the loop's thread."""
        self._done = None
        self.requests.clear()


def setup_of(iterator: Any) -> Callable[[], WorkerSetup | None]:
    """Return a function that gives the `_setup` of an iterator, without keeping it; None once it was freed."""
    known = weakref.ref(iterator)
    return lambda: getattr(known(), "_setup", None)
