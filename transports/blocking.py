"""A thread pool for the blocking calls of one transport.

Data path: transport's coroutine -> [blocking: system calls in a thread] -> bytes.

asyncio's default executor is shared with all other code of the process and lives as long as the loop. This pool belongs
to one transport, has a bounded number of threads, works after a fork, and is joined by `aclose`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from asyncloader.base.bridge import in_thread
from asyncloader.base.shielding import shielded
from asyncloader.transports.errors import ReadFailed, TransportClosed, TransportError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BlockingPool:
    """At most `threads` threads, started on demand. `submit` is that of an Executor, for `loop.run_in_executor`.

    Not for several event loops at once: starting the threads takes no lock, so a fork cannot inherit a locked lock.

    Args:
        name: the transport's name, for the threads' names and for errors.
        threads: maximum number of threads, at least 1.

    Attributes:
        closed: whether `aclose` was called.
    """

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.name = name
        self.threads = threads
        self._owner: ThreadPoolExecutor | None = None
        self._owner_pid = 0
        # Executors whose threads exist only in a parent process. They are kept and never used again: the finalizer of
        # an executor would take locks that the parent's threads may have held at the fork.
        self._left_in_parent: list[ThreadPoolExecutor] = []
        self.closed = False
        self._closing: asyncio.Future[None] | None = None

    def check_open(self) -> None:
        """Raise TransportClosed if it is closed."""
        if self.closed:
            raise TransportClosed(f"the {self.name} transport is closed; open another one")

    def submit(self, call: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Queue ``call(*args, **kwargs)`` for a thread. Raises TransportClosed after `aclose`."""
        executor = self._executor()
        try:
            return executor.submit(call, *args, **kwargs)
        except RuntimeError as error:  # no more threads can be started, which says nothing about a sample
            raise ReadFailed(f"the {self.name} transport cannot read in a thread: {error}") from error

    async def run(self, call: Callable[[], _R]) -> _R:
        """Run `call` in a thread and return its result. If the caller is cancelled, a call that has not started is
        dropped.
        """
        return await asyncio.wrap_future(self.submit(call))

    async def acquire(self, call: Callable[[], _R], release: Callable[[_R], object]) -> _R:
        """Run `call` as `run` does, and return its result. If the caller is cancelled, `release` is called with the
        result.
        """
        future = self.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # Runs now if the call has finished, otherwise in the thread when it finishes.
            future.add_done_callback(lambda done: _release(done, release))
            raise

    async def finish(self, call: Callable[[], object]) -> None:
        """Run a cleanup that must happen. If the caller is cancelled, it continues; if the pool is closed, it runs in
        the caller's thread.

        For calls that block only for a moment, such as closing a file.
        """
        try:
            future = self.submit(call)
        except TransportError:  # closed by us, or the interpreter is ending
            call()
            return
        await shielded(asyncio.wrap_future(future))

    async def aclose(self) -> None:
        """Refuse new calls, wait for those that are queued or running, and join the threads."""
        self.closed = True
        if self._owner is not None and self._owner_pid == os.getpid():
            if self._closing is None or self._closing.cancelled():
                # Joining blocks, and every thread of the pool may be busy: so it happens in a separate thread.
                self._closing = asyncio.ensure_future(in_thread(self._owner.shutdown))
            await shielded(self._closing)

    def _executor(self) -> ThreadPoolExecutor:
        self.check_open()
        pid = os.getpid()
        if self._owner is None or self._owner_pid != pid:
            if self._owner is not None:
                self._left_in_parent.append(self._owner)
            self._owner = ThreadPoolExecutor(self.threads, thread_name_prefix=f"asyncloader-{self.name}")
            self._owner_pid = pid
        return self._owner


def _release(done: Future[_R], release: Callable[[_R], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        release(done.result())
