"""A thread pool for the blocking calls of one transport.

Data path: transport's coroutine -> [blocking: system calls in a thread] -> bytes.

asyncio's default executor is shared with all other code of the process and lives as long as the loop. This pool belongs
to one transport, has a bounded number of threads, works after a fork, and is joined by `aclose`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from asyncloader.shielding import shielded
from asyncloader.transports.errors import ReadFailed, TransportClosed, TransportError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class BlockingPool(Executor):
    """At most `threads` threads, started on demand; an Executor for `loop.run_in_executor`.

    Not for several event loops at once: starting the threads takes no lock, so a fork cannot inherit a locked lock.

    Args:
        name: the transport's name, for the threads' names and for errors.
        threads: maximum number of threads, at least 1.
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
        self._closing: Future[None] | None = None
        self._closer: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether `aclose` or `shutdown` was called."""
        return self._closing is not None

    def check_open(self) -> None:
        """Raise TransportClosed if it is closed."""
        if self._closing is not None:
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

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close the pool from outside of a loop; blocks if `wait`. Inside a loop, use `aclose`."""
        done = self._close(cancel_futures)
        if wait:
            done.result()

    async def aclose(self) -> None:
        """Refuse new calls, wait for those that are queued or running, and join the threads."""
        await shielded(asyncio.wrap_future(self._close(cancel_futures=False)))
        if self._closer is not None:
            # Does not block: `_join` has resolved the future in its last statement. Without this, the thread might
            # still be alive for a moment after `aclose`.
            self._closer.join()

    def _close(self, cancel_futures: bool) -> Future[None]:
        """Start to close; the future is done when all threads are joined."""
        if self._owner is None or self._owner_pid != os.getpid():
            # Nothing was started in this process; a close that is in progress belongs to the parent.
            self._closer = None
            self._closing = Future()
            self._closing.set_result(None)
        elif self._closing is None:
            self._closing = Future()
            # Joining blocks, and every thread of the pool may be busy: so it happens in a separate thread.
            self._closer = threading.Thread(
                target=_join,
                args=(self._owner, cancel_futures, self._closing),
                name=f"{self.name}-close",
                daemon=True,
            )
            try:
                self._closer.start()
            except RuntimeError:  # no more threads can be started: in this thread
                self._closer = None
                _join(self._owner, cancel_futures, self._closing)
        return self._closing

    def _executor(self) -> ThreadPoolExecutor:
        self.check_open()
        pid = os.getpid()
        if self._owner is None or self._owner_pid != pid:
            if self._owner is not None:
                self._left_in_parent.append(self._owner)
            self._owner = ThreadPoolExecutor(self.threads, thread_name_prefix=f"asyncloader-{self.name}")
            self._owner_pid = pid
        return self._owner


def _join(owner: ThreadPoolExecutor, cancel_futures: bool, done: Future[None]) -> None:
    owner.shutdown(wait=True, cancel_futures=cancel_futures)
    done.set_result(None)


def _release(done: Future[_R], release: Callable[[_R], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        release(done.result())
